"""One optimizer step, and one evaluation: what the loss is divided by, and what is summed over ranks.

The loss of a step is the sum over its tokens divided by their number, over all micro-batches and all ranks. A mean of
means would weigh a token by how full its micro-batch is. So the micro-batches of a step are fetched first, the global
number of tokens is known before the first backward pass, and gradients are only ever summed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from energon_lite.training.llama import LlamaModel, ModelInput
from energon_lite.training.mesh import ParallelMesh
from energon_lite.training.optimizer import AdamW


@dataclass(frozen=True)
class StepResult:
    """What a step did; the same on every rank.

    Args:
        loss: mean loss of a token.
        tokens: number of tokens that the loss counted.
        grad_norm: global norm of the gradient before clipping.
    """

    loss: float
    tokens: int
    grad_norm: float


def train_step(
    model: LlamaModel, optimizer: AdamW, micro_batches: Sequence[ModelInput], mesh: ParallelMesh, *, lr: float
) -> StepResult:
    """Forward, backward and update on this rank's micro-batches of one step. Every rank must call it.

    Args:
        model: the model, on ``mesh``.
        optimizer: of that model.
        micro_batches: this rank's; tensor-parallel peers have equal ones. They may be empty.
        mesh: the ranks.
        lr: the learning rate.
    """
    tokens = _zero(mesh)
    if mesh.rank("cp") == 0:  # context-parallel ranks have the same batch
        tokens = sum((batch.loss_mask.sum(dtype=torch.float64) for batch in micro_batches), tokens)
    mesh.sum_over_data(tokens)
    divisor = tokens.clamp(min=1.0)
    loss = _zero(mesh)
    for batch in micro_batches:
        if batch.tokens.numel() == 0:
            continue
        share = _loss_sum(model, batch) / divisor.to(model.config.torch_dtype)
        share.backward()
        loss += share.detach()
    mesh.sum_over_data(loss)
    grad_norm = optimizer.step(lr)
    return StepResult(loss.item(), int(tokens.item()), grad_norm)


@torch.no_grad()
def evaluate(model: LlamaModel, batches: Iterable[ModelInput], mesh: ParallelMesh) -> tuple[float, int]:
    """Mean loss of a token over all batches of all ranks, and the number of tokens. Every rank must call it.

    Args:
        model: the model, on ``mesh``.
        batches: this rank's; tensor-parallel peers have equal ones. An empty batch counts for nothing.
        mesh: the ranks.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    for batch in batches:
        if batch.tokens.numel():
            here = batch.to(mesh.device)
            sums[0] += _loss_sum(model, here)
            if mesh.rank("cp") == 0:  # context-parallel ranks have the same batch
                sums[1] += here.loss_mask.sum()
    mesh.sum_over_data(sums)
    return (sums[0] / sums[1].clamp(min=1.0)).item(), int(sums[1].item())


def _loss_sum(model: LlamaModel, batch: ModelInput) -> torch.Tensor:
    return model.loss_sum(batch)


def _zero(mesh: ParallelMesh) -> torch.Tensor:
    return torch.zeros((), dtype=torch.float64, device=mesh.device)
