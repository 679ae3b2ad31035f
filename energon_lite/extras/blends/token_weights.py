"""Weights that are shares of tokens, or of another measured column, as shares of samples.

A blend shows samples. If leaf i is to have the share ``w_i`` of all tokens, and its samples have ``m_i`` tokens on
average, it needs samples in proportion to ``w_i / m_i``. The means are those of measured columns, over exactly the
samples that are read, so the weights are known at the start: they are ordinary constants, and each leaf that ends an
epoch has given its exact share of tokens. Along a slope of weights, shares of samples are a curve, which is
approximated by straight pieces. (Megatron-Energon 8 counts tokens during the run, and draws the leaf that lags behind.)

An entry that is itself a blend has the mean of its output: of its leaves, by their shares of samples in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np

from energon_lite.config.leaf_spec import LeafSpec
from energon_lite.errors import ConfigError, DataIndexError
from energon_lite.extras.blends.weight_schedule import Schedule, Segment, shared_segments
from energon_lite.loading.metadataset_keys import WeightGuest
from energon_lite.order.block_counts import BLOCK
from energon_lite.storage.index.column_file import LENGTH
from energon_lite.storage.index.columns import SKIP, length_column

#: Samples whose values are read together.
_CHUNK = 1 << 20
#: Largest error of a share of tokens along a slope.
_NEAR = Fraction(1, 1000)

#: Most binary digits of rounded shares; the numerators of exact shares grow with each leaf.
_DIGITS = 640
#: Upper bound of the relative error of rounded shares.
_OFF = Fraction(1, 1 << 500)

_Piece = tuple[int, Sequence[Fraction], Sequence[Fraction]]
_Convert = Callable[[Sequence[Fraction]], list[Fraction]]
_Round = Callable[[Fraction], Fraction]


def by_samples(specs: Sequence[LeafSpec], sources: Sequence[Any]) -> list[LeafSpec]:
    """Return the leaves of a blend with weights converted to shares of samples.

    Args:
        specs: the leaves as the documents describe them; at least one is in a blend by another unit.
        sources: the source of each leaf.

    Raises:
        DataIndexError: a data set has no column of that unit.
        ConfigError: the samples of a leaf have a total of zero.
    """
    means: dict[tuple[int, str], Fraction] = {}
    depths = range(max(len(spec.units) for spec in specs))

    def of_samples(weights: Sequence[Fraction], rounded: _Round = Fraction) -> list[Fraction]:
        for depth in reversed(depths):
            weights = _one_level(specs, sources, weights, depth, means, rounded)
        total = sum(weights)
        return [weight / total for weight in weights]

    def constant_shares(weights: Sequence[Fraction]) -> list[Fraction]:
        """Return shares whose floats are those of the exact shares."""
        near = of_samples(weights, _rounded)
        is_sure = all(float(share * (1 - _OFF)) == float(share * (1 + _OFF)) for share in near)
        return near if is_sure else of_samples(weights)

    stages = shared_segments(specs)
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
        replace(spec, weight=share[0].first, schedule=Schedule(share) if len(share) > 1 else None)
        for spec, share in zip(specs, segments, strict=True)
    ]


def _straight_pieces(
    start: int, stop: int, first: Sequence[Fraction], last: Sequence[Fraction], of_samples: _Convert
) -> list[_Piece]:
    """Approximate shares of samples along a slope of weights in another unit, which form a curve, by straight pieces
    ``(start, shares there, shares at the end)``. A piece is halved until its error is small enough."""
    pieces: list[_Piece] = []
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
            pieces.append((begin, begins, ends))
        else:
            left.append((middle, end, weights[middle], high, wanted[middle], ends))
            left.append((begin, middle, low, weights[middle], begins, wanted[middle]))
    return pieces


def _between(first: Sequence[Fraction], last: Sequence[Fraction], ratio: Fraction) -> list[Fraction]:
    return [a + (b - a) * ratio for a, b in zip(first, last, strict=True)]


def _off(weights: Sequence[Fraction], shares: Sequence[Fraction], wanted: Sequence[Fraction]) -> Fraction:
    """Return the largest difference between the weights and the shares of tokens given by shares of samples."""
    made = [
        weight * share / exact if exact else exact for weight, share, exact in zip(weights, shares, wanted, strict=True)
    ]
    whole = sum(weights)
    total = sum(made)
    return max(abs(tokens / total - weight / whole) for tokens, weight in zip(made, weights, strict=True))


def _one_level(
    specs: Sequence[LeafSpec],
    sources: Sequence[Any],
    weights: Sequence[Fraction],
    depth: int,
    means: dict[tuple[int, str], Fraction],
    rounded: _Round,
) -> list[Fraction]:
    """Convert the blends at a depth (among those with units) to blends of samples and return the weights. A blend keeps
    its total weight."""
    blends: dict[int, dict[int, list[int]]] = {}
    for number, spec in enumerate(specs):
        if depth < len(spec.units) and weights[number]:
            here = spec.units[depth]
            blends.setdefault(here.blend, {}).setdefault(here.entry, []).append(number)
    converted = list(weights)
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
            converted[leaf] = rounded(weights[leaf] * factor * ratio)
    return converted


def _rounded(value: Fraction) -> Fraction:
    """Round a number above zero to :data:`_DIGITS` binary digits."""
    shift = _DIGITS + value.denominator.bit_length() - value.numerator.bit_length()
    return value if shift <= 0 else Fraction((value.numerator << shift) // value.denominator, 1 << shift)


def mean_of(spec: LeafSpec, source: Any, unit: str) -> Fraction:
    """Return the exact mean of a column over the samples of a leaf. For a measured length, leave out samples that the
    task encoder skipped or that failed, because replacements are shown in their places.

    Raises:
        DataIndexError: there is no such column.
        ConfigError: the mean is not above zero.
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
        what = f"weight_unit: {unit}: the samples of {spec.path} have none of that unit"
        raise ConfigError(what, file=spec.origin or None, fix="measure it again, or leave the data set out")
    return total / samples


def _flags(source: Any, name: str) -> Any:
    """Return the flags of samples that were skipped when a column of lengths was measured; None: there are none."""
    if name != LENGTH and not name.endswith(f".{LENGTH}"):
        return None
    try:
        return source.column(name.removesuffix(LENGTH) + SKIP)
    except DataIndexError:
        return None


#: The guest of the key ``weight_unit``.
WEIGHTS = WeightGuest(by_samples, mean_of)
