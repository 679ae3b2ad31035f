"""Stages of a pipeline: the order of their micro-batches, the execution of a step, and the messages between stages.

A stage follows its :func:`pipeline_schedule`; a single one takes the micro-batches one after the other, each forward
and backward. Before an action it waits for the inputs of the action, and it never waits for its sends, so no order of
messages can block it. A micro-batch may have any shape: the first stage broadcasts the shapes before the step, so the
stages between need no data. It also broadcasts the costs, and all stages take the micro-batches in the
:func:`pipeline_order` of the costs.

**1F1B** (PipeDream-Flush; Narayanan et al., arXiv:2006.09503): a stage runs as many micro-batches forward as there are
stages behind it, then alternates one forward and one backward pass, and finally runs the remaining backward passes. So
it never holds the activations of more micro-batches than there are stages from it to the last one.

**Interleaved** (Narayanan et al., arXiv:2104.04473): a stage has several chunks of layers, each a stage of a longer
pipeline that passes all ranks several times. The first micro-batch reaches the last rank sooner, and the bubble shrinks
by a factor equal to the number of chunks; the number of messages grows by the same factor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from energon_lite.errors import UsageError
from energon_lite.trainer.models.interface import Loss, LossSums, MultimodalBatch, TrainingBatch, checked_sums
from energon_lite.trainer.models.llama import LlamaModel, Stream, language_loss
from energon_lite.trainer.models.sequence import lengths_of_rows, local_length
from energon_lite.trainer.parallel.mesh import ParallelMesh
from energon_lite.trainer.training.config import extra
from energon_lite.trainer.training.throughput import batch_flops


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
    return [
        (chunk, number)
        for first in range(0, micro_batches, stages)
        for chunk in range(chunks)
        for number in range(first, min(first + stages, micro_batches))
    ]


#: Callback for each pass: the action, and the seconds at which it began and ended, by the callback's attribute
#: ``clock`` if it has one, else by ``time.perf_counter``.
Record = Callable[[Action, float, float], None]


class ToHost:
    """Numbers that are copied from the device to the host. Reading waits for the copy, not for work launched later."""

    def __init__(self, values: torch.Tensor):
        self._values = values.to("cpu", non_blocking=True)
        self._there = None
        if values.is_cuda:
            self._there = torch.cuda.Event()
            self._there.record()

    def read(self) -> list[float]:
        """Wait for the copy, and return the numbers, ``[n]``."""
        if self._there is not None:
            self._there.synchronize()
        return self._values.tolist()


class Wire:
    """Messages to and from the neighbouring stages of a mesh.

    With ``virtual`` chunks, the stage after the last one is the first.
    """

    def __init__(self, mesh: ParallelMesh):
        self.mesh = mesh
        self._sending: list[tuple[Any, torch.Tensor]] = []  # pending sends and their tensors

    def send(self, tensor: torch.Tensor, step: int) -> None:
        """Send a tensor to the next stage (1) or the previous one (-1); an empty tensor is not sent."""
        # A tensor must neither be changed nor freed while it is being sent.
        self._sending = [(work, kept) for work, kept in self._sending if not work.is_completed()]
        peer, group = self._way(step, step)
        if tensor.numel():
            tensor = tensor.contiguous()
            self._sending.append((dist.isend(tensor, peer, group=group), tensor))

    def receive(self, shape: Sequence[int], dtype: torch.dtype, step: int) -> torch.Tensor:
        """Receive a tensor from the next stage (1) or the previous one (-1)."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self.mesh.device)
        peer, group = self._way(step, -step)
        if tensor.numel():
            dist.recv(tensor, peer, group=group)
        return tensor

    def finish(self) -> None:
        """Wait until all messages have arrived."""
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()

    def _way(self, step: int, direction: int) -> tuple[int, dist.ProcessGroup]:
        """Return the rank of a neighbouring stage, and the group for messages in one direction between the two."""
        other = self.mesh.rank("pp") + step
        street = ("down" if direction > 0 else "up") + ("" if 0 <= other < self.mesh.pp else "_wrap")
        return self.mesh.stage_rank(other), self.mesh.process_groups[street]


