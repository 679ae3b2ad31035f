"""Weights of a blend: the stages of a run, numbers to show, and shares of tokens as shares of samples.

A blend shows samples. If leaf i is to have the share ``w_i`` of all tokens, and its samples have ``m_i`` tokens on
average, it needs samples in proportion to ``w_i / m_i``. The means are those of measured columns, over exactly the
samples that are read, so the weights are known at the start: they are ordinary constants, and each leaf that ends an
epoch has given its exact share of tokens. Along a slope of weights, shares of samples are a curve, which is
approximated by straight pieces. (Megatron-Energon 8 counts tokens during the run, and draws the leaf that lags behind.)

An entry that is itself a blend has the mean of its output: of its leaves, by their shares of samples in it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np

from energon_lite.config.leaf_spec import LeafSpec
from energon_lite.config.weight_schedule import Segment, shared_segments
from energon_lite.errors import ConfigError, DataIndexError, StateMismatchError
from energon_lite.loading.iterators.identity import Identity
from energon_lite.order.block_counts import BLOCK
from energon_lite.order.stages import StagedBlend, WeightStage, last_position
from energon_lite.storage.index.columns import LENGTH, SKIP, length_column

__all__ = ["LeafFacts", "StagedIdentity", "by_samples", "find_stages", "leaf_facts", "mean_of"]


# A state depends on the samples that were consumed, not on later ones. So the identity of a run with stages depends on
# its position: it covers the stages that have begun, and the leaves that they use. Later stages may be edited, and
# leaves that only they use may be added, removed or changed, while the run continues.

#: Stages that a state lists one by one; earlier ones have one common digest.
_NAMED = 12
#: Position after the beginning of every stage.
_ALL = 1 << 62
#: Prefix of the settings for the weights of a stage, before its position.
_PREFIX = "weights from position "


def find_stages(specs: Sequence[LeafSpec]) -> tuple[WeightStage, ...]:
    """Return the stages of a blend by weight; a single one if its weights never change."""
    return tuple(WeightStage(*segment) for segment in shared_segments([spec.share for spec in specs]))


@dataclass(frozen=True)
class StagedIdentity(Identity):
    """The identity of a run whose weights change.

    Args:
        settings, leaves: as for :class:`~energon_lite.loading.iterators.identity.Identity`; the leaves' weights are
            those at the start.
        stages: all stages.
        first: the position at which the blend begins; its blocks are counted from there.
    """

    stages: tuple[WeightStage, ...] = ()
    first: int = 0
    _known: dict[Any, Identity] = field(default_factory=dict, init=False, repr=False, compare=False)

    def at(self, samples: int) -> Identity:
        begun = max(1, sum(stage.start < samples for stage in self.stages))
        end = self.stages[begun].start if begun < len(self.stages) else None
        # Part of the last block of a stage depends on its end, and on the leaves without a share after it.
        leaving = () if end is None else _leaving(self.stages[begun])
        cut = None
        if end is not None and samples > self.first + last_position(end - self.first):
            cut = end if (end - self.first) % BLOCK or leaving else None
        known = self._known.get((begun, cut))
        if known is None:
            known = self._known[begun, cut] = self._consumed(begun, cut, leaving)
        return known

    def whole(self) -> Identity:
        return self.at(_ALL)

    def beginning_at(self, position: int) -> Identity:
        return replace(self, first=position)

    def to_plain(self) -> dict[str, Any]:
        """Return the identity of the whole run, with all stages, as plain data."""
        return self.whole().to_plain()

    def _consumed(self, begun: int, cut: int | None, leaving: tuple[int, ...]) -> Identity:
        stages = self.stages[:begun]
        used = self._used(stages)
        marks = {}
        for number, stage in enumerate(stages):
            sloping = stage.last is not None
            if not number and not sloping:
                continue  # the weights of the first stage are in the leaves' settings
            stop = self.stages[number + 1].start if sloping else None
            weights = [_of(weights, used) for weights in (stage.weights, stage.last or ())]
            marks[stage.start] = ("a slope to " + str(stop) if sloping else "constant") + f", {_digest(weights)}"
        settings = dict(self.settings)
        if older := list(marks)[:-_NAMED]:
            joined = _digest([(start, marks.pop(start)) for start in older])
            settings[f"weights before position {next(iter(marks))}"] = joined
        settings |= {f"{_PREFIX}{start}": mark for start, mark in marks.items()}
        if cut is not None:
            place = f"{_PREFIX}{stages[-1].start}"
            without = f", without {_digest([used.index(leaf) for leaf in leaving if leaf in used])}" if leaving else ""
            settings[place] = f"{settings.get(place, 'constant')}, up to {cut}{without}"
        return _Consumed(settings, tuple(self.leaves[leaf] for leaf in used), begun=stages[-1].start)

    def _used(self, stages: Sequence[WeightStage]) -> list[int]:
        """Return the leaves that these stages use, and earlier ones of the same data: they come first when the keys of
        leaves with equal data are numbered."""
        used: list[int] = []
        needed: set[str] = set()
        for number in reversed(range(len(self.leaves))):
            data = self.leaves[number].fingerprint
            if data in needed or any(stage.weights[number] or (stage.last and stage.last[number]) for stage in stages):
                used.append(number)
                needed.add(data)
        return used[::-1]


@dataclass(frozen=True)
class _Consumed(Identity):
    """Identity of the consumed part of a run.

    Args:
        begun: position at which the present stage began.
    """

    begun: int = 0

    def check(self, saved: Any) -> None:
        try:
            super().check(saved)
        except StateMismatchError as error:
            raise StateMismatchError(
                f"{error.what}\n    (Of weights that change, those of stages which began before the state was saved "
                "count, up to the one that begins at position "
                f"{self.begun:,}. Weights listed with data sets are those of the first stage.)",
                fix="write these stages, and data sets, as they were; stages ahead may be changed, from the end of "
                f"the block of {BLOCK:,} positions on in which the state was saved",
            ) from None


def _leaving(stage: WeightStage) -> tuple[int, ...]:
    """Return the leaves that have no share in a stage."""
    pairs = zip(stage.weights, stage.last or stage.weights, strict=True)
    return tuple(leaf for leaf, weights in enumerate(pairs) if not any(weights))


def _of(weights: Sequence[float], used: Sequence[int]) -> list[float]:
    return [weights[leaf] for leaf in used] if weights else []


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:8]


@dataclass(frozen=True)
class LeafFacts:
    """Numbers of one leaf of a blend.

    Args:
        spec: the leaf as the documents describe it.
        samples: number of samples.
        share: share of the blend, 0 to 1; if it changes, the mean over the run.
        epochs: number of times that the run shows each sample; 0 if the length of the run is not known.
        stages: share at both ends of each stage, if shares change.
        measured: share in the unit of the blend's weights, 0 to 1, if that is not samples.
        unit: the unit.
    """

    spec: LeafSpec
    samples: int
    share: float
    epochs: float
    stages: tuple[tuple[float, float], ...] = ()
    measured: float | None = None
    unit: str = "samples"


def leaf_facts(specs: Sequence[LeafSpec], samples: Sequence[int], blend_samples: int = 0) -> list[LeafFacts]:
    """Return the numbers of the leaves of a blend.

    Args:
        specs: the leaves.
        samples: number of samples of each leaf.
        blend_samples: length of the run in samples of the blend, for the number of epochs; 0: not known.
    """
    stages = find_stages(specs)
    ends: list[tuple[tuple[float, float], ...]] = [()] * len(specs)
    if len(stages) > 1:
        ideal = StagedBlend(stages, key=0).ideal_before(blend_samples)
        parts = (ideal.whole + ideal.fraction * 2.0**-62).tolist()
        total = float(max(blend_samples, 1))
        both = [zip(stage.weights, stage.last or stage.weights, strict=True) for stage in stages]
        ends = [*zip(*both, strict=True)]
    else:
        pairs = zip(specs, samples, strict=True)
        parts = [
            leaf_spec.weight if leaf_spec.repetitions is None else leaf_spec.repetitions * count
            for leaf_spec, count in pairs
        ]
        total = sum(parts)
    return [
        LeafFacts(spec, count, part / total, blend_samples * part / total / count, shares)
        for spec, count, part, shares in zip(specs, samples, parts, ends, strict=True)
    ]


#: Samples whose values are read together.
_CHUNK = 1 << 20
#: Largest error of a share of tokens along a slope.
_NEAR = Fraction(1, 1000)

#: Number of leaves above which shares are rounded; the numerators of exact shares would grow with each leaf.
_FEW = 200
#: Binary digits of rounded shares.
_DIGITS = 640
#: Upper bound of the relative error of rounded shares.
_OFF = Fraction(1, 1 << 500)

_Piece = tuple[int, Sequence[Fraction], Sequence[Fraction]]
_Convert = Callable[[Sequence[Fraction]], list[Fraction]]
_Round = Callable[[Fraction], Fraction]


def by_samples(specs: Sequence[LeafSpec], sources: Sequence[Any]) -> list[LeafSpec]:
    """Return the leaves of a blend with weights converted to shares of samples.

    Args:
        specs: the leaves as the documents describe them.
        sources: the source of each leaf.

    Raises:
        DataIndexError: a data set has no column of that unit.
        ConfigError: the samples of a leaf have a total of zero.
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
        """Return shares whose floats are those of the exact shares."""
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
        what = f"weight_unit: {unit}: the samples of {spec.path} have none"
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
