"""Weights of a blend: shares of samples, weights that change, and numbers to show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from energon_lite.config.leaf_spec import LeafSpec
from energon_lite.config.metadataset_document import ScheduleReader
from energon_lite.entry_points import metadataset_guest
from energon_lite.loading.iterators.dataset import Identity, LeafIdentity
from energon_lite.loading.makers.metadataset_keys import weight_guest
from energon_lite.order.orders import ChangingWeights
from energon_lite.storage.read.opened_source import AnySource

__all__ = ["BlendSchedule", "LeafFacts", "ScheduleGuest", "StageShare", "by_samples", "find_schedule", "leaf_facts"]


class StageShare(NamedTuple):
    """Share of a leaf in one stage of the run: from the position ``start`` on, with its value there, and at the end."""

    start: int
    first: float
    last: float


class BlendSchedule(ChangingWeights, Protocol):
    """Weights of a blend that change during the run, in stages."""

    @property
    def count(self) -> int:
        """Number of stages."""

    def identity(self, settings: Mapping[str, Any], leaves: Sequence[LeafIdentity]) -> Identity:
        """Return the identity of the run; the leaves' weights are those at the start."""

    def samples(self, position: int) -> list[float]:
        """Return the number of samples of each leaf before a position, as a fraction."""

    def shares(self) -> list[tuple[StageShare, ...]]:
        """Return the shares of each leaf, by stage."""


class ScheduleGuest(ScheduleReader, Protocol):
    """Guest of weights that change: entry ``weight`` of the table ``METADATASET_KEYS``."""

    def stages(self, specs: Sequence[LeafSpec]) -> BlendSchedule:
        """Return the weights of a blend; those of at least one leaf change."""


def find_schedule(specs: Sequence[LeafSpec]) -> BlendSchedule | None:
    """Return the weights of a blend if they change during the run, else None."""
    changing = next((spec for spec in specs if spec.schedule is not None), None)
    if changing is None:
        return None
    guest: ScheduleGuest = metadataset_guest("weight", changing.origin)
    schedule = guest.stages(specs)
    return schedule if schedule.count > 1 else None


@dataclass(frozen=True)
class LeafFacts:
    """Numbers of one leaf of a blend.

    Args:
        spec: the leaf as the documents describe it.
        samples: number of samples.
        share: share of the blend, 0 to 1; if it changes, the mean over the run.
        epochs: number of times that the run shows each sample; 0 if the length of the run is not known.
        stages: share in each stage, if shares change.
        measured: share in the unit of the blend's weights, 0 to 1, if that is not samples.
        unit: the unit.
    """

    spec: LeafSpec
    samples: int
    share: float
    epochs: float
    stages: tuple[StageShare, ...] = ()
    measured: float | None = None
    unit: str = "samples"


def leaf_facts(specs: Sequence[LeafSpec], samples: Sequence[int], blend_samples: int = 0) -> list[LeafFacts]:
    """Return the numbers of the leaves of a blend.

    Args:
        specs: the leaves.
        samples: number of samples of each leaf.
        blend_samples: length of the run in samples of the blend, for the number of epochs; 0: not known.
    """
    schedule = find_schedule(specs)
    ends: list[tuple[StageShare, ...]] = [()] * len(specs)
    if schedule is not None:
        parts, ends = schedule.samples(blend_samples), schedule.shares()
        total = float(max(blend_samples, 1))
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
