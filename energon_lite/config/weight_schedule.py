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
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from energon_lite.config.yaml_node import YamlNode

__all__ = [
    "Piece",
    "ShareIntegral",
    "SlopesMeet",
    "WeightSchedule",
    "blend_shares",
    "multiply",
    "normalised",
    "read_schedule",
    "shared_pieces",
]

_POSITION = re.compile(r"\+?\d[\d_]*(\.\d*)?([eE][+-]?\d+)?\Z", re.ASCII)
_EXAMPLES = "{0: 0.9, 1_000_000: 0.5} or {linear: {0: 0.9, 1_000_000: 0.1}}"
#: Positions of a run end here.
_LAST = 1 << 62


@dataclass(frozen=True)
class WeightSchedule:
    """The weight of one entry of a blend, by position.

    Args:
        points: (position, weight); the first position is 0, and they increase.
        linear: in straight lines from point to point; else each weight holds until the next point.
    """

    points: tuple[tuple[int, float], ...]
    linear: bool = False

    def at(self, position: int) -> tuple[float, float]:
        """The weight just before a position, and from it on."""
        place = max(number for number, (start, _) in enumerate(self.points) if start <= position)
        start, weight = self.points[place]
        if not self.linear:
            return self.points[max(0, place - (start == position))][1], weight
        if start < position and place + 1 < len(self.points):
            weight = _between(self.points[place], self.points[place + 1], position)
        return weight, weight


class Piece(NamedTuple):
    """A share over a stretch of positions: at its start, and at its end, which is the next piece's start."""

    start: int
    first: float
    last: float


#: A share: a number, or pieces from position 0 on, the last of which is constant.
ShareIntegral = float | tuple[Piece, ...]


class SlopesMeet(ValueError):
    """Two shares that slope at the same time were to be multiplied: between which positions."""

    def __init__(self, start: int, stop: int | None):
        self.start, self.stop = start, stop
        super().__init__(f"from {start} to {stop}")


# -- reading --------------------------------------------------------------------------------------------------------


def read_schedule(node: YamlNode) -> WeightSchedule:
    """The content of a ``weight`` key that is not a number.

    Raises:
        ConfigError: anything wrong in it.
    """
    entries = dict(node.items())
    kinds = [key for key in entries if not _POSITION.match(key)]
    if kinds:
        kind = kinds[0]
        if kind not in ("linear", "step"):
            raise entries[kind].error(
                f"unknown key {kind!r} in a weight that changes",
                expected="positions in samples, or one of the keys linear, step",
                found=repr(kind),
                choices=["linear", "step"],
                suggest_for=kind,
                fix=f"write it like {_EXAMPLES}",
                at_key=True,
            )
        if len(entries) > 1:
            other = next(key for key in entries if key != kind)
            raise entries[other].error(
                f"{other!r} beside {kind!r}",
                expected=f"only the key {kind}",
                found=f"the keys {', '.join(entries)}",
                fix=f"write it like {_EXAMPLES}",
                at_key=True,
            )
        return _schedule(entries[kind], linear=kind == "linear")
    return _schedule(node, linear=False)


def _schedule(node: YamlNode, linear: bool) -> WeightSchedule:
    entries = [(_position(key, child), _weight(child), child) for key, child in node.items()]
    if not entries:
        raise node.error(
            "a weight that changes has no positions", expected=_EXAMPLES, found=node.describe(), fix="add '0:'"
        )
    if entries[0][0] != 0:
        raise entries[0][2].error(
            "it is not said what the weight is at the start",
            expected="0 as the first position",
            found=str(entries[0][0]),
            fix="add '0: 0' if the data set is to come in later, else '0:' with its weight",
            at_key=True,
        )
    for (before, _, _), (position, _, child) in pairwise(entries):
        if position <= before:
            raise child.error(
                "positions have to increase",
                expected=f"a position above {before}",
                found=str(position),
                fix="sort the positions, and write each of them once",
                at_key=True,
            )
    if not any(weight for _, weight, _ in entries):
        raise node.error(
            "the weight is zero at all positions",
            expected="a weight above 0 somewhere",
            found=node.describe(),
            fix="remove the entry if it is not to be used",
        )
    return WeightSchedule(tuple((position, weight) for position, weight, _ in entries), linear)


def _position(key: str, child: YamlNode) -> int:
    value = Fraction(key.replace("_", "")) if _POSITION.match(key) and len(key) < 40 else Fraction(-1)
    if value.denominator != 1 or not 0 <= value < _LAST:
        raise child.error(
            f"{key!r} is not a position",
            expected="a number of samples: a whole number from 0 on, below 2**62",
            found=repr(key),
            fix="write the position as a number, such as 1_000_000 or 1e6",
            at_key=True,
        )
    return int(value)


