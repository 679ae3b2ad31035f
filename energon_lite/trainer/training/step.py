"""One optimizer step, and one evaluation: what the loss is divided by, and what is summed over ranks.

The loss of a step is the sum over its tokens divided by their number, over all micro-batches and all ranks. A mean of
means would weigh a token by how full its micro-batch is. So the micro-batches of a step are fetched first, the global
number of tokens is known before the first backward pass, and gradients are only ever summed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from energon_lite.trainer.models.batch import MultimodalBatch
from energon_lite.trainer.models.llama import LlamaModel
from energon_lite.trainer.optimizer.plain_optimizer import Optimizer
from energon_lite.trainer.parallel.mesh import ParallelMesh
from energon_lite.trainer.training.pipeline import Record, run_pipeline


@dataclass(frozen=True)
class StepResult:
    """What a step did; the same on every rank.

    Args:
        loss: mean loss of a token.
        grad_norm: global norm of the gradient before clipping.
        tokens: number of tokens that the loss counted.
        lr: the learning rate.
    """

    loss: float
    grad_norm: float
    tokens: int
    lr: float


def train_step(
    model: LlamaModel,
    optimizer: Optimizer,
    micro_batches: Sequence[MultimodalBatch | None],
    mesh: ParallelMesh,
    *,
    lr: float | Callable[[int], float],
    record: Record | None = None,
) -> StepResult:
    """Forward, backward and update on this rank's micro-batches of one step. Every rank must call it.

    Args:
        model: the model, on ``mesh``.
        optimizer: of that model.
        micro_batches: this rank's; tensor- and context-parallel peers and the first and the last pipeline stage have
            equal ones, stages between them None for each. They may be empty, and are as many on each rank.
        mesh: the ranks.
        lr: the learning rate; or what it is for the number of tokens of the step.
        record: see :func:`run_pipeline`.
    """
    tokens = mesh.sum_over_data(_count_tokens(micro_batches, mesh))
    optimizer.begin_step(len(micro_batches))

    parts = [None if mesh.virtual == 1 else model.parameters_of_chunk(chunk) for chunk in range(mesh.virtual)]
    loss = run_pipeline(
        model,
        micro_batches,
        divisor=tokens.clamp(min=1.0),
        after_backward=lambda chunk: optimizer.end_micro_batch(parts[chunk]),
        record=record,
    )
    loss, tokens = _from_last_stage(torch.stack([mesh.sum_over_data(loss), tokens]), mesh)
    counted = int(tokens.item())
    rate = lr(counted) if callable(lr) else lr
    return StepResult(loss.item(), optimizer.step(rate), counted, rate)


@torch.no_grad()
def evaluate(model: LlamaModel, batches: Iterable[MultimodalBatch | None], mesh: ParallelMesh) -> tuple[float, int]:
    """Mean loss of a token over all batches of all ranks, and the number of tokens. Every rank must call it.

    Args:
        model: the model, on ``mesh``.
        batches: this rank's, as those of :func:`train_step`. An empty batch counts for nothing.
        mesh: the ranks.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    remaining = iter(batches)
    # A few at a time: enough to fill the stages, and not all in memory at once.
    while some := list(itertools.islice(remaining, 4 * mesh.pp)):
        here = [None if batch is None else batch.to(mesh.device) for batch in some]
        sums[0] += run_pipeline(model, here, backward=False)
        sums[1] += _count_tokens(here, mesh)
    loss, tokens = _from_last_stage(mesh.sum_over_data(sums), mesh)
    return (loss / tokens.clamp(min=1.0)).item(), int(tokens.item())


def _count_tokens(micro_batches: Iterable[MultimodalBatch | None], mesh: ParallelMesh) -> torch.Tensor:
    """How many tokens of this rank's micro-batches count, each on one rank of a model replica: of the last stage's."""
    tokens = torch.zeros((), dtype=torch.float64, device=mesh.device)
    if mesh.is_last_stage and mesh.rank("cp") == 0:
        for batch in micro_batches:
            assert batch is not None, "the last stage needs its micro-batches"
            tokens += batch.loss_mask.sum(dtype=torch.float64)
    return tokens


def _from_last_stage(values: torch.Tensor, mesh: ParallelMesh) -> torch.Tensor:
    """What the last stage knows, for all of them; the others have zeros."""
    if (group := mesh.group("pp")) is not None:
        dist.all_reduce(values, group=group)
    return values
