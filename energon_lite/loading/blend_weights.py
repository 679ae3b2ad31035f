"""Weights of a blend: the stages of a run, numbers to show, and shares of samples."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from energon_lite.config.leaf_spec import LeafSpec
from energon_lite.config.weight_schedule import shared_segments
from energon_lite.errors import StateMismatchError
from energon_lite.loading.iterators.identity import Identity
from energon_lite.loading.makers.metadataset_keys import weight_guest
from energon_lite.order.block_counts import BLOCK
from energon_lite.order.stages import StagedBlend, WeightStage, last_position
from energon_lite.storage.read.opened_source import AnySource

__all__ = ["LeafFacts", "StagedIdentity", "by_samples", "find_stages", "leaf_facts"]


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


def by_samples(specs: Sequence[LeafSpec], sources: Sequence[AnySource]) -> list[LeafSpec]:
    """Return the leaves of a blend with weights that are shares of samples, converted by a guest if they are not.

    Args:
        specs: the leaves as the documents describe them.
        sources: the source of each leaf.

    Raises:
        DataIndexError: a data set has no column of that unit.
        ConfigError: the samples of a leaf have a total of zero; or the extra is not installed.
    """
    unit = next((spec.units[0] for spec in specs if spec.units), None)
    return list(specs) if unit is None else weight_guest(unit.origin).by_samples(specs, sources)
