"""Blends: which leaf, and which sample of it, stands at a position. Closed form, exact, no index array.

:class:`Blend` mixes leaves by weight, for ever. :class:`EpochBlend` shows each leaf so many times an epoch. Both know
from :mod:`energon_lite.order.block_counts` how many samples of each leaf stand before each block of 4,096 positions:
within one sample of its share at every block's end. It is all integers and dyadic fractions, so there is nothing to
round differently on another machine, and no count that drifts.

Inside a block each leaf's samples are spread evenly with a random offset each (stratified), and in their own order: the
n-th sample of a leaf never comes before the (n-1)-th, so a small leaf finishes each of its epochs before the next.

The greedy builder of Megatron-Core, which picks the leaf that lags most, gives about the same proportions; it needs one
pass over all positions and stores 10 bytes for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import pairwise
from math import lcm
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from energon_lite.errors import UsageError
from energon_lite.order.block_counts import BLOCK, BLOCK_BITS, BlockCounts, CountRange
from energon_lite.order.hashing import hash_ints, mix64_array

__all__ = ["BLOCK", "Blend", "EpochBlend"]

Ints = NDArray[np.int64]

_32 = np.array(32, np.uint64)


class Block(NamedTuple):
    leaf: Ints  # [positions]
    position: Ints  # [positions] position inside the leaf's own stream


class Layout:
    """Blocks, laid out when they are asked for; the last few are kept.

    Args:
        counts: of the blocks.
        key: 64 bits; decides the places inside the blocks.
        start: the first position; it may lie inside a block, of which the layout then has the rest.
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
        """How many samples of each leaf stand before ``position`` (``[leaves]`` int64)."""
        number = position >> BLOCK_BITS
        counts = self.counts.block(number).before
        inside = position - max(number << BLOCK_BITS, self._start)
        return counts + np.bincount(self.block(number).leaf[:inside], minlength=len(counts)) if inside else counts

    def block(self, number: int) -> Block:
        """All positions of a block."""
        block = self._blocks.get(number)
        if block is None:
            while len(self._blocks) >= 4:
                self._blocks.pop(next(iter(self._blocks)), None)
            cut = (self._start,) if number * BLOCK < self._start else ()
            block = self._blocks[number] = lay_out(self.counts.block(number), hash_ints(self._key, number, *cut))
        return block


class Blend(Layout):
    """Positions -> (leaf, position in the leaf's own stream), in proportion to ``weights``.

    Args:
        weights: one positive finite number a leaf; only their ratios count.
        key: 64 bits; decides the places inside the blocks.

    Raises:
        UsageError: no weight, or one that is not a positive finite number.

    Example:
        >>> leaf, position = Blend([3, 1], key=0).lookup(np.arange(4096))
        >>> np.bincount(leaf).tolist()
        [3072, 1024]
    """

    def __init__(self, weights: Sequence[float], key: int):
        super().__init__(BlockCounts(integer_shares(weights)), key)


class EpochBlend:
    """Positions -> (leaf, position in the leaf's own stream), each leaf so many times an epoch.

    In epoch e a leaf of n samples with r repetitions has its samples ``floor(e * r * n) .. floor((e + 1) * r * n)``:
    with fractions too, so the total is exact over any number of epochs, and the leaf goes through its own epochs one
    by one.

    Args:
        lengths: samples of each leaf.
        repetitions: of each leaf in an epoch, positive; fractions are fine.
        key: 64 bits; decides the places inside an epoch.

    Raises:
        UsageError: a repetition that is not a positive finite number, or an epoch without any sample.

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
        """The positions of an epoch, as start and stop."""
        return sum(self._before(epoch)), sum(self._before(epoch + 1))

    def ends(self, start: int, stop: int) -> list[int]:
        """The positions between two, without both, at which an epoch begins."""
        ends, epoch = list[int](), self._epoch_of(start)
        while (end := self.bounds(epoch)[1]) < stop:
            ends.append(end)
            epoch += 1
        return ends

    def lookup(self, positions: Ints) -> tuple[Ints, Ints]:
        """Leaf and position in the leaf's stream of each of ``positions`` (``[k]`` int64, any order)."""
        leaf, place = np.empty_like(positions), np.empty_like(positions)
        left = positions
        while len(left):  # one round for each epoch that is asked for
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
        """How many samples of each leaf stand before ``position`` (``[leaves]`` int64)."""
        epoch = self._epoch_of(position)
        layout, before = self._layout(epoch)
        return before + layout.counts_before(position - self.bounds(epoch)[0])

    def _before(self, epoch: int) -> list[int]:
        """Samples of each leaf before an epoch."""
        return [int(epoch * count) for count in self._per_epoch]

    def _epoch_of(self, position: int) -> int:
        epoch = int(position / self._mean)
        while self.bounds(epoch)[0] > position:
            epoch -= 1
        while self.bounds(epoch)[1] <= position:
            epoch += 1
        return epoch

    def _layout(self, epoch: int) -> tuple[Layout, Ints]:
        found = self._epochs.get(epoch)
        if found is None:
            while len(self._epochs) >= 4:
                self._epochs.pop(next(iter(self._epochs)), None)
            before, after = (np.array(self._before(e), dtype=np.int64) for e in (epoch, epoch + 1))
            layout = Layout(BlockCounts(after - before), hash_ints(self._key, epoch))
            found = self._epochs[epoch] = (layout, before)
        return found


