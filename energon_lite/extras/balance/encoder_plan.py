"""Which rank encodes which image: the image encoder's work, dealt apart from that of the language model.

Micro-batches are put together by tokens, so ranks have images of different sizes and numbers. The encoder does not care
whose images it has: they are sent to where there is least to do, and what becomes of them is sent back. Who sends what
to whom is arithmetic over the images of a turn (one micro-batch for each rank), the same on every rank; so nothing has
to be agreed on, and the exchange itself, an all-to-all there and back, is all that is left.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from energon_lite.batching.capacity import Ints
from energon_lite.errors import TopologyError, UsageError

__all__ = ["EncoderPlan"]

#: An image is sent away only if that takes one part in so many from the rank with most to do.
_WORTH = 50


@dataclass(frozen=True)
class EncoderPlan:
    """Who encodes the images of one turn.

    Args:
        owner: the rank in whose micro-batch each image is, ascending, ``[images]``.
        encoder: the rank that encodes it, ``[images]``.
        ranks: how many there are.

    Example:
        >>> plan = EncoderPlan.of(owner=np.array([0, 0, 0, 1]), costs=np.array([4, 9, 5, 1]), ranks=2)
        >>> plan.encoder.tolist(), plan.send(0), plan.receive(1)
        ([1, 0, 1, 1], [[1], [0, 2]], [2, 1])
        >>> plan.encoded(1), plan.give_back(1), plan.order_back(0)
        ([0, 2, 3], [[0, 1], [2]], [1, 0, 2])
    """

    owner: Ints
    encoder: Ints
    ranks: int

    @classmethod
    def of(cls, owner: Ints, costs: Ints, ranks: int) -> EncoderPlan:
        """The plan that makes encoding as even as can be found, with as few images sent as that takes.

        The costliest go first: each stays where it is while its rank has less than its share, and goes to the rank that
        has least otherwise.

        Args:
            owner: the rank in whose micro-batch each image is, ascending, ``[images]``.
            costs: of encoding each, integers ``[images]``.
            ranks: how many there are.

        Raises:
            TopologyError: an image is on a rank that there is not, or owners do not ascend.
            UsageError: costs are no integers, negative, or not one for each image.
        """
        owner = np.asarray(owner, dtype=np.int64)
        if len(owner) and (owner.min() < 0 or owner.max() >= ranks or (np.diff(owner) < 0).any()):
            raise TopologyError(
                f"images of ranks {int(owner.min())} to {int(owner.max())}, of {ranks}",
                fix="give the rank of each image, 0 first",
            )
        costs = np.asarray(costs)
        if costs.shape != owner.shape or (len(costs) and (costs.dtype.kind not in "iu" or costs.min() < 0)):
            raise UsageError(
                f"costs are {costs.dtype}{list(costs.shape)} for {len(owner)} images",
                fix="give an integer of 0 or more for each image",
            )
        costs = costs.astype(np.int64)
        share = -(-int(costs.sum()) // max(1, ranks))
        allowed = max(share, int(costs.max(initial=0)))
        allowed += allowed // _WORTH
        encoder, loads, left = owner.copy(), [0] * ranks, []
        order = np.argsort(-costs, kind="stable").tolist()
        for image in order:
            mine, cost = int(owner[image]), int(costs[image])
            if loads[mine] + cost <= allowed:
                loads[mine] += cost
            else:
                left.append(image)
        heap = [(load, rank) for rank, load in enumerate(loads)]
        heapq.heapify(heap)
        for image in left:
            load, rank = heapq.heappop(heap)
            encoder[image] = rank
            heapq.heappush(heap, (load + int(costs[image]), rank))
        return cls(owner, encoder, ranks)

    def loads(self, costs: Ints) -> Ints:
        """What each rank has to encode, ``[ranks]``."""
        loads = np.zeros(self.ranks, dtype=np.int64)
        np.add.at(loads, self.encoder, costs)
        return loads

    def send(self, rank: int) -> list[list[int]]:
        """For each rank, which of this rank's images go there, numbered as they are in its micro-batch; those that it
        encodes itself are in its own list."""
        mine = self.encoder[self._own(rank)]
        return [np.flatnonzero(mine == to).tolist() for to in range(self.ranks)]

    def receive(self, rank: int) -> list[int]:
        """How many images come from each rank, this one among them."""
        counts: list[int] = self._table[:, rank].tolist()
        return counts

    def encoded(self, rank: int) -> list[int]:
        """The images that this rank encodes, numbered over all ranks, in the order in which they come."""
        images: list[int] = np.flatnonzero(self.encoder == rank).tolist()
        return images

    def give_back(self, rank: int) -> list[list[int]]:
        """For each rank, which of the images that this rank has encoded go back there, as they came."""
        ends = np.cumsum([0, *self.receive(rank)]).tolist()
        return [list(range(first, stop)) for first, stop in pairwise(ends)]

    def order_back(self, rank: int) -> list[int]:
        """What has come back to this rank, in the order of its images: the place of each among all that came."""
        sent = [image for images in self.send(rank) for image in images]
        order: list[int] = np.argsort(np.array(sent, dtype=np.int64), kind="stable").tolist()
        return order

    @cached_property
    def _table(self) -> Ints:
        """Images by owner and encoder, ``[ranks, ranks]``."""
        table = np.zeros((self.ranks, self.ranks), dtype=np.int64)
        np.add.at(table, (self.owner, self.encoder), 1)
        return table

    def _own(self, rank: int) -> slice:
        return slice(*np.searchsorted(self.owner, [rank, rank + 1]).tolist())
