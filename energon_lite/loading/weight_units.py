"""Weights that are shares of tokens: from them, and the mean length of each data set, to shares of samples.

A blend shows samples. If data set i is to have the share ``w_i`` of all tokens, and its samples have ``m_i`` tokens on
average, it needs samples in proportion to ``w_i / m_i``. The means are those of measured columns, over the very samples
that are read, so the weights are known at the start: they are constants like any others, and each data set that ends
an epoch has given its tokens exactly. Along a slope of weights, shares of samples are a curve, which straight pieces
follow. Megatron-Energon 8 counts tokens while it runs, and draws what lags behind.

An entry that is a blend itself has the mean of what it gives: of its leaves, by their shares of samples in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np

from energon_lite.config.metadataset import LeafSpec
from energon_lite.config.weight_schedule import Segment, shared_segments
from energon_lite.errors import ConfigError, DataIndexError
from energon_lite.order.block_counts import BLOCK
from energon_lite.storage.index.columns import LENGTH, SKIP
from energon_lite.storage.index.sample_filter import length_column

__all__ = ["by_samples", "mean_of"]

_CHUNK = 1 << 20
#: Along a slope, a share of tokens is at most about this far from its weight.
_NEAR = Fraction(1, 1000)

#: Of more leaves shares are computed to so many binary digits; exact ones would grow with each leaf.
_FEW, _DIGITS = 200, 640
#: They are off by less than this part of theirs.
_OFF = Fraction(1, 1 << 500)

_Piece = tuple[int, Sequence[Fraction], Sequence[Fraction]]
_Convert = Callable[[Sequence[Fraction]], list[Fraction]]
_Round = Callable[[Fraction], Fraction]


def by_samples(specs: Sequence[LeafSpec], sources: Sequence[Any]) -> list[LeafSpec]:
    """The leaves of a blend with weights that are shares of samples.

    Args:
        specs: as the documents say.
        sources: the samples of each.

    Raises:
        DataIndexError: a data set has no such column.
        ConfigError: samples without any length.
    """
    if not any(spec.units for spec in specs):
        return list(specs)
    means: dict[tuple[int, str], Fraction] = {}
    depths = range(max(len(spec.units) for spec in specs))

    def of_samples(weights: Sequence[Fraction], rounded: _Round = Fraction) -> list[Fraction]:
        for depth in reversed(depths):
            weights = _one_level(specs, sources, weights, depth, means, rounded)
        total = sum(weights)
        return [weight / total for weight in weights]

    def constant_shares(weights: Sequence[Fraction]) -> list[Fraction]:
        """Those that are the exact ones as floats."""
        if len(weights) > _FEW:
            near = of_samples(weights, _rounded)
            if all(float(share * (1 - _OFF)) == float(share * (1 + _OFF)) for share in near):
                return near
        return of_samples(weights)

    stages = shared_segments([spec.share for spec in specs])
    ends = [start for start, _, _ in stages[1:]]
    pieces: list[_Piece] = []
    for (start, weights, last), stop in zip(stages, [*ends, None], strict=True):
        exact = [Fraction(weight) for weight in weights]
        if last is None or stop is None:
            pieces.append((start, shares := constant_shares(exact), shares))
        else:
            pieces += _straight_pieces(start, stop, exact, [Fraction(weight) for weight in last], of_samples)
    segments = [
        tuple(Segment(start, float(first[leaf]), float(last[leaf])) for start, first, last in pieces)
        for leaf in range(len(specs))
    ]
    return [
        replace(spec, weight=share[0].first, segments=share if len(share) > 1 else ())
        for spec, share in zip(specs, segments, strict=True)
    ]


def _straight_pieces(
    start: int, stop: int, first: Sequence[Fraction], last: Sequence[Fraction], of_samples: _Convert
) -> list[_Piece]:
    """Shares of samples along a slope of weights in another unit, which are a curve: straight pieces that follow it,
    as ``(start, shares there, shares at the end)``. A piece is halved until it is near enough."""
    found: list[_Piece] = []
    left = [(start, stop, first, last, of_samples(first), of_samples(last))]
    while left:
        begin, end, low, high, begins, ends = left.pop()
        length = end - begin
        middle = (begin + end) // 2
        places = {place: Fraction(place - begin, length) for place in (middle, begin + length // 4, end - length // 4)}
        weights = {place: _between(low, high, ratio) for place, ratio in places.items()}
        wanted = {place: of_samples(here) for place, here in weights.items()}
        if length < 2 * BLOCK or all(
            _off(weights[place], _between(begins, ends, ratio), wanted[place]) <= _NEAR
            for place, ratio in places.items()
        ):
            found.append((begin, begins, ends))
        else:
            left.append((middle, end, weights[middle], high, wanted[middle], ends))
            left.append((begin, middle, low, weights[middle], begins, wanted[middle]))
    return found


def _between(first: Sequence[Fraction], last: Sequence[Fraction], ratio: Fraction) -> list[Fraction]:
    return [a + (b - a) * ratio for a, b in zip(first, last, strict=True)]


def _off(weights: Sequence[Fraction], shares: Sequence[Fraction], wanted: Sequence[Fraction]) -> Fraction:
    """How far the shares of tokens that shares of samples make are from the weights, which others make."""
    made = [weight * share / one if one else one for weight, share, one in zip(weights, shares, wanted, strict=True)]
    whole = sum(weights)
    total = sum(made)
    return max(abs(one / total - weight / whole) for one, weight in zip(made, weights, strict=True))


def _one_level(
    specs: Sequence[LeafSpec],
    sources: Sequence[Any],
    weights: Sequence[Fraction],
    depth: int,
    means: dict[tuple[int, str], Fraction],
    rounded: _Round,
) -> list[Fraction]:
    """Weights after the blends at a depth (among those with units) were turned into blends of samples. A blend keeps
    its weight as a whole."""
    blends: dict[int, dict[int, list[int]]] = {}
    for number, spec in enumerate(specs):
        if depth < len(spec.units) and weights[number]:
            here = spec.units[depth]
            blends.setdefault(here.blend, {}).setdefault(here.entry, []).append(number)
    found = list(weights)
    for entries in blends.values():
        whole = needed = Fraction(0)
        factors: dict[int, Fraction] = {}
        for leaves in entries.values():
            for leaf in leaves:
                unit = specs[leaf].units[depth].unit
                if (leaf, unit) not in means:
                    means[leaf, unit] = mean_of(specs[leaf], sources[leaf], unit)
            share = sum((weights[leaf] for leaf in leaves), Fraction(0))
            mean = sum((weights[leaf] * means[leaf, unit] for leaf in leaves), Fraction(0)) / share
            factor = rounded(1 / mean)
            factors |= dict.fromkeys(leaves, factor)
            whole = whole + share
            needed = rounded(needed + share * factor)
        ratio = rounded(whole / needed)
        for leaf, factor in factors.items():
            found[leaf] = rounded(weights[leaf] * factor * ratio)
    return found


def _rounded(value: Fraction) -> Fraction:
    """A number above zero to :data:`_DIGITS` binary digits."""
    shift = _DIGITS + value.denominator.bit_length() - value.numerator.bit_length()
    return value if shift <= 0 else Fraction((value.numerator << shift) // value.denominator, 1 << shift)


def mean_of(spec: LeafSpec, source: Any, unit: str) -> Fraction:
    """The mean of a column over the samples of a leaf, exactly. Of a measured length, over those that the task encoder
    did not skip and that did not fail: others are shown in their places.

    Raises:
        DataIndexError: there is no such column.
        ConfigError: it is not above zero.
    """
    where = spec.units[-1].origin if spec.units else spec.origin
    try:
        column = source.column(length_column(unit))
    except DataIndexError as error:
        raise DataIndexError(f"weight_unit: {unit} ({where}): {error.what}", where=error.where, fix=error.fix) from None
    flags = _flags(source, length_column(unit))
    total = Fraction(0)
    samples = 0
    for start in range(0, len(source), _CHUNK):
        values = np.asarray(column[start : start + _CHUNK])
        if flags is not None:
            values = values[np.asarray(flags[start : start + _CHUNK]) == 0]
        exact = values.sum(dtype=np.int64).item() if values.dtype.kind in "iub" else values.sum(dtype=np.float64).item()
        total = total + Fraction(exact)
        samples = samples + len(values)
    if total <= 0:
        what = f"weight_unit: {unit}: the samples of {spec.path} have none"
        raise ConfigError(what, file=spec.origin or None, fix="measure it again, or leave the data set out")
    return total / samples


def _flags(source: Any, name: str) -> Any:
    """What became of samples when a column of lengths was measured; None: nobody says."""
    if name != LENGTH and not name.endswith(f".{LENGTH}"):
        return None
    try:
        return source.column(name.removesuffix(LENGTH) + SKIP)
    except DataIndexError:
        return None
