"""The order in which a pipeline's stages go through the micro-batches of a step."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["pipeline_order"]


def pipeline_order(times: Sequence[int]) -> list[int]:
    """An order of a rank's micro-batches in which stages wait little for each other: from short to long and back.

    Stages are idle while the first micro-batches fill the pipeline, and while the last ones leave it. So these are the
    shortest; and neighbours take about as long, since a stage with a short one waits for its neighbour with a long one.
    What the step computes does not depend on it.

    Args:
        times: that each micro-batch takes, in any unit.

    Returns:
        Numbers of the micro-batches.

    Example:
        >>> pipeline_order([5, 9, 1, 7, 3])
        [2, 0, 1, 3, 4]
    """
    order = sorted(range(len(times)), key=lambda number: (times[number], number))
    return [*order[::2], *reversed(order[1::2])]