def lay_out(range_: CountRange, entropy: int) -> Block:
    """Spread each leaf's samples evenly over a block, at random inside its part."""
    counts = range_.inside
    slots = np.arange(range_.length)
    leaf = np.repeat(np.arange(len(counts)), counts)
    start = np.cumsum(counts) - counts
    rank = slots - start.take(leaf)
    offset = mix64_array(np.uint64(entropy) + slots.view(np.uint64)) >> _32
    # The rank-th of n samples falls into the rank-th of n equal parts of the block, at a random place of it. The
    # division is exact in floats: its operands are below 2**44, its result below 2**32.
    rank <<= 32
    rank |= offset.view(np.int64)
    time = rank.astype(np.float64)
    time /= counts.astype(np.float64).take(leaf)
    # Sorted by time, and by slot where times are equal: numpy sorts words faster than it finds the order of any.
    order = time.astype(np.int64)
    order <<= BLOCK_BITS
    order |= slots
    order.sort()
    order &= BLOCK - 1
    leaf = leaf.take(order)
    position = (range_.before - start).take(leaf)
    position += order
    return Block(leaf, position)


def blocks_of(positions: Ints, start: int = 0) -> Iterator[tuple[int, slice | Ints, slice | Ints]]:
    """The blocks in which positions lie, which of the positions, and where these stand in their block, whose first
    position is ``start`` if that is inside it."""
    if _are_consecutive(positions):
        first, stop = int(positions[0]), int(positions[-1]) + 1
        for number in range(first >> BLOCK_BITS, (stop - 1 >> BLOCK_BITS) + 1):
            origin = max(number << BLOCK_BITS, start)
            here = slice(max(origin, first), min(number + 1 << BLOCK_BITS, stop))
            yield number, slice(here.start - first, here.stop - first), slice(here.start - origin, here.stop - origin)
        return
    for number, which in _by_block(positions):
        yield number, which, positions[which] - max(number << BLOCK_BITS, start)


def _are_consecutive(positions: Ints) -> bool:
    """As they mostly are in large requests; there is at least one then."""
    count = len(positions)
    if not count or int(positions[-1]) - int(positions[0]) != count - 1:
        return False
    return bool((positions[1:] - positions[:-1] == 1).all())


def _by_block(positions: Ints) -> Iterator[tuple[int, slice | Ints]]:
    """The blocks in which positions lie, and which of the positions."""
    if not len(positions):
        return
    block_of = positions >> BLOCK_BITS
    if (block_of == block_of[0]).all():
        yield int(block_of[0]), slice(None)
        return
    steps = np.diff(block_of)
    order = None
    if (steps < 0).any():
        order = np.argsort(block_of, kind="stable")
        block_of = block_of[order]
        steps = np.diff(block_of)
    for start, stop in pairwise([0, *(np.flatnonzero(steps) + 1).tolist(), len(positions)]):
        yield int(block_of[start]), slice(start, stop) if order is None else order[start:stop]


def integer_shares(weights: Sequence[float], total: int = 1 << 62, *, zero: bool = False) -> Ints:
    """Integers in the proportion of ``weights`` that sum to exactly ``total`` (largest remainder; of equal remainders
    the first get one more). ``zero``: some, not all, of the weights may be zero."""
    for place, weight in enumerate(weights):
        if not (weight > 0 or (zero and weight == 0)) or weight == float("inf"):
            raise UsageError(
                f"weight {place} of a blend is {weight!r}", fix="give positive finite numbers; leave out what has none"
            )
    if not len(weights):
        raise UsageError("a blend of nothing", fix="give at least one weight")
    # Integers in the same proportion: nothing is rounded, and no fraction has to be reduced.
    ratios = [(weight if isinstance(weight, float) else Fraction(weight)).as_integer_ratio() for weight in weights]
    scale = lcm(*(int(below) for _, below in ratios))
    exact = [int(above) * (scale // int(below)) for above, below in ratios]
    whole = sum(exact)
    shares, rests = zip(*(divmod(weight * total, whole) for weight in exact), strict=True)
    counts = list(shares)
    for place in sorted(range(len(rests)), key=rests.__getitem__, reverse=True)[: total - sum(shares)]:
        counts[place] += 1
    return np.array(counts, dtype=np.int64)
