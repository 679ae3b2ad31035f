"""Weights that change along the run: ``weight: {0: 0.9, 1_000_000: 0.5}``, or ``weight: {linear: {...}}``.

A schedule lists weights at positions, in samples of the whole run. ``step`` (which need not be written) holds a weight
until the next position, ``linear`` goes there in a straight line; both keep the last one for ever. The form with the
kind as the key follows what Megatron-Energon's users proposed, in its thread 17; positions there count batches of a
rank, which would make the blend depend on the number of ranks.

At the positions that a blend names, its weights are divided by their sum; between them *shares*, not weights, go in a
straight line. So shares sum to one everywhere, and their integrals are exact. Along a path of nested blends shares
multiply. Two slopes at the same time would give a curve, and are refused.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

from energon_lite.documents import Node

__all__ = [
    "ONE",
    "Segment",
    "Share",
    "SlopesMeet",
    "blend_shares",
    "constant",
    "multiply",
    "normalised",
    "read_schedule",
    "schedule",
    "shared_segments",
    "values_at",
]

_POSITION = re.compile(r"\+?\d[\d_]*(\.\d*)?([eE][+-]?\d+)?\Z", re.ASCII)
_EXAMPLES = "{0: 0.9, 1_000_000: 0.5} or {linear: {0: 0.9, 1_000_000: 0.1}}"
#: Positions of a run end here.
_LAST = 1 << 62


class Segment(NamedTuple):
    """A weight, or a share, over a stretch of positions: at its start, and at its end, where the next one starts."""

    start: int
    first: float
    last: float


#: A weight, or a share: segments from position 0 on, the last of which is constant, and goes on for ever.
Share = tuple[Segment, ...]


class SlopesMeet(ValueError):
    """Two shares that slope at the same time were to be multiplied: between which positions."""

    def __init__(self, start: int, stop: int | None):
        self.start, self.stop = start, stop
        super().__init__(f"from {start} to {stop}")


def constant(value: float) -> Share:
    """A share that never changes."""
    return (Segment(0, value, value),)


#: All of a blend, or the weight of what says none.
ONE = constant(1.0)


def schedule(points: Sequence[tuple[int, float]], linear: bool = False) -> Share:
    """Weights at positions, which increase from 0: in straight lines from one to the next, or each until the next."""
    lasts = [weight for _, weight in (*points[1:], points[-1])] if linear else [weight for _, weight in points]
    return tuple(Segment(start, weight, last) for (start, weight), last in zip(points, lasts, strict=True))


# -- reading --------------------------------------------------------------------------------------------------------


def read_schedule(node: Node) -> Share:
    """The content of a ``weight`` key that is not a number.

    Raises:
        ConfigError: anything wrong in it.
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
                f"{other!r} beside {kind!r}", fix, expected=f"only the key {kind}", found=found
            )
    return _schedule(entries[kind], linear=kind == "linear")


def _schedule(node: Node, linear: bool) -> Share:
    points: list[tuple[int, float]] = []
    for child in node.entries().values():
        position, weight = _position(child), _weight(child)
        if not points and position != 0:
            what, expected = "it is not said what the weight is at the start", "0 as the first position"
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
    return schedule(points, linear)


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


def normalised(weights: Sequence[float]) -> list[float]:
    """Weights, not all zero, divided by their sum."""
    largest = max(weights, default=1.0)
    scaled = [weight / largest for weight in weights]
    total = math.fsum(scaled)
    return [weight / total for weight in scaled]


def blend_shares(weights: Sequence[Share]) -> list[Share]:
    """The shares of the entries of one blend: their weights, divided by the sum wherever a weight is written.

    Raises:
        ValueError: all weights are zero at some position, which is its only argument.
    """
    shares: list[list[Segment]] = [[] for _ in weights]
    for start, stop, pairs in _stretches(weights):
        ends = []
        for position, values in zip((start, stop), zip(*pairs, strict=True), strict=True):
            if not any(values):
                raise ValueError(position)
            ends.append(normalised(values))
        for share, first, last in zip(shares, *ends, strict=True):
            share.append(Segment(start, first, last))
    return [tuple(share) for share in shares]


def multiply(outer: Share, inner: Share) -> Share:
    """The product of two shares.

    Raises:
        SlopesMeet: both slope at the same time.
    """
    segments = []
    for start, stop, ((a, b), (c, d)) in _stretches([outer, inner]):
        if a != b and c != d:
            raise SlopesMeet(start, stop)
        segments.append(Segment(start, a * c, b * d))
    return tuple(segments)


def shared_segments(shares: Sequence[Share]) -> list[tuple[int, tuple[float, ...], tuple[float, ...] | None]]:
    """The shares of all leaves, cut at the same positions: start, shares there, and shares at the end where they slope.

    Neighbours that are one and the same constant are joined, so that a position at which nothing changes is none.
    """
    stages: list[tuple[int, tuple[float, ...], tuple[float, ...] | None]] = []
    for start, _, pairs in _stretches(shares):
        first, last = (tuple(pair[side] for pair in pairs) for side in (0, 1))
        if first != last:
            stages.append((start, first, last))
        elif not (stages and stages[-1][1:] == (first, None)):
            stages.append((start, first, None))
    return stages


def values_at(share: Share, position: int) -> tuple[float, float]:
    """A share just before a position, and from it on."""
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
    """Start, stop, and of each share the values at both ends, for each stretch between positions where any changes."""
    knots = sorted({segment.start for share in shares for segment in share})
    for start, stop in zip(knots, [*knots[1:], None], strict=True):
        starts = [values_at(share, start)[1] for share in shares]
        stops = starts if stop is None else [values_at(share, stop)[0] for share in shares]
        yield start, stop, list(zip(starts, stops, strict=True))
