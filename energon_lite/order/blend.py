"""Blends: from a position to a leaf and a position in the leaf's stream. Closed form, exact, no index array.

:class:`Blend` mixes leaves by weight, endlessly. :class:`EpochBlend` repeats each leaf a given number of times an
epoch. Both get the number of samples of each leaf before each block of 4,096 positions from
:mod:`energon_lite.order.block_counts`: at every block's end it is within one sample of the leaf's share. All numbers
are integers and dyadic fractions, so rounding is equal on every machine, and counts do not drift.

Inside a block each leaf's samples are spread evenly with a random offset each (stratified), and in their own order: the
n-th sample of a leaf never comes before the (n-1)-th, so a small leaf finishes each of its epochs before the next.

The greedy builder of Megatron-Core, which picks the leaf with the largest deficit, gives about the same proportions; it
needs one pass over all positions and stores 10 bytes for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import pairwise
from math import lcm
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from energon_lite.errors import UsageError
from energon_lite.order.block_counts import BLOCK, BLOCK_BITS, BlockCounts, CountRange
from energon_lite.order.hashing import hash_ints, mix64_array

Ints = NDArray[np.int64]
T = TypeVar("T")

_32 = np.array(32, np.uint64)


class Block(NamedTuple):
    """Contents of one block of positions."""

    leaf: Ints  # [positions]
    position: Ints  # [positions] position inside the leaf's own stream


class Layout:
    """Blocks of a blend, computed on demand; the last few are cached.

    Args:
        counts: counts of samples in the blocks.
        key: 64 bits; determines the places inside the blocks.
        start: the first position; if it lies inside a block, the layout has only the rest of that block.
    """

    def __init__(self, counts: BlockCounts, key: int, start: int = 0):
        self.counts = counts
        self._key = key
        self._start = start
        self._blocks: dict[int, Block] = {}

    def lookup(self, positions: Ints) -> tuple[Ints, Ints]:
        """Leaf and position in the leaf's stream of each of ``positions`` (``[k]`` int64, any order)."""
        leaf, position = np.empty_like(positions), np.empty_like(positions)
        for number, here, slots in blocks_of(positions, self._start):
            block = self.block(number)
            leaf[here], position[here] = block.leaf[slots], block.position[slots]
        return leaf, position

    def counts_before(self, position: int) -> Ints:
        """Number of samples of each leaf before ``position`` (``[leaves]`` int64)."""
        number = position >> BLOCK_BITS
        counts = self.counts.block(number).before
        inside = position - max(number << BLOCK_BITS, self._start)
        return counts + np.bincount(self.block(number).leaf[:inside], minlength=len(counts)) if inside else counts

    def block(self, number: int) -> Block:
        """Leaves and stream positions of all positions of a block."""

        def made() -> Block:
            cut = (self._start,) if number * BLOCK < self._start else ()
            return lay_out(self.counts.block(number), hash_ints(self._key, number, *cut))

        return recent(self._blocks, number, made)


class Blend(Layout):
    """Blend of leaves in proportion to ``weights``: positions -> (leaf, position in the leaf's own stream).

    Args:
        weights: one positive finite number for each leaf; only their ratios matter.
        key: 64 bits; determines the places inside the blocks.

    Raises:
        UsageError: there is no weight, or one is not a positive finite number.

    Example:
        >>> leaf, position = Blend([3, 1], key=0).lookup(np.arange(4096))
        >>> np.bincount(leaf).tolist()
        [3072, 1024]
    """

    def __init__(self, weights: Sequence[float], key: int):
        super().__init__(BlockCounts(integer_shares(weights)), key)


class EpochBlend:
    """Blend with a number of repetitions for each leaf: positions -> (leaf, position in the leaf's own stream).

    In epoch e a leaf of n samples with r repetitions has its samples ``floor(e * r * n) .. floor((e + 1) * r * n)``,
    also for fractional r. So the total is exact over any number of epochs, and the leaf finishes each of its own epochs
    before the next.

    Args:
        lengths: samples of each leaf.
        repetitions: repetitions of each leaf in an epoch, positive; fractions are allowed.
        key: 64 bits; determines the places inside an epoch.

    Raises:
        UsageError: a repetition is not a positive finite number, or an epoch has no sample.

    Example:
        >>> blend = EpochBlend([100, 10], [1.5, 1], key=0)
        >>> blend.bounds(0), blend.bounds(1)
        ((0, 160), (160, 320))
    """

    def __init__(self, lengths: Sequence[int], repetitions: Sequence[float], key: int):
        for place, repetition in enumerate(repetitions):
            if not 0 < repetition < float("inf"):
                raise UsageError(f"{repetition!r} repetitions of leaf {place}", fix="give a positive number")
        self._per_epoch = [
            length * Fraction(str(repetition)) for length, repetition in zip(lengths, repetitions, strict=True)
        ]
        self._mean = sum(self._per_epoch)
        if self._mean < 1:
            raise UsageError(f"an epoch of {float(self._mean):g} samples", fix="give larger repetitions")
        self._key = key
        self._epochs: dict[int, tuple[Layout, Ints]] = {}

    def bounds(self, epoch: int) -> tuple[int, int]:
        """First position of an epoch, and its end, exclusive."""
        return sum(self._before(epoch)), sum(self._before(epoch + 1))

    def ends(self, start: int, stop: int) -> list[int]:
        """Positions between ``start`` and ``stop``, both excluded, at which an epoch begins."""
        ends, epoch = list[int](), self._epoch_of(start)
        while (end := self.bounds(epoch)[1]) < stop:
            ends.append(end)
            epoch += 1
        return ends

    def lookup(self, positions: Ints) -> tuple[Ints, Ints]:
        """Leaf and position in the leaf's stream of each of ``positions`` (``[k]`` int64, any order)."""
        leaf, place = np.empty_like(positions), np.empty_like(positions)
        left = positions
        while len(left):  # one round for each epoch that positions lie in
            epoch = self._epoch_of(int(left.min()))
            start, stop = self.bounds(epoch)
            here = (
                slice(None)
                if len(left) == len(positions) and left.max() < stop
                else (positions >= start) & (positions < stop)
            )
            layout, before = self._layout(epoch)
            leaf[here], offset = layout.lookup(positions[here] - start)
            place[here] = before[leaf[here]] + offset
            left = left[left >= stop]
        return leaf, place

    def counts_before(self, position: int) -> Ints:
        """Number of samples of each leaf before ``position`` (``[leaves]`` int64)."""
        epoch = self._epoch_of(position)
        layout, before = self._layout(epoch)
        return before + layout.counts_before(position - self.bounds(epoch)[0])

    def _before(self, epoch: int) -> list[int]:
        """Number of samples of each leaf before an epoch, ``[leaves]``."""
        return [int(epoch * count) for count in self._per_epoch]

    def _epoch_of(self, position: int) -> int:
        epoch = int(position / self._mean)  # exact, and not too large: bounds are rounded down
        while self.bounds(epoch)[1] <= position:
            epoch += 1
        return epoch

    def _layout(self, epoch: int) -> tuple[Layout, Ints]:
        def made() -> tuple[Layout, Ints]:
            before, after = (np.array(self._before(e), dtype=np.int64) for e in (epoch, epoch + 1))
            return Layout(BlockCounts(after - before), hash_ints(self._key, epoch)), before

        return recent(self._epochs, epoch, made)


