"""One optimizer step, and one evaluation, with losses normalized by the number of tokens over all ranks.

The loss of a step is the sum over its tokens divided by their number, over all micro-batches and all ranks. A mean of
means would weight a token by the fill of its micro-batch. So the micro-batches of a step are fetched first, the global
number of tokens is known before the first backward pass, and gradients are only ever summed.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from energon_lite.errors import NonFiniteError, UsageError
from energon_lite.trainer.models.interface import Loss, TrainingBatch
from energon_lite.trainer.models.llama import language_loss
from energon_lite.trainer.optimizer.overlapped_optimizer import OverlappedDistributedOptimizer
from energon_lite.trainer.parallel.mesh import ParallelMesh
from energon_lite.trainer.training.guards import SpikeGuard
from energon_lite.trainer.training.pipeline import Record, ToHost, run_pipeline


@dataclass(frozen=True)
class StepResult:
    """Numbers of a finished step; equal on every rank.

    Args:
        loss: mean loss of a token.
        grad_norm: global norm of the gradient before clipping.
        tokens: number of tokens in the loss; NaN if a loss mask is not finite, as is the loss in this case.
        lr: the learning rate.
        updates: number of updates up to this step: fewer than steps, if some were left out.
        spikes: number of updates left out by the :class:`SpikeGuard`.
        more: means of the further sums of the loss.
    """

    loss: float
    grad_norm: float
    tokens: float
    lr: float
    updates: int
    spikes: int
    more: dict[str, float]


class LaunchedStep:
    """A step whose work was launched on the device. Reading its numbers waits; launching the next one does not.

    Args:
        values: float64 ``[6 + metrics]`` on the device: tokens, gradient norm, updates of the optimizer so far, updates
            left out for their losses, and the sums of :func:`run_pipeline`.
        lr: the learning rate.
        metrics: names of the further sums.

    Attributes:
        ended: time at which the numbers were available, or seen to be, by ``time.perf_counter``.
    """

    def __init__(self, values: torch.Tensor, lr: float, metrics: Sequence[str] = ()):
        self._values = ToHost(values)
        self._lr = lr
        self._metrics = metrics
        self.ended = 0.0 if values.is_cuda else time.perf_counter()

    def result(self) -> StepResult:
        """Wait for the step's numbers.

        Raises:
            UsageError: on all ranks: the loss has other numbers of terms than the batches.
        """
        tokens, norm, updates, spikes, loss, counted, *more = self._values.read()
        self.ended = self.ended or time.perf_counter()
        if abs(counted - tokens) > 1e-6 * tokens:
            what = f"the losses of a step have {counted:g} terms, its micro-batches {tokens:g} loss_tokens"
            raise UsageError(what, fix="return in LossSums.terms the number of terms in the loss of this rank")
        means = {name: total / (tokens or 1.0) for name, total in zip(self._metrics, more, strict=True)}
        return StepResult(loss, norm, _whole(tokens), self._lr, int(updates), int(spikes), means)


def train_step(
    model: nn.Module,
    optimizer: OverlappedDistributedOptimizer,
    micro_batches: Sequence[TrainingBatch | None],
    mesh: ParallelMesh,
    *,
    lr: float | Callable[[int], float],
    record: Record | None = None,
) -> StepResult:
    """Run :func:`launch_step`, and wait for its result."""
    return launch_step(model, optimizer, micro_batches, mesh, lr=lr, record=record).result()


def launch_step(
    model: nn.Module,
    optimizer: OverlappedDistributedOptimizer,
    micro_batches: Sequence[TrainingBatch | None],
    mesh: ParallelMesh,
    *,
    lr: float | Callable[[int], float],
    loss: Loss[Any, Any] = language_loss,
    metrics: Sequence[str] = (),
    record: Record | None = None,
    spikes: SpikeGuard | None = None,
) -> LaunchedStep:
    """Launch forward, backward and update on this rank's micro-batches of one step. Every rank must call it.

    The function does not wait for the device, so the next step can be launched behind. (A pipeline waits for messages
    it receives; a learning rate that depends on tokens waits for their number, which is known when the step begins.)

    Args:
        model: the model, on ``mesh``.
        optimizer: optimizer of that model.
        micro_batches: this rank's; tensor- and context-parallel peers and the first and the last pipeline stage have
            equal ones, stages between them None for each. They may be empty, and their number is equal on all ranks.
        mesh: the ranks.
        lr: the learning rate, or a function from the number of tokens of the step to it.
        loss, metrics, record: see :func:`run_pipeline`.
        spikes: guard that may leave out the update because of the step's loss.
    """
    tokens = _from_last_stage(mesh.sum_over_data(_count_tokens(micro_batches, mesh)), mesh)
    counted = ToHost(tokens.view(1))
    optimizer.begin_step(len(micro_batches))
    what = model, micro_batches, loss, metrics, mesh
    sums = run_pipeline(*what, divisor=tokens + (tokens == 0), after_backward=optimizer.end_micro_batch, record=record)
    sums = _from_last_stage(mesh.sum_over_data(sums), mesh)
    if callable(lr):  # a step whose number of tokens is not finite updates nothing
        lr = lr(int(count) if math.isfinite(count := counted.read()[0]) else 0)
    leave_out = None if spikes is None else spikes.judge(sums[0])
    optimizer_numbers = optimizer.launch_step(lr, leave_out)
    left_out = torch.zeros_like(tokens) if spikes is None else spikes.left_out
    return LaunchedStep(torch.stack([tokens, *optimizer_numbers, left_out, *sums]), lr, metrics)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[TrainingBatch | None],
    mesh: ParallelMesh,
    loss: Loss[Any, Any] = language_loss,
    metrics: Sequence[str] = (),
) -> tuple[float, ...]:
    """Return means over all batches of all ranks: of the loss and, last, of ``metrics``; and the number of tokens.

    Every rank must call it. Modules are in evaluation mode.

    Args:
        model: the model, on ``mesh``.
        batches: this rank's batches, as for :func:`train_step`. An empty batch counts as zero tokens.
        mesh: the ranks.
        loss, metrics: see :func:`run_pipeline`.

    Returns:
        The loss, the number of tokens, and ``metrics``.
    """
    sums = torch.zeros(2 + len(metrics), dtype=torch.float64, device=mesh.device)
    remaining, modes = iter(batches), [(module, module.training) for module in model.modules()]
    model.eval()
    # A few at a time: enough to fill the stages, without all in memory at once.
    while part := list(itertools.islice(remaining, 4 * mesh.pp)):
        here = [None if batch is None else batch.to(mesh.device) for batch in part]
        sums += run_pipeline(model, here, loss, metrics, mesh, backward=False)
    for module, training in modes:  # parents first; a part may have been in evaluation mode before
        if module.training != training:
            module.train(training)
    mean, tokens, *more = _from_last_stage(mesh.sum_over_data(sums), mesh).tolist()
    return mean / (tokens or 1.0), _whole(tokens), *(value / (tokens or 1.0) for value in more)


def evaluate_each(
    model: nn.Module,
    sets: Iterable[tuple[str, Iterable[TrainingBatch | None]]],
    mesh: ParallelMesh,
    loss: Loss[Any, Any] = language_loss,
    metrics: Sequence[str] = (),
) -> dict[str, float]:
    """Return the metrics of validation sets: ``eval_loss/NAME``, ``eval_tokens/NAME``, and ``eval_METRIC/NAME``.

    Every rank must call it.

    Args:
        sets: pairs of name and this rank's batches; without name, the metrics are ``eval_loss`` and ``eval_tokens``.
        loss, metrics: see :func:`run_pipeline`.

    Raises:
        NonFiniteError: on all ranks: a loss mask is not finite.
    """
    values: dict[str, float] = {}
    for name, batches in sets:
        found = dict(zip(("loss", "tokens", *metrics), evaluate(model, batches, mesh, loss, metrics), strict=True))
        if not math.isfinite(found["tokens"]):
            what, where = "the loss mask of a validation set is not finite", name or "data.val_path"
            raise NonFiniteError(what, where=where, fix="mend its data, or the loss_mask that the task encoder makes")
        values |= {f"eval_{key}/{name}".rstrip("/"): value for key, value in found.items()}
    return values


def _whole(count: float) -> float:
    """Return a sum over a loss mask, as an integer if it is finite."""
    return int(count) if math.isfinite(count) else math.nan


def _count_tokens(micro_batches: Iterable[TrainingBatch | None], mesh: ParallelMesh) -> torch.Tensor:
    """Return the tokens in the loss of this rank's micro-batches, a float64 scalar.

    Only one rank of a model replica counts them: that of the last stage with context-parallel rank 0.
    """
    tokens = torch.zeros((), dtype=torch.float64, device=mesh.device)
    if mesh.is_last_stage and mesh.rank("cp") == 0:
        for batch in micro_batches:
            assert batch is not None, "the last stage needs its micro-batches"
            tokens += batch.loss_tokens
    return tokens


def _from_last_stage(values: torch.Tensor, mesh: ParallelMesh) -> torch.Tensor:
    """Broadcast the values of the last stage to all stages; the other stages have zeros."""
    if (group := mesh.group("pp")) is not None:
        dist.all_reduce(values, group=group)
    return values
