"""In which order a pipeline stage runs its micro-batches: forward, backward, chunk by chunk. Pure arithmetic.

**1F1B** (PipeDream-Flush; Narayanan et al., arXiv:2006.09503): a stage runs as many micro-batches forward as there are
stages behind it, then one backward for each one forward, and at last the backward passes that are left. So it never
holds the activations of more micro-batches than there are stages from it to the end.

**Interleaved** (Narayanan et al., arXiv:2104.04473): a stage has several chunks of layers, each a stage of a longer
pipeline that runs round the ranks several times. The first micro-batch reaches the last rank sooner, and the bubble
shrinks by the number of chunks, for as many times the messages.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Action:
    """One pass of a micro-batch through a chunk of a stage.

    Args:
        chunk: which of the stage's chunks.
        micro_batch: its number in the step.
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
    """What a stage does in a step, in order.

    A stage that does this, waiting for what an action needs and never for what it sends, gets to the end whatever the
    numbers are.

    Args:
        stage: its number, from 0.
        stages: number of stages.
        micro_batches: of the step; any number.
        chunks: of each stage; more than one makes the schedule interleaved.
        backward: False for an evaluation, which only goes forward.

    Example:
        >>> [str(action) for action in pipeline_schedule(0, 2, 3)]
        ['F0.0', 'F1.0', 'B0.0', 'F2.0', 'B1.0', 'B2.0']
    """
    # The interleaved order takes micro-batches in groups of as many as there are stages. Micro-batches do not depend
    # on each other, so an order for a larger number without those that do not exist is as good.
    planned = -(-micro_batches // stages) * stages if chunks > 1 else micro_batches
    forward = _passes(planned, stages, chunks)
    if not backward:
        return [Action(chunk, number) for chunk, number in forward if number < micro_batches]
    back = [Action(chunks - 1 - chunk, number, backward=True) for chunk, number in forward]
    behind = stages - 1 - stage
    # With chunks, two passes for each stage behind, not one: then a message has the time of a pass to arrive in.
    warm_up = behind if chunks == 1 else 2 * behind + (chunks - 1) * stages
    warm_up = min(warm_up, len(forward))
    order = [Action(*place) for place in forward[:warm_up]]
    for place, action in zip(forward[warm_up:], back, strict=False):
        order += [Action(*place), action]
    order += back[len(forward) - warm_up :]
    return [action for action in order if action.micro_batch < micro_batches]


def _passes(micro_batches: int, stages: int, chunks: int) -> list[tuple[int, int]]:
    """(chunk, micro-batch) in the order of forward passes: group by group, and in a group chunk by chunk."""
    group = stages if chunks > 1 else max(1, micro_batches)
    return [
        (chunk, number)
        for first in range(0, micro_batches, group)
        for chunk in range(chunks)
        for number in range(first, min(first + group, micro_batches))
    ]
