"""Another blend from some position of a run on, in closed form: each leaf's stream goes on where it was.

What stands before the position was counted once, when the blend was changed. The new blend then begins there as if it
were position 0, and each leaf's place in it is added to what the leaf had given before. So a position costs no more
than before, and a leaf's stream is that of an undisturbed run, whatever the blend around it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from energon_lite.order.stages import WeightStage

__all__ = ["Rebase", "stages_from"]


@dataclass(frozen=True)
class Rebase:
    """Where a changed blend begins.

    Args:
        position: the first of its positions in the run.
        starts: for each of its leaves, the samples of the leaf's stream that were shown before.

    Example:
        >>> rebase = Rebase(1000, (600, 0))  # leaf 0 goes on with its sample 600, leaf 1 is new
    """

    position: int
    starts: tuple[int, ...]


def stages_from(stages: Sequence[WeightStage], position: int) -> list[WeightStage]:
    """What of some stages lies from a position on, which becomes position 0.

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
