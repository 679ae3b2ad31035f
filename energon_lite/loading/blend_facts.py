"""A blend in numbers: what share of it each data set has, and how often a run shows its samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from energon_lite.config.metadataset import LeafSpec
from energon_lite.loading.stages import find_stages
from energon_lite.order.stages import StagedBlend

__all__ = ["LeafFacts", "leaf_facts"]


@dataclass(frozen=True)
class LeafFacts:
    """One data set of a blend, in numbers.

    Args:
        spec: what the documents say.
        samples: how many it has.
        share: of the blend, 0 to 1; if it changes, the mean over the run.
        epochs: how often the run shows each of its samples; 0 if its length is not known.
        stages: its share at both ends of each stage, if shares change.
        measured: its share in the unit of the blend's weights, 0 to 1, if that is not samples.
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
    """The numbers of a blend.

    Args:
        specs: its leaves.
        samples: how many samples each of them has.
        blend_samples: over so many samples of the blend, the run, epochs are counted; 0: its length is not known.
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
        parts = [one.weight if one.repetitions is None else one.repetitions * count for one, count in pairs]
        total = sum(parts)
    return [
        LeafFacts(spec, count, part / total, blend_samples * part / total / count, shares)
        for spec, count, part, shares in zip(specs, samples, parts, ends, strict=True)
    ]
