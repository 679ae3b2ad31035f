"""Change of the blend at some position of a run, in closed form: each leaf's stream continues without a gap.

The samples before the position were counted once, when the blend was changed. The new blend then starts there as if it
were position 0, and each leaf's place in it is added to the leaf's earlier count. So a look-up takes no longer than
before, and a leaf's stream equals that of an undisturbed run, for any blends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from energon_lite.order.stages import WeightStage

__all__ = ["Rebase", "stages_from"]


@dataclass(frozen=True)
class Rebase:
    """Start of a changed blend.

    Args:
        position: its first position in the run.
        starts: for each of its leaves, the number of samples of the leaf's stream before that position.

    Example:
        >>> rebase = Rebase(1000, (600, 0))  # leaf 0 continues with its sample 600, leaf 1 is new
    """

    position: int
    starts: tuple[int, ...]


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