def run_pipeline(
    model: nn.Module,
    micro_batches: Sequence[TrainingBatch | None],
    loss: Loss[Any, Any] = language_loss,
    metrics: Sequence[str] = (),
    mesh: ParallelMesh | None = None,
    *,
    divisor: torch.Tensor | float = 1.0,
    backward: bool = True,
    after_backward: Callable[[Collection[nn.Parameter] | None], object] | None = None,
    record: Record | None = None,
) -> torch.Tensor:
    """Run the forward and optionally the backward passes of a step; gradients are added to ``parameter.grad``.

    Every rank of the pipeline must call it, with equal numbers of micro-batches. With one stage it is plain
    accumulation.

    Args:
        model: the model; with several stages, this stage's part of a :class:`LlamaModel`.
        micro_batches: equal ones on the first and the last stage; on stages between them, None for each. A micro-batch
            without tokens is passed over.
        loss: loss of a model on one stage; several stages compute their own.
        metrics: names of the further sums of the loss.
        mesh: the ranks; None for those of the model.
        divisor: divisor of the sum of losses.
        backward: False to evaluate; call it under ``torch.no_grad()`` in this case.
        after_backward: called after each backward pass of a micro-batch through a chunk, empty micro-batches included,
            with the parameters whose gradients are complete; None for all. Once more on a rank that then encodes
            images of others for an empty micro-batch: for all but the encoder.
        record: called after each action with the seconds at which it began and ended, without the wait for its inputs.

    Returns:
        Sums over this rank's micro-batches, float64 ``[2 + metrics]``: the loss over ``divisor``, the number of its
        terms, and ``metrics``. They are zero on all stages but the last.

    Raises:
        UsageError: the first and the last stage have micro-batches of different sizes.
    """
    mesh = mesh or cast(LlamaModel, model).mesh
    divisor = divisor if isinstance(divisor, torch.Tensor) else torch.full((), divisor, device=mesh.device)
    shares = backward and mesh.is_first_stage and mesh.group("images") is not None
    if shares:
        cast(LlamaModel, model).exchange = extra("balance", "mesh.share_images").image_exchange(model, micro_batches)
    try:
        done = after_backward or (lambda of: None)
        stage = _Stage(model, micro_batches, loss, metrics, mesh, divisor, done, record)
        schedule = pipeline_schedule(
            mesh.rank("pp"), mesh.pp, len(micro_batches), chunks=mesh.virtual, backward=backward
        )
        for planned in schedule:
            action = replace(planned, micro_batch=stage.order[planned.micro_batch])
            if action.backward:
                stage.backward(action)
            else:
                stage.forward(action, keep=backward)
        stage.wire.finish()
        return stage.sums
    finally:
        if shares:
            cast(LlamaModel, model).exchange = None


