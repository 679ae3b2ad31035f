"""Steps of torch's optimizer in one process, and a run of the trainer as a plain loop of them.

Muon's part of it is written here once more, by singular values.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from energon_lite.trainer import OptimizerConfig, Trainer, TrainerConfig, learning_rate


@dataclass
class PlainRun:
    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]


def plain_steps(
    named: Mapping[str, torch.Tensor],
    steps: Sequence[Sequence[Callable[[], torch.Tensor]]],
    settings: OptimizerConfig,
    rates: Sequence[float] | None = None,
) -> tuple[list[float], list[float]]:
    """Update parameters; losses and norms of gradients of the steps. Of narrow weights, a copy in float32 is updated.

    Args:
        named: the parameters. Without groups of settings, matrices decay and nothing else.
        steps: of each step, what makes the loss of each micro-batch.
        settings: of the optimizer.
        rates: learning rates of the steps; None for those of the schedule.
    """
    rates = [learning_rate(number, len(steps), settings) for number in range(len(steps))] if rates is None else rates
    trained = {name: p for name, p in named.items() if p.requires_grad}
    wide = {name: p.detach().to(torch.promote_types(p.dtype, torch.float32)) for name, p in trained.items()}
    groups: list[dict[str, Any]] = []
    for name, w in wide.items():
        rule = settings.rule(name, w.dim()) if settings.groups else (settings.weight_decay * (w.dim() > 1), 1.0)
        groups.append({"params": [w], "name": name, "weight_decay": rule[0], "scale": rule[1]})
    momenta = {n: torch.zeros_like(w) for n, w in wide.items() if settings.algorithm_of(n, w.dim()) == "muon"}
    if settings.algorithm == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(groups, lr=1.0, momentum=settings.momentum, fused=True)
    else:
        optimizer = torch.optim.AdamW(groups, betas=settings.betas, eps=settings.eps, fused=True)
    losses, norms = [], []
    for micro_batches, lr in zip(steps, rates, strict=True):
        grads = {name: torch.zeros_like(w) for name, w in wide.items()}
        losses.append(0.0)
        for make_loss in micro_batches:
            loss = make_loss()
            loss.backward()
            losses[-1] += float(loss.detach())
            for name, p in trained.items():
                grads[name] += 0 if p.grad is None else p.grad
                p.grad = None
        norms.append(math.sqrt(sum(float(grad.double().square().sum()) for grad in grads.values())))
        for group in optimizer.param_groups:
            name, w = group["name"], group["params"][0]
            group["lr"] = lr * group["scale"]
            grad = grads[name] * (settings.clip / max(settings.clip, norms[-1]) if settings.clip else 1.0)
            if name in momenta:
                _muon(w, grad, momenta[name], group["lr"], group["weight_decay"], settings)
            else:
                w.grad = grad
        optimizer.step()
        with torch.no_grad():
            for name, p in trained.items():
                p.copy_(wide[name])
    return losses, norms


def _muon(p: Any, grad: Any, momentum: Any, lr: float, decay: float, config: OptimizerConfig) -> None:
    beta, (rows, columns) = config.momentum, p.shape
    momentum.mul_(beta).add_(grad * (1 - beta))
    u, values, v = torch.linalg.svd((1 - beta) * grad + beta * momentum, full_matrices=False)
    values = values / values.square().sum().sqrt().clamp(min=1e-7)
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    size = 0.2 * max(rows, columns) ** 0.5 if config.muon_scale == "rms" else max(1.0, rows / columns) ** 0.5
    p.mul_(1 - lr * decay).sub_(lr * size * (u * values) @ v)


def run_by_hand(config: TrainerConfig, parts: dict[str, Any]) -> tuple[list[torch.Tensor], list[float]]:
    """Parameters at the end, and losses, over the batches of one rank.

    Args:
        config: the run's.
        parts: model, loss and task encoder, as :class:`Trainer` takes them.
    """
    with Trainer(dataclasses.replace(config, output=f"{config.output}-by-hand"), **parts) as trainer:
        batches = iter(trainer.loader)
        taken = [trainer.data.take_step(batches) for _ in range(config.train.steps)]
        model = parts["make_model"](config, trainer.mesh)

    def loss(batch: Any, terms: int) -> torch.Tensor:
        found: torch.Tensor = parts["loss"](model, batch).loss / max(terms, 1)
        return found

    steps = [[partial(loss, batch, sum(int(one.loss_tokens) for one in step)) for batch in step] for step in taken]
    losses, _ = plain_steps(dict(model.named_parameters()), steps, config.optimizer)
    return [p.detach() for p in model.parameters()], losses
