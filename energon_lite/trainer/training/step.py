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

import torch
import torch.distributed as dist

from energon_lite.errors import NonFiniteError
from energon_lite.trainer.models.batch import MultimodalBatch
from energon_lite.trainer.models.llama import LlamaModel
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
    """

    loss: float
    grad_norm: float
    tokens: float
    lr: float
    updates: int
    spikes: int


class LaunchedStep:
    """A step whose work was launched on the device. Reading its numbers waits; launching the next one does not.

    Args:
        values: float64 ``[5]`` on the device: loss, tokens, gradient norm, updates of the optimizer so far, and updates
            left out for their losses.
        lr: the learning rate.

    Attributes:
        ended: time at which the numbers were available, or seen to be, by ``time.perf_counter``.
    """

    def __init__(self, values: torch.Tensor, lr: float):
        self._values = ToHost(values)
        self._lr = lr
        self.ended = 0.0 if values.is_cuda else time.perf_counter()

    def result(self) -> StepResult:
        """Wait for the step's numbers."""
        loss, tokens, norm, updates, spikes = self._values.read()
        self.ended = self.ended or time.perf_counter()
        return StepResult(loss, norm, _whole(tokens), self._lr, int(updates), int(spikes))


def train_step(
    model: LlamaModel,
    optimizer: OverlappedDistributedOptimizer,
    micro_batches: Sequence[MultimodalBatch | None],
    mesh: ParallelMesh,
    *,
    lr: float | Callable[[int], float],
    record: Record | None = None,
) -> StepResult:
    """Run :func:`launch_step`, and wait for its result."""
    return launch_step(model, optimizer, micro_batches, mesh, lr=lr, record=record).result()


def launch_step(
    model: LlamaModel,
    optimizer: OverlappedDistributedOptimizer,
    micro_batches: Sequence[MultimodalBatch | None],
    mesh: ParallelMesh,
    *,
    lr: float | Callable[[int], float],
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
        record: see :func:`run_pipeline`.
        spikes: guard that may leave out the update because of the step's loss.
    """
    tokens = _from_last_stage(mesh.sum_over_data(_count_tokens(micro_batches, mesh)), mesh)
    counted = ToHost(tokens.view(1))
    optimizer.begin_step(len(micro_batches))

    parts = [None if mesh.virtual == 1 else model.parameters_of_chunk(chunk) for chunk in range(mesh.virtual)]
    loss = run_pipeline(
        model,
        micro_batches,
        divisor=tokens.clamp(min=1.0),
        after_backward=lambda chunk: optimizer.end_micro_batch(parts[chunk]),
        record=record,
    )
    loss = _from_last_stage(mesh.sum_over_data(loss), mesh)
    if callable(lr):  # a step whose number of tokens is not finite updates nothing
        lr = lr(int(count) if math.isfinite(count := counted.read()[0]) else 0)
    leave_out = None if spikes is None else spikes.judge(loss)
    optimizer_numbers = optimizer.launch_step(lr, leave_out)
    left_out = torch.zeros_like(loss) if spikes is None else spikes.left_out
    return LaunchedStep(torch.stack([loss, tokens, *optimizer_numbers, left_out]), lr)


@torch.no_grad()
def evaluate(model: LlamaModel, batches: Iterable[MultimodalBatch | None], mesh: ParallelMesh) -> tuple[float, float]:
    """Return the mean loss of a token over all batches of all ranks, and the number of tokens. Every rank must call it.

    Args:
        model: the model, on ``mesh``.
        batches: this rank's batches, as for :func:`train_step`. An empty batch counts as zero tokens.
        mesh: the ranks.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    remaining = iter(batches)
    # A few at a time: enough to fill the stages, without all in memory at once.
    while part := list(itertools.islice(remaining, 4 * mesh.pp)):
        here = [None if batch is None else batch.to(mesh.device) for batch in part]
        sums[0] += run_pipeline(model, here, backward=False)
        sums[1] += _count_tokens(here, mesh)
    loss, tokens = _from_last_stage(mesh.sum_over_data(sums), mesh)
    return (loss / tokens.clamp(min=1.0)).item(), _whole(tokens.item())


def evaluate_each(
    model: LlamaModel, sets: Iterable[tuple[str, Iterable[MultimodalBatch | None]]], mesh: ParallelMesh
) -> dict[str, float | int]:
    """Return the metrics of validation sets: ``eval_loss/NAME`` and ``eval_tokens/NAME``. Every rank must call it.

    Args:
        sets: pairs of name and this rank's batches; without name, the metrics are ``eval_loss`` and ``eval_tokens``.

    Raises:
        NonFiniteError: on all ranks: a loss mask is not finite.
    """
    values: dict[str, float | int] = {}
    for name, batches in sets:
        loss, tokens = evaluate(model, batches, mesh)
        if not math.isfinite(tokens):
            what, where = "the loss mask of a validation set is not finite", name or "data.val_path"
            raise NonFiniteError(what, where=where, fix="mend its data, or the loss_mask that the task encoder makes")
        values |= {f"{key}/{name}".rstrip("/"): value for key, value in (("eval_loss", loss), ("eval_tokens", tokens))}
    return values


def _whole(count: float) -> float:
    """Return a sum over a loss mask, as an integer if it is finite."""
    return int(count) if math.isfinite(count) else math.nan


def _count_tokens(micro_batches: Iterable[MultimodalBatch | None], mesh: ParallelMesh) -> torch.Tensor:
    """Return the tokens in the loss of this rank's micro-batches, a float64 scalar.

    Only one rank of a model replica counts them: that of the last stage with context-parallel rank 0.
    """
    tokens = torch.zeros((), dtype=torch.float64, device=mesh.device)
    if mesh.is_last_stage and mesh.rank("cp") == 0:
        for batch in micro_batches:
            assert batch is not None, "the last stage needs its micro-batches"
            tokens += batch.loss_mask.sum(dtype=torch.float64)
    return tokens


def _from_last_stage(values: torch.Tensor, mesh: ParallelMesh) -> torch.Tensor:
    """Broadcast the values of the last stage to all stages; the other stages have zeros."""
    if (group := mesh.group("pp")) is not None:
        dist.all_reduce(values, group=group)
    return values
