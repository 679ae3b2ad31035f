"""Positions of a sample in an order: the inverse of :mod:`energon_lite.order.orders`, by arithmetic.

A sample's places in its leaf's stream come from the inverse permutation of each epoch. A place in the stream has one
position in the blend, which is found by search: the number of samples of a leaf before a position is known in closed
form, and grows with the position. So the occurrences of a sample before position 10**12 are found without a scan.

Samples that are drawn with replacement are the exception: their draws have no inverse, and are scanned.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from energon_lite.errors import UsageError
from energon_lite.order.orders import BlendOrder, ConcatOrder, EpochBlendOrder, Order, position_of
from energon_lite.order.shuffle import Leaves

Ints = NDArray[np.int64]

#: Cycles whose permutations are inverted at once.
_CYCLES = 1 << 10
#: Drawn positions that are scanned at once.
_DRAWS = 1 << 20


class StreamPlaces:
    """Places of a sample in the stream of its leaf.

    Args:
        leaves: the streams of all leaves.
        leaf, index: leaf and index of the sample.

    Example:
        >>> places = StreamPlaces(Leaves([LeafOrder(length=5, key=1, copies=None)]), leaf=0, index=3)
        >>> places.count(14), list(places.between(0, 14))
        (3, [3, 8, 13])
    """

    def __init__(self, leaves: Leaves, leaf: int, index: int):
        self._leaves = leaves
        self._leaf = leaf
        self._index = index
        self._length = leaves.cycle_length(leaf)

    def count(self, stop: int) -> int:
        """Number of occurrences of the sample before a place."""
        if self._length is None:
            return sum(1 for _ in self.between(0, stop))
        cycles, rest = divmod(stop, self._length)
        of_cycle = self._places(np.array([cycles], dtype=np.int64))[0] - cycles * self._length
        return cycles * len(of_cycle) + int((of_cycle < rest).sum())

    def between(self, start: int, stop: int, *, newest: bool = False) -> Iterator[int]:
        """Places from ``start`` on and before ``stop``, ascending; with ``newest``, descending."""
        length, size = (_DRAWS, 1) if self._length is None else (self._length, _CYCLES)
        last = -(-stop // length)
        turns = range(start // length, last, size)
        for turn in reversed(turns) if newest else turns:
            cycles = np.arange(turn, min(turn + size, last), dtype=np.int64)
            places = np.sort(self._places(cycles).ravel())
            places = places[(places >= start) & (places < stop)]
            yield from (places[::-1] if newest else places).tolist()

    def _places(self, cycles: Ints) -> Ints:
        """Places in some cycles, ``[cycles, places]``; for draws, a cycle is a block of ``_DRAWS`` draws."""
        if self._length is not None:
            return self._leaves.places(self._leaf, self._index, cycles)
        drawn = np.concatenate([np.arange(block * _DRAWS, (block + 1) * _DRAWS) for block in cycles.tolist()])
        index, _ = self._leaves.lookup(np.full(len(drawn), self._leaf, dtype=np.int64), drawn)
        return drawn[index == self._index].reshape(1, -1)


class Occurrences:
    """Positions of an order at which a sample occurs.

    Args:
        order: the order.
        leaf, index: leaf and index of the sample.

    Attributes:
        before_rebase: number of occurrences in other blends, before this one began in the middle of the run.

    Example:
        >>> order = BlendOrder([LeafOrder(10**9, 1), LeafOrder(10**6, 2)], [3, 1], key=0)
        >>> found = Occurrences(order, leaf=1, index=7)
        >>> position = next(found.between(0, 10**10))
        >>> order.lookup(np.array([position])).rows()
        [(1, 7, 0)]
    """

    def __init__(self, order: Order, leaf: int, index: int):
        self._leaf = leaf
        self.before_rebase = 0
        if isinstance(order, ConcatOrder):
            self._alone: int | None = order.position(leaf, index)
            return
        if not isinstance(order, (BlendOrder, EpochBlendOrder)):
            raise UsageError(f"where a sample is in a {type(order).__name__} is not known", fix="look at its batches")
        self._alone = None
        self._mixed = order
        self._stream = StreamPlaces(order.leaves, leaf, index)
        rebase = order.rebase
        self._first, self._begun = (0, 0) if rebase is None else (rebase.position, rebase.starts[leaf])
        self.before_rebase = self._stream.count(self._begun)

    def count(self, stop: int) -> int:
        """Number of occurrences of the sample before a position, including those before a rebase."""
        if self._alone is not None:
            return int(self._alone < stop)
        return self._stream.count(self._shown(stop)) if stop > self._first else self.before_rebase

    def between(self, start: int, stop: int, *, newest: bool = False) -> Iterator[int]:
        """Positions from ``start`` on and before ``stop``, ascending; with ``newest``, descending.

        Positions before a rebase belong to another blend, and are unknown.
        """
        if self._alone is not None:
            if start <= self._alone < stop:
                yield self._alone
            return
        start = max(start, self._first)
        if start >= stop:
            return
        blend = self._mixed.blend
        for place in self._stream.between(self._shown(start), self._shown(stop), newest=newest):
            place -= self._begun
            yield self._first + (place if blend is None else position_of(blend, self._leaf, place))

    def _shown(self, position: int) -> int:
        """Number of samples of the leaf's stream before a position."""
        return int(self._mixed.counts_before(position)[self._leaf])