@dataclass(eq=False)
class _Stage:
    """State and passes of one stage during a step."""

    model: Any
    micro_batches: Sequence[TrainingBatch | None]
    loss: Loss[Any, Any]
    metrics: Sequence[str]
    mesh: ParallelMesh
    divisor: torch.Tensor
    done: Callable[[Collection[nn.Parameter] | None], object]
    record: Record | None

    def __post_init__(self) -> None:
        mesh = self.mesh
        self.wire = Wire(mesh)
        self.sums = torch.zeros(2 + len(self.metrics), dtype=torch.float64, device=mesh.device)
        #: Input and output of each forward pass whose backward pass is still to come, by (chunk, micro-batch).
        self._held: dict[tuple[int, int], tuple[Stream | None, torch.Tensor]] = {}
        #: For each empty micro-batch in whose turn this rank encodes images of other ranks: the zero to differentiate.
        self._others: dict[int, torch.Tensor] = {}
        #: For each micro-batch, the lengths of its packed documents; none in rows of one document each.
        self._lengths: list[list[int]] = [[] for _ in self.micro_batches]
        self._sizes = self._agree_on_sizes()
        costs = [cost for *_, cost in self._sizes]
        #: One stage has no bubble. Ranks that encode each other's images must run the micro-batches in equal order.
        self.order = list(range(len(costs))) if mesh.pp == 1 or mesh.share_images else pipeline_order(costs)

    def forward(self, action: Action, *, keep: bool) -> None:
        """Receive the input, compute, send the output; with ``keep``, hold both for the backward pass."""
        model, mesh, chunk = self.model, self.mesh, action.chunk
        batch = self.micro_batches[action.micro_batch]
        (rows, length, *_), received = self._sizes[action.micro_batch], None
        if rows * length == 0:
            if batch is not None and mesh.starts(chunk) and (others := _images_of_others(model, batch)) is not None:
                self._others[action.micro_batch] = others
            return
        if not mesh.starts(chunk):
            config, lengths = model.config, self._lengths[action.micro_batch]
            positions = rows, local_length(length, mesh), config.hidden_size
            hidden = self.wire.receive(positions, config.torch_dtype, -1).requires_grad_(keep)
            received = Stream(hidden, lengths_of_rows(lengths, rows) if lengths else None)
        with _recorded(self.record, action, mesh.device):
            made = self.loss(model, batch) if mesh.pp == 1 else model.run_chunk(chunk, batch, received)
            if mesh.pp == 1 or isinstance(made, LossSums):
                made = self._added(checked_sums(made, self.metrics))
        if isinstance(made, Stream):
            self.wire.send(made.hidden.detach(), 1)
            made = made.hidden
        if keep:
            self._held[chunk, action.micro_batch] = received, made

    def _added(self, made: LossSums) -> torch.Tensor:
        """Add the sums of a micro-batch; return its loss over the divisor."""
        loss = made.loss / self.divisor.to(made.loss.dtype)
        for total, part in zip(self.sums, (loss, made.terms, *map(made.more.__getitem__, self.metrics)), strict=True):
            total += part.detach() if isinstance(part, torch.Tensor) else part
        return loss

    def backward(self, action: Action) -> None:
        """Receive the gradient of the output, compute, send the gradient of the input."""
        chunk = None if self.mesh.virtual == 1 else self.model.parameters_of_chunk(action.chunk)
        held = self._held.pop((action.chunk, action.micro_batch), None)
        if held is None:  # the micro-batch was empty
            if self.mesh.starts(action.chunk) and action.micro_batch in self._others:
                # First all other gradients: ranks with rows may wait for their sums before they send those of images.
                chunk = [p for part in (self.model.vision, self.model.projector) if part for p in part.parameters()]
                self.done(set(self.model.parameters_of_chunk(action.chunk)).difference(chunk))
                self._others.pop(action.micro_batch).backward()
            self.done(chunk)
            return
        received, made = held
        gradient = None if self.mesh.ends(action.chunk) else self.wire.receive(made.shape, made.dtype, 1)
        with _recorded(self.record, action, self.mesh.device):
            # With frozen parameters, no parameter up to here may need a gradient.
            if made.requires_grad:
                made.backward(gradient)
        if received is not None:
            grad = received.hidden.grad
            self.wire.send(torch.zeros_like(received.hidden) if grad is None else grad, -1)
        self.done(chunk)

    def _agree_on_sizes(self) -> list[list[int]]:
        """Return for each micro-batch: rows, their length, the number of packed documents, and operations.

        The first stage broadcasts them over the CPU, and the lengths of documents, so that no rank waits for its device
        and the stages between need no data.
        """
        mesh, batches = self.mesh, self.micro_batches
        sizes_here = [[0] * 4 if batch is None else self._told(batch) for batch in batches]
        if mesh.pp == 1:
            return sizes_here
        sizes: list[list[int]] = self._of_first_stage(sizes_here)
        if mesh.is_last_stage and sizes_here != sizes:
            number = [own == first for own, first in zip(sizes_here, sizes, strict=True)].index(False)
            raise UsageError(
                f"micro-batch {number} of the step is not the same on the first and the last stage",
                fix="give both equal loaders (WorkerConfig.from_mesh(..., stages='ends')), restored to equal states",
            )
        counts = [documents for _, _, documents, _ in sizes]
        lengths_here = [cast(MultimodalBatch, batch).known_lengths() or [] for batch in batches if batch is not None]
        if sum(counts):
            # The stages between have none, so zeros stand for them.
            lengths = iter(self._of_first_stage([*chain.from_iterable(lengths_here)] or [0] * sum(counts)))
            self._lengths = [[*islice(lengths, count)] for count in counts]
        return sizes

    def _of_first_stage(self, here: Sequence[Any]) -> list[Any]:
        """Return the first stage's integers; all stages give as many."""
        mesh, shared = self.mesh, torch.tensor(here, dtype=torch.int64)
        dist.broadcast(shared, mesh.stage_rank(0), group=mesh.process_groups.get("pp_host", mesh.group("pp")))
        return shared.tolist()

    def _told(self, batch: TrainingBatch) -> list[int]:
        if not isinstance(batch, MultimodalBatch):
            counted = batch.loss_tokens
            return [int(isinstance(counted, torch.Tensor) or counted != 0), 1, 0, 0]
        if self.mesh.pp == 1:
            return [*batch.tokens.shape, 0, 0]
        lengths, cost = batch.known_lengths() or [], batch_flops(self.model.config, batch)
        return [*batch.tokens.shape, len(lengths), int(cost)]


def _images_of_others(model: Any, batch: TrainingBatch) -> torch.Tensor | None:
    """Encode images of other ranks on a rank without rows; a zero to call ``backward`` of, or None."""
    if not isinstance(batch, MultimodalBatch) or model.exchange is None:
        return None
    zero = model.exchange(batch.image)[0].sum()
    return zero if zero.requires_grad else None


@contextmanager
def _recorded(record: Record | None, action: Action, device: torch.device) -> Iterator[None]:
    """Report to ``record`` the times at which the work inside began and was completed."""
    if record is None:
        yield
        return
    clock = getattr(record, "clock", time.perf_counter)
    began = _now(device, clock)
    yield
    record(action, began, _now(device, clock))


def _now(device: torch.device, clock: Callable[[], float]) -> float:
    """Wait for all work launched so far, and return the time in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock()
