"""Order of the micro-batches of a pipeline stage: forward and backward, chunk by chunk. Pure arithmetic.

**1F1B** (PipeDream-Flush; Narayanan et al., arXiv:2006.09503): a stage runs as many micro-batches forward as there are
stages behind it, then alternates one forward and one backward pass, and finally runs the remaining backward passes. So
it never holds the activations of more micro-batches than there are stages from it to the last one.

**Interleaved** (Narayanan et al., arXiv:2104.04473): a stage has several chunks of layers, each a stage of a longer
pipeline that passes all ranks several times. The first micro-batch reaches the last rank sooner, and the bubble shrinks
by a factor equal to the number of chunks; the number of messages grows by the same factor.

Micro-batches of unequal costs are taken in the :func:`pipeline_order`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Action:
    """One pass of a micro-batch through a chunk of a stage.

    Args:
        chunk: number of the chunk within the stage.
        micro_batch: number of the micro-batch in the step.
        backward: False for the forward pass.
    """

    chunk: int
    micro_batch: int
    backward: bool = False

    def __str__(self) -> str:
        return f"{'B' if self.backward else 'F'}{self.micro_batch}.{self.chunk}"


def pipeline_schedule(
    stage: int, stages: int, micro_batches: int, *, chunks: int = 1, backward: bool = True
) -> list[Action]:
    """Return the actions of a stage in a step, in order.

    A stage that follows the schedule, waiting for the inputs of an action and never for its sends, cannot deadlock for
    any numbers.

    Args:
        stage: number of the stage, from 0.
        stages: number of stages.
        micro_batches: number of micro-batches of the step.
        chunks: number of chunks of each stage; more than one makes the schedule interleaved.
        backward: False for an evaluation, which has only forward passes.

    Example:
        >>> [str(action) for action in pipeline_schedule(0, 2, 3)]
        ['F0.0', 'F1.0', 'B0.0', 'F2.0', 'B1.0', 'B2.0']
    """
    # The interleaved order takes micro-batches in groups of as many as there are stages. Micro-batches do not depend on
    # each other, so the order is made for a multiple of that, and the missing micro-batches are left out.
    planned = -(-micro_batches // stages) * stages if chunks > 1 else micro_batches
    forward = _passes(planned, stages, chunks)
    if not backward:
        return [Action(chunk, number) for chunk, number in forward if number < micro_batches]
    back = [Action(chunks - 1 - chunk, number, backward=True) for chunk, number in forward]
    behind = stages - 1 - stage
    # With chunks, two passes for each stage behind, not one: a message then has the time of one pass to arrive.
    warm_up = behind if chunks == 1 else 2 * behind + (chunks - 1) * stages
    warm_up = min(warm_up, len(forward))
    order = [Action(*place) for place in forward[:warm_up]]
    for place, action in zip(forward[warm_up:], back, strict=False):
        order += [Action(*place), action]
    order += back[len(forward) - warm_up :]
    return [action for action in order if action.micro_batch < micro_batches]


def pipeline_order(times: Sequence[int]) -> list[int]:
    """Return an order of a rank's micro-batches that keeps pipeline stages busy: from short to long and back.

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


def _passes(micro_batches: int, stages: int, chunks: int) -> list[tuple[int, int]]:
    """Return (chunk, micro-batch) in the order of forward passes: group by group, and in a group chunk by chunk."""
    group = stages if chunks > 1 else max(1, micro_batches)
    return [
        (chunk, number)
        for first in range(0, micro_batches, group)
        for chunk in range(chunks)
        for number in range(first, min(first + group, micro_batches))
    ]
