"""A run of the trainer as a plain loop with torch's optimizer, in one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch

from energon_lite.trainer import OptimizerConfig, Trainer, TrainerConfig, learning_rate


def torchs_optimizer(
    parameters: Iterable[torch.Tensor], settings: OptimizerConfig, fused: bool | None = None
) -> torch.optim.Optimizer:
    """AdamW or SGD, which decays matrices only; its learning rate is not set."""
    given = list(parameters)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in given if p.dim() > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in given if p.dim() <= 1], "weight_decay": 0.0},
    ]
    if settings.algorithm == "sgd":
        return torch.optim.SGD(groups, lr=1.0, momentum=settings.momentum, fused=fused)
    return torch.optim.AdamW(groups, betas=settings.betas, eps=settings.eps, fused=fused)


def run_by_hand(config: TrainerConfig, parts: dict[str, Any]) -> tuple[list[torch.Tensor], list[float]]:
    """Parameters at the end, and losses, over the batches of one rank; of narrow weights, a wide copy is updated.

    Args:
        config: the run's.
        parts: model, loss and task encoder, as :class:`Trainer` takes them.
    """
    with Trainer(dataclasses.replace(config, output=f"{config.output}-by-hand"), **parts) as trainer:
        batches = iter(trainer.loader)
        steps = [trainer.data.take_step(batches) for _ in range(config.train.steps)]
        model = parts["make_model"](config, trainer.mesh)
    settings, losses = config.optimizer, []
    trained = [p for p in model.parameters() if p.requires_grad]
    wide = [p.detach().to(torch.promote_types(p.dtype, torch.float32)) for p in trained]
    optimizer = torchs_optimizer(wide, settings)
    for number, step in enumerate(steps):
        count = max(sum(int(batch.loss_tokens) for batch in step), 1)
        sums = [torch.zeros_like(w) for w in wide]
        losses.append(0.0)
        for batch in step:
            loss = parts["loss"](model, batch).loss / count
            loss.backward()
            losses[-1] += float(loss)
            for total, p in zip(sums, trained, strict=True):
                total += 0 if p.grad is None else p.grad
                p.grad = None
        norm = torch.stack([total.norm() for total in sums]).double().norm()
        for w, total in zip(wide, sums, strict=True):
            w.grad = total * min(1.0, settings.clip / float(norm)) if settings.clip else total
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(number, config.train.steps, settings)
        optimizer.step()
        with torch.no_grad():
            for p, w in zip(trained, wide, strict=True):
                p.copy_(w)
    return [p.detach() for p in model.parameters()], losses
