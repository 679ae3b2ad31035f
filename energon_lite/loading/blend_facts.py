"""Numbers of a blend: the share of each leaf, and the epochs that a run makes over it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from energon_lite.config.leaf_spec import LeafSpec
from energon_lite.loading.stages import find_stages
from energon_lite.order.stages import StagedBlend

__all__ = ["LeafFacts", "leaf_facts"]


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
