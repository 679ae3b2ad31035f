"""Weights that are shares of tokens: from them, and the mean length of each data set, to shares of samples.

A blend shows samples. If data set i is to have the share ``w_i`` of all tokens, and its samples have ``m_i`` tokens on
average, it needs samples in proportion to ``w_i / m_i``. The means are those of measured columns, over the very samples
that are read, so the weights are known at the start: they are constants like any others, and each data set that ends
an epoch has given its tokens exactly. Megatron-Energon 8 counts tokens while it runs, and draws what lags behind.

An entry that is a blend itself has the mean of what it gives: of its leaves, by their shares of samples in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np

from energon_lite.config.metadataset import LeafSpec
from energon_lite.config.weight_schedule import Segment, shared_segments
from energon_lite.errors import ConfigError, DataIndexError
from energon_lite.storage.index.columns import LENGTH, SKIP
from energon_lite.storage.index.sample_filter import length_column

__all__ = ["by_samples", "mean_of"]

_CHUNK = 1 << 20


def by_samples(specs: Sequence[LeafSpec], sources: Sequence[Any]) -> list[LeafSpec]:
    """The leaves of a blend with weights that are shares of samples.

    Args:
        specs: as the documents say.
        sources: the samples of each.

    Raises:
        DataIndexError: a data set has no such column.
        ConfigError: weights that slope along the run, or samples without any length.
    """
    if not any(spec.units for spec in specs):
        return list(specs)
    means: dict[tuple[int, str], Fraction] = {}
    shares: list[list[Segment]] = [[] for _ in specs]
    for start, weights, last in shared_segments([spec.share for spec in specs]):
        if last is not None:
            where = next(spec.units[0].origin for spec in specs if spec.units)
            what = (
                "weights in another unit than samples cannot slope along the run: their shares of samples would curve"
            )
            raise ConfigError(what, file=where, fix="write steps: weight: {0: 0.9, 1_000_000: 0.5}")
        exact = [Fraction(weight) for weight in weights]
        for depth in reversed(range(max(len(spec.units) for spec in specs))):
            exact = _one_level(specs, sources, exact, depth, means)
        total = sum(exact)
        for share, weight in zip(shares, exact, strict=True):
            share.append(Segment(start, value := float(weight / total), value))
    return [
        replace(spec, weight=share[0].first, segments=tuple(share) if len(share) > 1 else ())
        for spec, share in zip(specs, shares, strict=True)
    ]


def _one_level(
    specs: Sequence[LeafSpec],
    sources: Sequence[Any],
    weights: Sequence[Fraction],
    depth: int,
    means: dict[tuple[int, str], Fraction],
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
            factors |= dict.fromkeys(leaves, 1 / mean)
            whole, needed = whole + share, needed + share / mean
        for leaf, factor in factors.items():
            found[leaf] = weights[leaf] * factor * whole / needed
    return found


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
        raise DataIndexError(
            f"blend_weight_unit: {unit} ({where}): {error.what}", where=error.where, fix=error.fix
        ) from None
    flags = _flags(source, length_column(unit))
    total, samples = Fraction(0), 0
    for start in range(0, len(source), _CHUNK):
        values = np.asarray(column[start : start + _CHUNK])
        if flags is not None:
            values = values[np.asarray(flags[start : start + _CHUNK]) == 0]
        exact = values.sum(dtype=np.int64).item() if values.dtype.kind in "iub" else values.sum(dtype=np.float64).item()
        total, samples = total + Fraction(exact), samples + len(values)
    if total <= 0:
        what = f"blend_weight_unit: {unit}: the samples of {spec.path} have none"
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
