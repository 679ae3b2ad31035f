"""Runs whose weights change: their order, their identity in states, and the numbers of their stages."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np

from energon_lite.config.leaf_spec import LeafSpec, Weight
from energon_lite.documents import Node
from energon_lite.errors import StateMismatchError
from energon_lite.extras.blends.stages import StagedBlend, WeightStage, check_stages, last_position
from energon_lite.extras.blends.weight_schedule import read_schedule, shared_segments
from energon_lite.loading.iterators.dataset import Identity, LeafIdentity
from energon_lite.loading.metadataset_keys import StageShare
from energon_lite.order.block_counts import BLOCK
from energon_lite.order.permutation import MAX_LENGTH

# A state depends on the samples that were consumed, not on later ones. So the identity of a run with stages depends on
# its position: it covers the stages that have begun, and the leaves that they use. Later stages may be edited, and
# leaves that only they use may be added, removed or changed, while the run continues.

#: Stages that a state lists one by one; earlier ones have one common digest.
_NAMED = 12
#: Position after the beginning of every stage.
_ALL = 1 << 62
#: Prefix of the settings for the weights of a stage, before its position.
_PREFIX = "weights from position "


@dataclass(frozen=True)
class StagedIdentity(Identity):
    """The identity of a run whose weights change.

    Args:
        settings, leaves: as for :class:`~energon_lite.loading.iterators.dataset.Identity`; the leaves' weights are
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
        leaving = [] if end is None else np.flatnonzero(self.stages[begun].idle()).tolist()
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

    def _consumed(self, begun: int, cut: int | None, leaving: Sequence[int]) -> Identity:
        stages = self.stages[:begun]
        used = self._used(stages)
        marks = {}
        for number, stage in enumerate(stages):
            sloping = stage.last is not None
            if not number and not sloping:
                continue  # the weights of the first stage are in the leaves' settings
            stop = self.stages[number + 1].start if sloping else None
            weights = [[values[leaf] for leaf in used if values] for values in (stage.weights, stage.last)]
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


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:8]


@dataclass(frozen=True)
class Stages:
    """Weights of a blend in stages; see :class:`~energon_lite.loading.metadataset_keys.BlendSchedule`."""

    stages: tuple[WeightStage, ...]

    @property
    def count(self) -> int:
        return len(self.stages)

    @property
    def leaves(self) -> int:
        return len(self.stages[0].weights) if self.stages else 0

    def blend(self, leaves: int, key: int, length: int = MAX_LENGTH) -> StagedBlend:
        check_stages(self.stages, leaves)
        return StagedBlend(self.stages, key, length)

    def rebased(self, position: int) -> Stages:
        """Stages that ended before the position are dropped."""
        return Stages(tuple(stages_from(self.stages, position)))

    def identity(self, settings: Mapping[str, Any], leaves: Sequence[LeafIdentity]) -> Identity:
        return StagedIdentity(settings, leaves, stages=self.stages)

    def samples(self, position: int) -> list[float]:
        ideal = StagedBlend(self.stages, key=0).ideal_before(position)
        return (ideal.whole + ideal.fraction * 2.0**-62).tolist()

    def shares(self) -> list[tuple[StageShare, ...]]:
        ends = [
            [StageShare(stage.start, *both) for both in zip(stage.weights, stage.last or stage.weights, strict=True)]
            for stage in self.stages
        ]
        return [*zip(*ends, strict=True)]


def stages_from(stages: Sequence[WeightStage], position: int) -> list[WeightStage]:
    """Stages from a position on, shifted such that it becomes position 0.

    Example:
        >>> ramp = [WeightStage(0, (0.0, 1.0), last=(1.0, 0.0)), WeightStage(100, (1.0, 0.0))]
        >>> [(stage.start, stage.weights) for stage in stages_from(ramp, 25)]
        [(0, (0.25, 0.75)), (75, (1.0, 0.0))]
    """
    begun = max(number for number, stage in enumerate(stages) if stage.start <= position)
    here = stages[begun]
    weights = here.weights
    if here.last is not None:
        way = Fraction(position - here.start, stages[begun + 1].start - here.start)
        ends = zip(_shares(here.weights), _shares(here.last), strict=True)
        weights = tuple(float(first + (last - first) * way) for first, last in ends)
    ahead = [replace(stage, start=stage.start - position) for stage in stages[begun + 1 :]]
    return [WeightStage(0, weights, here.last), *ahead]


def _shares(weights: Sequence[float]) -> list[Fraction]:
    exact = [Fraction(weight) for weight in weights]
    total = sum(exact)
    return [weight / total for weight in exact]


class Schedules:
    """Guest of the key ``weight``: see :class:`~energon_lite.loading.metadataset_keys.ScheduleGuest`."""

    def read(self, node: Node) -> Weight:
        return read_schedule(node)

    def stages(self, specs: Sequence[LeafSpec]) -> Stages:
        return Stages(tuple(WeightStage(*segment) for segment in shared_segments(specs)))


SCHEDULES = Schedules()
