"""Micro-batches of a pass whose samples are first divided among the workers, as Energon does for validation.

Each data set is cut into contiguous shares, one for each worker over all ranks together. If the length is not
divisible, the first shares in bit-reversed order get one sample more, so that ranks, and halves of the ranks, have
nearly equal numbers; the next data set continues the count where the one before it ended. A worker's last micro-batch
may be short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from energon_lite.batching.capacity import Ints
from energon_lite.batching.digests import AddressList
from energon_lite.batching.plan import ChunkPlan, FixedPlan, Place
from energon_lite.errors import at_least_one


@dataclass(frozen=True)
class Shares:
    """Samples of a pass, cut into one share for each worker.

    Args:
        lengths: samples of each data set, in the sequence of the order.
        world_size: number of ranks.
        workers: workers of each rank.
    """

    lengths: tuple[int, ...]
    world_size: int = 1
    workers: int = 1

    def __post_init__(self) -> None:
        at_least_one(world_size=self.world_size, workers=self.workers)

    @cached_property
    def _cut(self) -> tuple[Ints, Ints]:
        """First position of each share of each data set, ``[data sets, shares]``, and the edges of the data sets
        within each share, ``[data sets + 1, shares]``."""
        count = self.world_size * self.workers
        begun = 0
        sizes = np.empty((len(self.lengths), count), dtype=np.int64)
        turn = np.arange(count)
        for leaf, length in enumerate(self.lengths):
            size, more = divmod(length, count)
            sizes[leaf, _bit_reversal(turn)] = size + ((turn - begun) % count < more)
            begun += length
        edges = np.vstack([np.zeros((1, count), dtype=np.int64), sizes.cumsum(axis=0)])
        return sizes.ravel().cumsum().reshape(sizes.shape) - sizes, edges

    @property
    def sizes(self) -> Ints:
        """Samples of each share, ``[shares]``; shares are numbered rank by rank."""
        return self._cut[1][-1]

    def share_of(self, turn: int) -> int:
        """Share of a turn: the first worker of each rank, then the second one of each, and so on."""
        return turn % self.world_size * self.workers + turn // self.world_size

    def positions(self, share: int, first: int, stop: int) -> Ints:
        """Positions in the order of samples ``first`` to ``stop - 1`` of a share, ``[k]``."""
        starts, edges = self._cut
        own = np.arange(first, min(stop, edges[-1, share]))
        leaf = np.searchsorted(edges[1:, share], own, side="right")
        return starts[leaf, share] + own - edges[leaf, share]


@dataclass(frozen=True)
class DealtPlan(FixedPlan):
    """Plan of fixed-size micro-batches, each from one worker's share; the workers of all ranks take turns.

    Args:
        shares: the division of the samples, which is part of the plan: it does not depend on the actual workers.

    Example:
        >>> plan = DealtPlan(ConcatOrder([5]), batch_size=2, shares=Shares((5,), workers=2))
        >>> [[index for _, index, _ in batch] for batch in plan.batches([(0,), (1,), (2,)])]
        [[0, 1], [3, 4], [2]]
    """

    shares: Shares = Shares(())

    @cached_property
    def _batches(self) -> Ints:
        """Number of micro-batches of each share, ``[shares]``."""
        samples = self.shares.sizes
        return samples // self.chunk if self.drop_last else -(-samples // self.chunk)

    @cached_property
    def _rest(self) -> list[Place]:
        """``(number within its share, share)`` of the micro-batches after the shortest share has ended."""
        least, most = int(self._batches.min()), int(self._batches.max())
        turns = [self.shares.share_of(turn) for turn in range(len(self._batches))]
        return [(number, share) for number in range(least, most) for share in turns if self._batches[share] > number]

    def _count(self, pass_number: int) -> int:
        return int(self._batches.sum())

    def batches(self, places: Sequence[Place], pass_number: int = 0) -> list[Sequence[tuple[int, ...]]]:
        """See :class:`~energon_lite.batching.plan.Plan`."""
        addresses: list[Sequence[tuple[int, ...]]] = []
        for place in places:
            addresses.append(AddressList(self.order.lookup(self._positions(place[0])).rows()))
        return addresses

    def _positions(self, number: int) -> Ints:
        """Positions in the order of micro-batch ``number``, ``[samples]``."""
        if number >= self._count(0):
            return np.empty(0, dtype=np.int64)
        full = int(self._batches.min()) * len(self._batches)
        before, turn = divmod(number, len(self._batches))
        before, share = self._rest[number - full] if number >= full else (before, self.shares.share_of(turn))
        return self.shares.positions(share, before * self.chunk, (before + 1) * self.chunk)

    def describe(self) -> str:
        return f"{super().describe()}, each of one of {len(self._batches)} shares"


@dataclass(frozen=True)
class DealtChunkPlan(ChunkPlan):
    """Chunks of one worker's share each, for content-decided batches: a lane is a worker.

    The remainder of a chunk moves to the next chunk of its lane. So batches equal those of a worker that reads its
    share from end to end.

    Args:
        shares: the division of the samples, which is part of the plan; there is one lane for each share.
    """

    shares: Shares = Shares(())
    fills_buffers: ClassVar[bool] = True

    def _count(self, pass_number: int) -> int:
        return len(self.shares.sizes) * -(-int(self.shares.sizes.max()) // self.chunk)

    def order_positions(self, pass_number: int, number: int) -> Ints:
        """See :class:`~energon_lite.batching.plan.ChunkPlan`."""
        chunk, turn = divmod(number, len(self.shares.sizes))
        return self.shares.positions(self.shares.share_of(turn), chunk * self.chunk, (chunk + 1) * self.chunk)

    def stride(self, lanes: int, *, is_endless: bool) -> int:
        return lanes if self.carries or self.pushback else 0


def _bit_reversal(numbers: Ints) -> Ints:
    """Permutation of a range: its two halves interleaved, each permuted in the same way.

    For a power of two, this is the order by reversed bits.
    """
    if len(numbers) <= 2:
        return numbers
    middle = len(numbers) // 2
    arranged = np.empty_like(numbers)
    # The second half may have one more element: it stands at the end.
    left, right = _bit_reversal(numbers[:middle]), _bit_reversal(numbers[middle:])
    arranged[0 : 2 * middle : 2], arranged[1 : 2 * middle : 2] = left, right[:middle]
    arranged[2 * middle :] = right[middle:]
    return arranged
