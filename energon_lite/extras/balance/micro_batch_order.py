"""Order of the micro-batches of a step in a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["pipeline_order"]


def pipeline_order(times: Sequence[int]) -> list[int]:
    """Order of a rank's micro-batches that keeps pipeline stages busy: from short to long and back.

    Stages are idle while the first micro-batches fill the pipeline, and while the last ones leave it, so these are the
    shortest. Neighbours take similar times, since a stage with a short one waits for its neighbour with a long one. The
    order does not change the step's result.

    Args:
        times: time of each micro-batch, in any unit.

    Returns:
        Indices of the micro-batches.

    Example:
        >>> pipeline_order([5, 9, 1, 7, 3])
        [2, 0, 1, 3, 4]
    """
    order = sorted(range(len(times)), key=lambda number: (times[number], number))
    return [*order[::2], *reversed(order[1::2])]