def recent(made: dict[int, T], number: int, make: Callable[[], T]) -> T:
    """Return the entry of this number in a cache of the last four, made if it is missing."""
    found = made.get(number)
    if found is None:
        while len(made) >= 4:
            made.pop(next(iter(made)), None)
        found = made[number] = make()
    return found


def lay_out(range_: CountRange, entropy: int) -> Block:
    """Lay out a block: spread each leaf's samples evenly, each at a random place within its part of the block."""
    counts = range_.inside
    slots = np.arange(range_.length)
    leaf = np.repeat(np.arange(len(counts)), counts)
    start = np.cumsum(counts) - counts
    rank = slots - start.take(leaf)
    offset = mix64_array(np.uint64(entropy) + slots.view(np.uint64)) >> _32
    # The rank-th of n samples falls into the rank-th of n equal parts of the block, at a random place in it. The
    # division is exact in floats: its operands are below 2**44, its result below 2**32.
    rank <<= 32
    rank |= offset.view(np.int64)
    time = rank.astype(np.float64)
    time /= counts.astype(np.float64).take(leaf)
    # Sort by time, and by slot for equal times: numpy sorts integers faster than it computes an argsort.
    order = time.astype(np.int64)
    order <<= BLOCK_BITS
    order |= slots
    order.sort()
    order &= BLOCK - 1
    leaf = leaf.take(order)
    position = (range_.before - start).take(leaf)
    position += order
    return Block(leaf, position)


def blocks_of(positions: Ints, start: int = 0) -> Iterator[tuple[int, slice | Ints, Ints]]:
    """Group positions by block.

    Args:
        positions: ``[k]`` int64, any order.
        start: first position of the layout; it matters only for the block that it lies in.

    Yields:
        Block number, the indices of its positions in ``positions``, and their offsets in the block.
    """
    block_of, order = positions >> BLOCK_BITS, None
    steps = np.diff(block_of)
    if (steps < 0).any():
        order = np.argsort(block_of, kind="stable")
        block_of = block_of[order]
        steps = np.diff(block_of)
    for first, stop in pairwise([0, *(np.flatnonzero(steps) + 1).tolist(), len(positions)]):
        if first < stop:
            number, which = int(block_of[first]), slice(first, stop) if order is None else order[first:stop]
            yield number, which, positions[which] - max(number << BLOCK_BITS, start)


def integer_shares(weights: Sequence[float], total: int = 1 << 62, *, zero: bool = False) -> Ints:
    """Integers in proportion to ``weights`` that sum to exactly ``total``, ``[leaves]``.

    Rounding is by largest remainder; of equal remainders the first get one more.

    Args:
        weights: finite numbers above 0.
        total: sum of the result.
        zero: weights of 0 are allowed, but not for all.
    """
    for place, weight in enumerate(weights):
        if not (weight > 0 or (zero and weight == 0)) or weight == float("inf"):
            raise UsageError(
                f"weight {place} of a blend is {weight!r}", fix="give positive finite numbers; leave out what has none"
            )
    if not len(weights):
        raise UsageError("a blend of nothing", fix="give at least one weight")
    # Integers in the same proportion, without rounding or reduction of fractions.
    ratios = [(w if hasattr(w, "as_integer_ratio") else Fraction(w)).as_integer_ratio() for w in weights]
    scale = lcm(*(int(below) for _, below in ratios))
    exact = [int(above) * (scale // int(below)) for above, below in ratios]
    whole = sum(exact)
    shares, rests = zip(*(divmod(weight * total, whole) for weight in exact), strict=True)
    counts = list(shares)
    for place in sorted(range(len(rests)), key=rests.__getitem__, reverse=True)[: total - sum(shares)]:
        counts[place] += 1
    return np.array(counts, dtype=np.int64)
