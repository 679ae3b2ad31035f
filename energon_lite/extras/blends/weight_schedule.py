"""Weights that change during the run: ``weight: {0: 0.9, 1_000_000: 0.5}``, or ``weight: {linear: {...}}``.

A schedule lists weights at positions, in samples of the whole run. ``step`` (the default) holds a weight until the next
position, ``linear`` interpolates to the next one; both keep the last weight. The form with the kind as the key follows
a proposal of Megatron-Energon's users, in its thread 17; positions there count batches of a rank, which would make the
blend depend on the number of ranks.

At the positions that a blend names, its weights are divided by their sum; between them *shares*, not weights, are
interpolated linearly. So shares sum to one everywhere, and their integrals are exact. Along a path of nested blends
shares are multiplied. Two changing shares at the same time would give a curve, and are refused.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from energon_lite.config.leaf_spec import LeafSpec, Weight
from energon_lite.config.metadataset_document import normalised
from energon_lite.documents import Node

_POSITION = re.compile(r"\+?\d[\d_]*(\.\d*)?([eE][+-]?\d+)?\Z", re.ASCII)
_EXAMPLES = "{0: 0.9, 1_000_000: 0.5} or {linear: {0: 0.9, 1_000_000: 0.1}}"
#: Upper bound on the positions of a run, exclusive.
_LAST = 1 << 62


class Segment(NamedTuple):
    """A weight, or a share, over a stretch of positions: its value at the start, and at the end of the stretch."""

    start: int
    first: float
    last: float


#: A weight, or a share: segments from position 0 on, the last of which is constant and endless.
Share = tuple[Segment, ...]


@dataclass(frozen=True)
class Schedule:
    """A share that changes; see :class:`~energon_lite.config.leaf_spec.WeightSchedule`."""

    segments: Share

    @property
    def start(self) -> float:
        return self.segments[0].first

    def __bool__(self) -> bool:
        return any(segment.first or segment.last for segment in self.segments)

    def shares(self, weights: Sequence[Weight], blend: Node) -> list[Weight]:
        """Weights are divided by their sum at every position that is written."""
        shares: list[list[Segment]] = [[] for _ in weights]
        for start, stop, pairs in _stretches([share_of(weight) for weight in weights]):
            ends = []
            for position, values in zip((start, stop), zip(*pairs, strict=True), strict=True):
                if not any(values):
                    what = f"all weights of the blend are zero at position {position}, or just before it"
                    expected, fix = "a weight above 0 at every position", "let one data set begin before the others end"
                    raise blend.key_error(what, fix, expected=expected, found="none")
                ends.append(normalised(values))
            for share, first, last in zip(shares, *ends, strict=True):
                share.append(Segment(start, first, last))
        return [Schedule(tuple(share)) for share in shares]

    def times(self, other: Weight, reference: Node) -> Schedule:
        segments = []
        for start, stop, ((a, b), (c, d)) in _stretches([self.segments, share_of(other)]):
            if a != b and c != d:
                raise reference.error(
                    "the share in this blend slopes while that of a blend above it does: along a curve, not a straight "
                    "line",
                    "write steps in one of the two documents, or let one slope end before the other begins",
                    expected="one linear schedule at a time on the way to a data set",
                    found=f"two from position {start} to {stop}",
                )
            segments.append(Segment(start, a * c, b * d))
        return Schedule(tuple(segments))


def share_of(weight: Weight) -> Share:
    """Return the segments of a weight."""
    if isinstance(weight, Schedule):
        return weight.segments
    assert isinstance(weight, (int, float))  # no other guest makes schedules
    return (Segment(0, weight, weight),)


def schedule(points: Sequence[tuple[int, float]], linear: bool = False) -> Share:
    """Make a share from weights at increasing positions from 0 on.

    Args:
        points: pairs of position and weight.
        linear: interpolate between weights; False: hold each until the next.
    """
    lasts = [weight for _, weight in (*points[1:], points[-1])] if linear else [weight for _, weight in points]
    return tuple(Segment(start, weight, last) for (start, weight), last in zip(points, lasts, strict=True))


# -- reading --------------------------------------------------------------------------------------------------------


def read_schedule(node: Node) -> Weight:
    """Read the value of a ``weight`` key that is not a number.

    Raises:
        ConfigError: the value has a mistake.
    """
    entries = node.entries()
    kind = next((key for key in entries if not _POSITION.match(key)), None)
    if kind is None:
        return _schedule(node, linear=False)
    fix = f"write it like {_EXAMPLES}"
    if kind not in ("linear", "step"):
        expected, choices = "positions in samples, or one of the keys linear, step", ["linear", "step"]
        what = f"unknown key {kind!r} in a weight that changes"
        raise entries[kind].key_error(what, fix, expected=expected, choices=choices)
    for other in entries:
        if other != kind:
            found = f"the keys {', '.join(entries)}"
            raise entries[other].key_error(
                f"both {kind!r} and {other!r}", fix, expected=f"only the key {kind}", found=found
            )
    return _schedule(entries[kind], linear=kind == "linear")


def _schedule(node: Node, linear: bool) -> Weight:
    points: list[tuple[int, float]] = []
    for child in node.entries().values():
        position, weight = _position(child), _weight(child)
        if not points and position != 0:
            what, expected = "the weight at the start is missing", "0 as the first position"
            fix = "add '0: 0' if the data set is to come in later, else '0:' with its weight"
            raise child.key_error(what, fix, expected=expected, found=str(position))
        if points and position <= points[-1][0]:
            what, expected = "positions have to increase", f"a position above {points[-1][0]}"
            fix = "sort the positions, and write each of them once"
            raise child.key_error(what, fix, expected=expected, found=str(position))
        points.append((position, weight))
    if not points:
        raise node.error("a weight that changes has no positions", "add '0:'", expected=_EXAMPLES)
    if not any(weight for _, weight in points):
        fix = "remove the entry if it is not to be used"
        raise node.error("the weight is zero at all positions", fix, expected="a weight above 0 somewhere")
    share = schedule(points, linear)
    return Schedule(share) if len(share) > 1 else share[0].first


def _position(child: Node) -> int:
    key = child.key or ""
    value = Fraction(key.replace("_", "")) if _POSITION.match(key) and len(key) < 40 else Fraction(-1)
    if value.denominator != 1 or not 0 <= value < _LAST:
        expected = "a number of samples: a whole number from 0 on, below 2**62"
        fix = "write the position as a number, such as 1_000_000 or 1e6"
        raise child.key_error(f"{key!r} is not a position", fix, expected=expected)
    return int(value)


def _weight(node: Node) -> float:
    weight = node.number()
    if weight < 0:
        fix = "write 0 where the data set is not to be used"
        raise node.error("a weight is below zero", fix, expected="a number from 0 on")
    if weight and not 1e-100 < weight < 1e100:
        what, fix = "a weight that changes is out of range", "only ratios count: write a number nearer to 1"
        raise node.error(what, fix, expected="0, or a number above 1e-100 and below 1e100")
    return weight


# -- shares ---------------------------------------------------------------------------------------------------------


def shared_segments(specs: Sequence[LeafSpec]) -> list[tuple[int, tuple[float, ...], tuple[float, ...] | None]]:
    """Cut the shares of the leaves of a blend at the same positions.

    Neighbouring stretches with the same constant shares are merged, so positions without a change are left out.

    Returns:
        For each stretch: its start, the shares there, and the shares at its end, or None if they are constant.
    """
    stages: list[tuple[int, tuple[float, ...], tuple[float, ...] | None]] = []
    shares = [share_of(spec.weight if spec.schedule is None else spec.schedule) for spec in specs]
    for start, _, pairs in _stretches(shares):
        first, last = (tuple(pair[side] for pair in pairs) for side in (0, 1))
        if first != last:
            stages.append((start, first, last))
        elif not (stages and stages[-1][1:] == (first, None)):
            stages.append((start, first, None))
    return stages


def values_at(share: Share, position: int) -> tuple[float, float]:
    """Value of a share just before a position, and from it on."""
    place = bisect_right(share, position, key=lambda segment: segment.start) - 1
    start, first, last = share[place]
    if start == position:
        return share[place - 1].last if place else first, first
    if first == last:
        return first, first
    ratio = Fraction(position - start, share[place + 1].start - start)
    value = float(Fraction(first) + (Fraction(last) - Fraction(first)) * ratio)  # rounded once
    return value, value


def _stretches(shares: Sequence[Share]) -> Iterator[tuple[int, int | None, list[tuple[float, float]]]]:
    """Yield stretches between positions where any share changes: start, stop, and each share's values at both ends."""
    knots = sorted({segment.start for share in shares for segment in share})
    for start, stop in zip(knots, [*knots[1:], None], strict=True):
        starts = [values_at(share, start)[1] for share in shares]
        stops = starts if stop is None else [values_at(share, stop)[0] for share in shares]
        yield start, stop, list(zip(starts, stops, strict=True))
