"""Blends whose weights change during the run, in closed form: a stage has constant or linearly changing shares.

In a stage the share of each leaf is constant, or changes linearly to another one. The ideal number of samples of each
leaf before a position is an integral (:class:`ShareIntegral`). As in a constant blend, a range of
positions is halved until a block is left, and at each middle every leaf is rounded to within one sample of its
integral.

The samples before the end of a stage do not depend on later stages, so the stages ahead may be edited during a run. A
constant stage is halved as if it were endless; only the counts of its last, cut block depend on its end. A leaf without
a share in a stage has no sample in it. For that, the counts at the end of the previous stage are rounded such that the
leaves that leave are, together, as close to their integral as the others: a second way in which the last block, and
only it, depends on the next stage.

Levanter has mixtures in stages with a closed form, too; its stages start at multiples of a block and are constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from energon_lite.errors import UsageError
from energon_lite.order.blend import Layout, integer_shares
from energon_lite.order.block_counts import BLOCK, BlockCounts, CountRange, fill
from energon_lite.order.permutation import MAX_LENGTH

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

#: Fractional bits of an :class:`Ideal`, and of a share.
FRACTION_BITS = 62
_LIMB = 31
_LIMB_MASK = (1 << _LIMB) - 1
_FRACTION_MASK = np.uint64((1 << FRACTION_BITS) - 1)


class Ideal(NamedTuple):
    """Fractional number of samples for each leaf: ``whole + fraction / 2**62``, ``[leaves]`` each."""

    whole: Ints
    fraction: NDArray[np.uint64]

    def plus(self, other: Ideal) -> Ideal:
        """The sum of two counts, leaf by leaf."""
        fraction = self.fraction + other.fraction
        carry = (fraction >> np.uint64(FRACTION_BITS)).view(np.int64)
        return Ideal(self.whole + other.whole + carry, fraction & _FRACTION_MASK)

    def total(self, which: NDArray[np.bool_]) -> int:
        """The sum over some leaves, rounded to the nearest integer."""
        halves = (self.fraction[which] >> np.uint64(_LIMB)).sum(dtype=np.uint64)  # the lower bits are negligible
        return int(self.whole[which].sum()) + ((int(halves) + (1 << (_LIMB - 1))) >> _LIMB)


def begin(leaves: int) -> Ideal:
    """Ideal counts of 0 for each leaf."""
    return Ideal(np.zeros(leaves, dtype=np.int64), np.zeros(leaves, dtype=np.uint64))


@dataclass(frozen=True, eq=False)
class ShareIntegral:
    """Ideal counts of samples of each leaf along one stretch of positions: integrals of the shares, in fixed point.

    Within the stretch the share of a leaf changes linearly from ``first`` to ``last``. Its integral from the start of
    the stretch to ``x`` positions further is ``first * (x - v) + last * v`` with ``v = x^2 / (2 * length)``. Shares are
    integers that sum to 2**62, and ``v`` is one number for all leaves, rounded to 2**-31. So the integrals of all
    leaves sum to ``x`` for any rounding of it, and the rest is multiplication of large integers in limbs of 31 bits:
    exact to 2**-62 at every position below 2**62, and equal on every machine.

    Args:
        start: first position of the stretch.
        base: ideal counts before it.
        first: shares at its start, integers that sum to 2**62.
        last: shares at its end; None: they are constant.
        length: positions of the stretch; unused if shares are constant.

    Example:
        >>> half = 1 << 61
        >>> integral = ShareIntegral(0, begin(2), np.array([0, 2 * half]), np.array([2 * half, 0]), length=8)
        >>> integral.before(4).whole.tolist(), integral.before(8).whole.tolist()
        ([1, 3], [4, 4])
    """

    start: int
    base: Ideal
    first: Ints
    last: Ints | None
    length: int

    def before(self, position: int) -> Ideal:
        """Ideal counts before a position of the stretch, counted from the start of the run."""
        x = position - self.start
        if self.last is None:
            return self.base.plus(_times(self.first, x << _LIMB))
        v = ((x * x << _LIMB) + self.length) // (2 * self.length)
        done = self.base.plus(_times(self.first, (x << _LIMB) - v))
        return done.plus(_times(self.last, v))

    def idle(self) -> NDArray[np.bool_]:
        """Mask of the leaves without a share anywhere in the stretch, ``[leaves]``."""
        idle: NDArray[np.bool_] = self.first == 0
        return idle if self.last is None else idle & (self.last == 0)


def _times(shares: Ints, x: int) -> Ideal:
    """``shares / 2**62 * x / 2**31``, rounded down to 2**-62. ``x`` is at most 2**93."""
    low, high = (shares & _LIMB_MASK).view(np.uint64), (shares >> _LIMB).view(np.uint64)
    x0, x1, x2 = (np.uint64(part) for part in (x & _LIMB_MASK, x >> _LIMB & _LIMB_MASK, x >> 2 * _LIMB))
    limb, mask = np.uint64(_LIMB), np.uint64(_LIMB_MASK)
    # Products of limbs are at most 2**62: two of them and a carry fit into 64 bits.
    digit = high * x0 + low * x1 + (low * x0 >> limb)
    upper = high * x1 + low * x2 + (digit >> limb)
    whole = high * x2 + (upper >> limb)
    return Ideal(whole.view(np.int64), (upper & mask) << limb | digit & mask)


@dataclass(frozen=True)
class WeightStage:
    """Weights of a blend from one position to the next stage.

    Args:
        start: position of its first sample.
        weights: one for each leaf, at the start; not negative, and not all zero. Only ratios matter.
        last: the weights at the end of the stage. In between, each leaf's share (its weight divided by their sum)
            changes linearly. None: weights are constant.

    Example:
        >>> ramp = [WeightStage(0, (0.9, 0.1), last=(0.1, 0.9)), WeightStage(1_000_000, (0.1, 0.9))]
    """

    start: int
    weights: tuple[float, ...]
    last: tuple[float, ...] | None = None

    def idle(self) -> Flags:
        """Mask of the leaves without a share anywhere in the stage, ``[leaves]``."""
        return ~np.any([self.weights, self.last or self.weights], axis=0)


def check_stages(stages: Sequence[WeightStage], leaves: int) -> None:
    """Refuse stages that cannot be blended.

    Raises:
        UsageError: there is no stage, the first one does not start at 0, starts do not increase, a stage has a wrong
            number of weights or bad weights, or the last stage has changing shares without an end.
    """
    if not stages:
        raise UsageError("a blend without a stage", fix="give at least one, which starts at 0")
    if stages[0].start != 0:
        raise UsageError(f"the first stage starts at {stages[0].start}", fix="let it start at position 0")
    for stage, following in pairwise(stages):
        if following.start <= stage.start:
            raise UsageError(
                f"a stage that starts at {following.start} after one that starts at {stage.start}",
                fix="give stages in the order of their positions",
            )
    if stages[-1].start >= MAX_LENGTH:
        raise UsageError(f"a stage starts at {stages[-1].start}", fix="positions end at 2**62")
    if stages[-1].last is not None:
        raise UsageError("the slope of the last stage never ends", fix="add a stage where the slope ends")
    for stage in stages:
        for weights in (stage.weights, stage.last or stage.weights):
            if len(weights) != leaves:
                raise UsageError(
                    f"{leaves} leaves, but {len(weights)} weights in the stage from {stage.start} on",
                    fix="give one weight for each leaf",
                )
            for leaf, weight in enumerate(weights):
                if not 0 <= weight < float("inf"):
                    raise UsageError(
                        f"weight {leaf} of the stage from {stage.start} on is {weight!r}",
                        fix="give finite numbers, 0 where a leaf is not to be used",
                    )
            if not any(weights):
                raise UsageError(
                    f"all weights are zero in the stage from {stage.start} on", fix="give one of them a weight"
                )


def last_position(end: int) -> int:
    """First of the positions whose samples depend on the end of their stage, if it ends at ``end``."""
    return (end - 1) // BLOCK * BLOCK


class StagedBlend:
    """Blend with stages of weights: positions -> (leaf, position in the leaf's own stream).

    Each leaf's stream continues from stage to stage without a gap. With a single constant stage this is exactly
    :class:`~energon_lite.order.blend.Blend`.

    Args:
        stages: in the order of their starts.
        key: 64 bits; determines the places inside the blocks.
        length: total number of positions; at its end, too, counts are within one sample of the integrals.

    Raises:
        UsageError: see :func:`check_stages`.

    Example:
        >>> blend = StagedBlend([WeightStage(0, (1, 0)), WeightStage(4096, (1, 3))], key=0)
        >>> leaf, position = blend.lookup(np.arange(8192))
        >>> np.bincount(leaf).tolist()
        [5120, 3072]
    """

    def __init__(self, stages: Sequence[WeightStage], key: int, length: int = MAX_LENGTH):
        check_stages(stages, len(stages[0].weights) if stages else 0)
        self._stages = tuple(stages)
        self._key = key
        self._length = length
        self._starts = np.array([stage.start for stage in stages])
        self._all_counts: list[StageCounts] = []
        self._layouts: dict[int, Layout] = {}

    def lookup(self, positions: Ints) -> tuple[Ints, Ints]:
        """Leaf and position in the leaf's stream of each of ``positions`` (``[k]`` int64, any order)."""
        if not len(positions):
            return positions.copy(), positions.copy()
        first, last = (self._stage_of(int(bound)) for bound in (positions.min(), positions.max()))
        if first == last:
            return self._layout(first).lookup(positions)
        leaf, place = np.empty_like(positions), np.empty_like(positions)
        stage_of = np.searchsorted(self._starts, positions, side="right") - 1
        for number in range(first, last + 1):
            here = np.flatnonzero(stage_of == number)
            leaf[here], place[here] = self._layout(number).lookup(positions[here])
        return leaf, place

    def counts_before(self, position: int) -> Ints:
        """Number of samples of each leaf before ``position`` (``[leaves]`` int64)."""
        return self._layout(self._stage_of(position)).counts_before(position)

    def ideal_before(self, position: int) -> Ideal:
        """Integral of each leaf's share up to ``position``."""
        return self._counts_of(self._stage_of(position)).integral.before(position)

    def _stage_of(self, position: int) -> int:
        return int(np.searchsorted(self._starts, position, side="right")) - 1

    def _layout(self, number: int) -> Layout:
        layout = self._layouts.get(number)
        if layout is None:
            layout = self._layouts[number] = Layout(self._counts_of(number), self._key, self._stages[number].start)
        return layout

    def _counts_of(self, number: int) -> StageCounts:
        """Counts of a stage. Its initial counts come from the stages before it, which are computed once."""
        while len(self._all_counts) <= number:
            self._all_counts.append(self._next_counts())
        return self._all_counts[number]

    def _next_counts(self) -> StageCounts:
        number = len(self._all_counts)
        stage = self._stages[number]
        following = self._stages[number + 1] if number + 1 < len(self._stages) else None
        stop = MAX_LENGTH if following is None else following.start
        first = integer_shares(stage.weights, zero=True)
        last = None if stage.last is None else integer_shares(stage.last, zero=True)
        if self._all_counts:
            before, base = self._all_counts[-1].at_end()
        else:
            before, base = np.zeros_like(first), begin(len(first))
        integral = ShareIntegral(stage.start, base, first, last, stop - stage.start)
        if following is None or following.start > self._length:
            return StageCounts(integral, before, min(stop, self._length), None)
        leaving = following.idle()
        return StageCounts(integral, before, stop, leaving if leaving.any() else None)


class StageCounts(BlockCounts):
    """Counts of the blocks of one stage.

    Args:
        integral: integrals of the stage.
        before: samples of each leaf before the stage.
        end: the position after its last one.
        leaving: mask of the leaves without a share in the next stage; None: there are none.
    """

    def __init__(self, integral: ShareIntegral, before: Ints, end: int, leaving: Flags | None):
        self.integral = integral
        self._start = integral.start
        self._end = end
        self._leaving = leaving
        # A constant stage is halved as if it extended to the end of all positions.
        start, stop = integral.start, MAX_LENGTH if integral.last is None else integral.start + integral.length
        most = np.where(integral.idle(), 0, MAX_LENGTH)
        inside = _rounded(integral.before(stop), before, most, stop - start)
        self._begin(CountRange(start // BLOCK, -(-stop // BLOCK), stop - start, before, inside))
        self._last: CountRange | None = None

    def block(self, number: int) -> CountRange:
        if number == last_position(self._end) // BLOCK and (self._end % BLOCK or self._leaving is not None):
            if self._last is None:
                self._last = self._cut(super().block(number))
            return self._last
        return super().block(number)

    def at_end(self) -> tuple[Ints, Ideal]:
        """Actual and ideal number of samples of each leaf before the end of the stage."""
        last = self.block(last_position(self._end) // BLOCK)
        return last.before + last.inside, self.integral.before(self._end)

    def _both_halves(self, range_: CountRange) -> tuple[CountRange, CountRange]:
        first, stop = range_.first_block, range_.stop_block
        middle = (first + stop) // 2
        length = middle * BLOCK - max(first * BLOCK, self._start)
        left = _rounded(self.integral.before(middle * BLOCK), range_.before, range_.inside, length)
        rest = range_.inside - left
        return (
            CountRange(first, middle, length, range_.before, left),
            CountRange(middle, stop, range_.length - length, range_.before + left, rest),
        )

    def _cut(self, block: CountRange) -> CountRange:
        """Cut the last block of the stage at the stage's end, with exact counts there."""
        ideal = self.integral.before(self._end)
        length = self._end - max(block.first_block * BLOCK, self._start)
        most = np.where(self.integral.idle(), 0, length)
        if self._leaving is None:
            inside = _rounded(ideal, block.before, most, length)
        else:
            inside = _rounded_apart(ideal, block.before, most, length, self._leaving)
        return CountRange(block.first_block, block.stop_block, length, block.before, inside)


def _rounded(ideal: Ideal, before: Ints, most: Ints, length: int) -> Ints:
    """Samples of each leaf in ``length`` positions, such that the total with those before is close to ``ideal``.

    Every leaf gets the floor, and the leaves with the largest fractions get one more until the sum is right; none gets
    less than 0 or more than ``most``.
    """
    wanted = ideal.whole - before
    counts = np.clip(wanted, 0, most)
    lag = (wanted - counts) + ideal.fraction * 2.0**-62
    fill(counts, lag, most, length)
    return counts


def _rounded_apart(ideal: Ideal, before: Ints, most: Ints, length: int, leaving: Flags) -> Ints:
    """Round like :func:`_rounded`, but the sum over the leaves that leave separately.

    They cannot compensate for an error later, nor can the others compensate for theirs.
    """
    counts = np.empty_like(before)
    share = min(max(ideal.total(leaving) - int(before[leaving].sum()), 0), length, int(most[leaving].sum()))
    share = max(share, length - int(most[~leaving].sum()))
    for group, sum_ in ((leaving, share), (~leaving, length - share)):
        counts[group] = _rounded(Ideal(ideal.whole[group], ideal.fraction[group]), before[group], most[group], sum_)
    return counts
