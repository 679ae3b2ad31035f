"""Assignment of images to ranks for encoding, independent of the ranks that use them.

Micro-batches are grouped by tokens, so ranks have images of different sizes and numbers. The encoder can process any
rank's images: images are sent to the least loaded rank, and their embeddings are sent back. Senders and receivers are
computed from the images of a turn (one micro-batch for each rank), equally on every rank. So no communication is needed
to agree on them; only the exchange itself, an all-to-all there and back, remains.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from energon_lite.batching.capacity import Ints
from energon_lite.errors import TopologyError, UsageError

#: Tolerance: a rank may exceed its share by this fraction (1/50) before an image is sent away.
_WORTH = 50


@dataclass(frozen=True)
class EncoderPlan:
    """Assignment of the images of one turn to encoding ranks.

    Args:
        owner: the rank whose micro-batch has the image, ascending, ``[images]``.
        encoder: the rank that encodes it, ``[images]``.
        ranks: number of ranks.

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
        """Balance the encoding work with as few transfers as possible, by a greedy heuristic.

        Images are placed by descending cost: each stays on its rank while that rank is below its share; otherwise it
        goes to the least loaded rank.

        Args:
            owner: the rank whose micro-batch has the image, ascending, ``[images]``.
            costs: cost of encoding each image, integers ``[images]``.
            ranks: number of ranks.

        Raises:
            TopologyError: an owner is not a valid rank, or owners do not ascend.
            UsageError: costs are not integers, are negative, or do not match the images.
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
        encoder = owner.copy()
        loads = [0] * ranks
        left = []
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
        """Encoding cost of each rank, ``[ranks]``."""
        loads = np.zeros(self.ranks, dtype=np.int64)
        np.add.at(loads, self.encoder, costs)
        return loads

    def send(self, rank: int) -> list[list[int]]:
        """Images that this rank sends to each rank, numbered as in its micro-batch.

        Images that it encodes itself are in the list for its own rank.
        """
        mine = self.encoder[slice(*np.searchsorted(self.owner, [rank, rank + 1]).tolist())]
        return [np.flatnonzero(mine == to).tolist() for to in range(self.ranks)]

    def receive(self, rank: int) -> list[int]:
        """Number of images that this rank gets from each rank, itself included."""
        counts: list[int] = np.bincount(self.owner[self.encoder == rank], minlength=self.ranks).tolist()
        return counts

    def encoded(self, rank: int) -> list[int]:
        """Images that this rank encodes, numbered over all ranks, in order of arrival."""
        images: list[int] = np.flatnonzero(self.encoder == rank).tolist()
        return images

    def give_back(self, rank: int) -> list[list[int]]:
        """Encoded images that this rank returns to each rank, numbered in order of arrival."""
        ends = np.cumsum([0, *self.receive(rank)]).tolist()
        return [list(range(first, stop)) for first, stop in pairwise(ends)]

    def order_back(self, rank: int) -> list[int]:
        """Permutation that brings returned images into this rank's own order: index of each among the returned ones."""
        sent = [image for images in self.send(rank) for image in images]
        order: list[int] = np.argsort(np.array(sent, dtype=np.int64), kind="stable").tolist()
        return order