def _weight(node: YamlNode) -> float:
    weight = node.number()
    if weight < 0:
        raise node.error(
            "a weight is below zero",
            expected="a number from 0 on",
            found=node.describe(),
            fix="write 0 where the data set is not to be used",
        )
    if weight and not 1e-100 < weight < 1e100:
        raise node.error(
            "a weight that changes is out of range",
            expected="0, or a number above 1e-100 and below 1e100",
            found=node.describe(),
            fix="only ratios count: write a number nearer to 1",
        )
    return weight


# -- shares ---------------------------------------------------------------------------------------------------------


def normalised(weights: Sequence[float]) -> list[float]:
    """Weights, not all zero, divided by their sum."""
    largest = max(weights, default=1.0)
    scaled = [weight / largest for weight in weights]
    total = math.fsum(scaled)
    return [weight / total for weight in scaled]


def blend_shares(weights: Sequence[float | WeightSchedule]) -> list[ShareIntegral]:
    """The shares of the entries of one blend.

    Raises:
        ValueError: all weights are zero at some position, which is its only argument.
    """
    if not any(isinstance(weight, WeightSchedule) for weight in weights):
        return list(normalised([weight for weight in weights if isinstance(weight, float)]))
    knots = sorted({start for weight in weights if isinstance(weight, WeightSchedule) for start, _ in weight.points})
    before: list[list[float]] = []
    after: list[list[float]] = []
    for knot in knots:
        sides = [weight.at(knot) if isinstance(weight, WeightSchedule) else (weight, weight) for weight in weights]
        for found, side in ((before, 0), (after, 1)):
            values = [pair[side] for pair in sides]
            if not any(values):
                raise ValueError(knot)
            found.append(normalised(values))
    ends = [*before[1:], after[-1]]
    return [
        tuple(Piece(knot, first[entry], last[entry]) for knot, first, last in zip(knots, after, ends, strict=True))
        for entry in range(len(weights))
    ]


def multiply(outer: ShareIntegral, inner: ShareIntegral) -> ShareIntegral:
    """The product of two shares.

    Raises:
        SlopesMeet: both slope at the same time.
    """
    if isinstance(outer, float) and isinstance(inner, float):
        return outer * inner
    pieces = []
    for start, stop, ((a, b), (c, d)) in _cut([outer, inner]):
        if a != b and c != d:
            raise SlopesMeet(start, stop)
        pieces.append(Piece(start, a * c, b * d))
    return tuple(pieces)


def shared_pieces(courses: Sequence[ShareIntegral]) -> list[tuple[int, tuple[float, ...], tuple[float, ...] | None]]:
    """The shares of all leaves, cut at the same positions: start, shares there, and shares at the end where they slope.

    Neighbours that are one and the same constant are joined, so that a position at which nothing changes is none.
    """
    stages: list[tuple[int, tuple[float, ...], tuple[float, ...] | None]] = []
    for start, _, pairs in _cut(courses):
        first, last = (tuple(pair[side] for pair in pairs) for side in (0, 1))
        if first != last:
            stages.append((start, first, last))
        elif not (stages and stages[-1][1:] == (first, None)):
            stages.append((start, first, None))
    return stages


def _cut(courses: Sequence[ShareIntegral]) -> list[tuple[int, int | None, list[tuple[float, float]]]]:
    """Start, stop, and of each course the values at both ends, for each stretch between positions at which any of them
    changes."""
    knots = sorted({0, *(piece.start for course in courses if not isinstance(course, float) for piece in course)})
    rows = [_values(course, knots) for course in courses]
    return [
        (start, stop, [row[number] for row in rows])
        for number, (start, stop) in enumerate(zip(knots, [*knots[1:], None], strict=True))
    ]


def _values(course: ShareIntegral, knots: Sequence[int]) -> list[tuple[float, float]]:
    """The values of a course at both ends of each stretch."""
    if isinstance(course, float):
        return [(course, course)] * len(knots)
    values, place = [], 0
    for number, start in enumerate(knots):
        if place + 1 < len(course) and course[place + 1].start == start:
            place += 1
        piece = course[place]
        if piece.first == piece.last:
            values.append((piece.first, piece.last))
            continue
        end = (course[place + 1].start, piece.last)
        first = piece.first if piece.start == start else _between((piece.start, piece.first), end, start)
        stop = knots[number + 1]
        values.append((first, piece.last if stop == end[0] else _between((piece.start, piece.first), end, stop)))
    return values


def _between(one: tuple[int, float], other: tuple[int, float], position: int) -> float:
    """The value of a straight line, rounded once."""
    ratio = Fraction(position - one[0], other[0] - one[0])
    return float(Fraction(one[1]) + (Fraction(other[1]) - Fraction(one[1])) * ratio)
