"""Running a step's micro-batches through the stages of a pipeline: who computes what when, and what is sent to whom.

With one stage, :func:`_one_stage` is all of it. Else a stage goes through its :func:`pipeline_schedule`. Before an
action it waits for what the action needs, and it never waits for what it sends, so no order of messages can block it. A
micro-batch may have any shape: the first stage tells them before the step, and stages between need no data. It tells
what they cost, too, and all stages take them in the :func:`~energon_lite.extras.balance.pipeline_order` of that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from energon_lite.errors import UsageError
from energon_lite.extras.balance import pipeline_order
from energon_lite.trainer.models.batch import MultimodalBatch
from energon_lite.trainer.models.llama import LlamaModel, Stream
from energon_lite.trainer.models.sequence import local_length, whole_length
from energon_lite.trainer.parallel.mesh import ParallelMesh
from energon_lite.trainer.training.image_exchange import image_exchange
from energon_lite.trainer.training.pipeline_schedule import Action, pipeline_schedule
from energon_lite.trainer.training.throughput import batch_flops

#: Told of each pass: what it was, and the seconds at which it began and ended: by its attribute ``clock``, if it has
#: one, else by ``time.perf_counter``.
Record = Callable[[Action, float, float], None]


class ToHost:
    """Numbers of the device on their way here; who reads them waits for those, and for nothing launched behind."""

    def __init__(self, values: torch.Tensor):
        self._values, self._there = values.to("cpu", non_blocking=True), None
        if values.is_cuda:
            self._there = torch.cuda.Event()
            self._there.record()

    def read(self) -> list[float]:
        """The numbers, ``[n]``."""
        if self._there is not None:
            self._there.synchronize()
        found: list[float] = self._values.tolist()
        return found


class Wire:
    """Messages to and from the neighbouring stages of a mesh; with ``virtual`` chunks, the last's next is the first."""

    def __init__(self, mesh: ParallelMesh):
        self.mesh = mesh
        self._sending: list[tuple[Any, torch.Tensor]] = []  # works, and what they send

    def send(self, tensor: torch.Tensor, step: int) -> None:
        """To the next stage (1) or the one before (-1); what has no elements is not sent."""
        # What is on its way must neither be changed nor freed.
        self._sending = [(work, kept) for work, kept in self._sending if not work.is_completed()]
        peer, group = self._way(step, step)
        if tensor.numel():
            tensor = tensor.contiguous()
            self._sending.append((dist.isend(tensor, peer, group=group), tensor))

    def receive(self, shape: Sequence[int], dtype: torch.dtype, step: int) -> torch.Tensor:
        """From the next stage (1) or the one before (-1)."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self.mesh.device)
        peer, group = self._way(step, -step)
        if tensor.numel():
            dist.recv(tensor, peer, group=group)
        return tensor

    def finish(self) -> None:
        """Wait until all that was sent has arrived."""
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()

    def _way(self, step: int, direction: int) -> tuple[int, dist.ProcessGroup]:
        """The rank of a neighbouring stage, and the group for messages in one direction between the two."""
        other = self.mesh.rank("pp") + step
        street = ("down" if direction > 0 else "up") + ("" if 0 <= other < self.mesh.pp else "_wrap")
        return self.mesh.stage_rank(other), self.mesh.process_groups[street]


def run_pipeline(
    model: LlamaModel,
    micro_batches: Sequence[MultimodalBatch | None],
    *,
    divisor: torch.Tensor | float = 1.0,
    backward: bool = True,
    after_backward: Callable[[int], None] | None = None,
    record: Record | None = None,
) -> torch.Tensor:
    """Forward and, if wanted, backward passes of a step; gradients are added to ``parameter.grad``.

    Every rank of the pipeline must call it, with equally many micro-batches. With one stage it is plain accumulation.

    Args:
        model: this stage's part.
        micro_batches: of the first and of the last stage the same ones; on stages between them None for each. A
            micro-batch without tokens goes through for nothing.
        divisor: what the sum of losses is divided by.
        backward: False to evaluate; call it under ``torch.no_grad()`` then.
        after_backward: called with the number of a chunk after each backward pass of a micro-batch through it, an empty
            one too.
        record: called after each action with the seconds at which it began and ended; waiting for what it needs is part
            of neither.

    Returns:
        The sum of the losses of this rank's tokens over ``divisor``, in float64; zero but on the last stage.

    Raises:
        UsageError: the first and the last stage have different micro-batches.
    """
    model.exchange = image_exchange(model, micro_batches) if backward and model.mesh.is_first_stage else None
    try:
        return _run(model, micro_batches, divisor, backward, after_backward or (lambda chunk: None), record)
    finally:
        model.exchange = None


def _run(
    model: LlamaModel,
    micro_batches: Sequence[MultimodalBatch | None],
    divisor: torch.Tensor | float,
    backward: bool,
    after_backward: Callable[[int], None],
    record: Record | None,
) -> torch.Tensor:
    mesh, divisor = model.mesh, torch.as_tensor(divisor, device=model.mesh.device)
    if mesh.pp == mesh.virtual == 1:
        return _one_stage(model, micro_batches, divisor, backward, after_backward, record)
    stage = _Stage(model, micro_batches, divisor, record)
    schedule = pipeline_schedule(mesh.rank("pp"), mesh.pp, len(micro_batches), chunks=mesh.virtual, backward=backward)
    for planned in schedule:
        action = replace(planned, micro_batch=stage.order[planned.micro_batch])
        if not action.backward:
            stage.forward(action, keep=backward)
            continue
        stage.backward(action)
        after_backward(action.chunk)
    return stage.finish()


def _one_stage(
    model: LlamaModel,
    micro_batches: Sequence[MultimodalBatch | None],
    divisor: torch.Tensor,
    backward: bool,
    after_backward: Callable[[int], None],
    record: Record | None,
) -> torch.Tensor:
    """The plain way: one micro-batch after the other, forward and backward."""
    total = torch.zeros((), dtype=torch.float64, device=model.mesh.device)
    for number, batch in enumerate(micro_batches):
        assert batch is not None, "the only stage needs its micro-batches"
        if batch.tokens.numel():
            with _recorded(record, Action(0, number), total.device):
                loss = model.loss_sum(batch)
                loss = loss / divisor.to(loss.dtype)
            total += loss.detach()
            if backward:
                with _recorded(record, Action(0, number, backward=True), total.device):
                    loss.backward()
        elif (others := _images_of_others(model, batch)) is not None:
            others.backward()
        if backward:
            after_backward(0)
    return total


@dataclass(eq=False)
class _Stage:
    """One stage's side of a step."""

    model: LlamaModel
    micro_batches: Sequence[MultimodalBatch | None]
    divisor: torch.Tensor
    record: Record | None

    def __post_init__(self) -> None:
        self.wire = Wire(self.model.mesh)
        self.loss = torch.zeros((), dtype=torch.float64, device=self.model.mesh.device)
        #: What the passes that are not back yet have received and made, by (chunk, micro-batch).
        self._held: dict[tuple[int, int], tuple[Stream | None, torch.Tensor]] = {}
        #: Of empty micro-batches in whose turns images of other ranks are encoded here.
        self._others: dict[int, torch.Tensor] = {}
        self._sizes = self._agree_on_sizes()
        costs = [cost for *_, cost in self._sizes]
        #: Ranks that encode each other's images go through a step together, in the order in which they have it.
        self.order = list(range(len(costs))) if self.model.mesh.share_images else pipeline_order(costs)
        self._differences = self._compare_tokens()

    def forward(self, action: Action, *, keep: bool) -> None:
        """Receive, compute, send; ``keep`` what the backward pass will need."""
        model, chunk, batch = self.model, action.chunk, self.micro_batches[action.micro_batch]
        (rows, length, documents, _), received = self._sizes[action.micro_batch], None
        if rows * length == 0:
            if batch is not None and model.starts(chunk) and (others := _images_of_others(model, batch)) is not None:
                self._others[action.micro_batch] = others
            return
        if not model.starts(chunk):
            received = self._receive(rows, local_length(length, model.mesh), with_documents=bool(documents))
        if received is not None:
            received.hidden.requires_grad_(keep)
        with _recorded(self.record, action, self.loss.device):
            made = model.run_chunk(chunk, batch, received)
            if isinstance(made, torch.Tensor):
                made = made / self.divisor.to(made.dtype)
                self.loss += made.detach()
        if isinstance(made, Stream):
            self.wire.send(made.hidden.detach(), 1)
            if made.documents is not None:
                self.wire.send(made.documents, 1)
            made = made.hidden
        if keep:
            self._held[chunk, action.micro_batch] = received, made

    def backward(self, action: Action) -> None:
        """Receive the gradient, compute, send on."""
        held = self._held.pop((action.chunk, action.micro_batch), None)
        if held is None:  # it was empty
            if self.model.starts(action.chunk) and action.micro_batch in self._others:
                self._others.pop(action.micro_batch).backward()
            return
        received, made = held
        gradient = None if self.model.ends(action.chunk) else self.wire.receive(made.shape, made.dtype, 1)
        with _recorded(self.record, action, self.loss.device):
            # With frozen parameters it may be that nothing before here learns.
            if made.requires_grad:
                made.backward(gradient)
        if received is not None:
            grad = received.hidden.grad
            self.wire.send(torch.zeros_like(received.hidden) if grad is None else grad, -1)

    def finish(self) -> torch.Tensor:
        """Wait until all is sent, and return the loss.

        Raises:
            UsageError: the first and the last stage have different micro-batches.
        """
        for number, difference in enumerate(self._differences.read()):
            if difference:
                raise _different(number)
        self.wire.finish()
        return self.loss

    def _receive(self, rows: int, positions: int, *, with_documents: bool) -> Stream:
        config, mesh = self.model.config, self.model.mesh
        hidden = self.wire.receive((rows, positions, config.hidden_size), config.torch_dtype, -1)
        whole = rows, whole_length(positions, mesh)
        return Stream(hidden, self.wire.receive(whole, torch.int64, -1) if with_documents else None)

    def _agree_on_sizes(self) -> list[list[int]]:
        """Of each micro-batch: rows, their length, whether it has documents, and operations; told over the CPU, and no
        device is waited for."""
        mesh, batches = self.model.mesh, self.micro_batches
        found = [[0] * 4 if batch is None else self._told(batch) for batch in batches]
        told = torch.tensor(found, dtype=torch.int64).view(-1, 4)
        dist.broadcast(told, mesh.stage_rank(0), group=mesh.process_groups.get("pp_host", mesh.group("pp")))
        sizes: list[list[int]] = told.tolist()
        if mesh.is_last_stage and found != sizes:
            raise _different([own == first for own, first in zip(found, sizes, strict=True)].index(False))
        return sizes

    def _told(self, batch: MultimodalBatch) -> list[int]:
        cost = batch_flops(self.model.config, batch)
        return [*batch.tokens.shape, int(batch.documents is not None), int(cost)]

    def _compare_tokens(self) -> ToHost:
        """The first and the last stage read their data each for itself; zeros for micro-batches that are the same."""
        mesh, batches = self.model.mesh, self.micro_batches
        marks = torch.zeros(len(batches), dtype=torch.int64, device=self.loss.device)
        if sign := mesh.is_first_stage - mesh.is_last_stage:
            for number, batch in enumerate(batches):
                assert batch is not None, "the first and the last stage need their micro-batches"
                marks[number] = sign * _fingerprint(batch.tokens)
        dist.all_reduce(marks, group=mesh.group("pp"))
        return ToHost(marks)


def _images_of_others(model: LlamaModel, batch: MultimodalBatch) -> torch.Tensor | None:
    """A rank without rows encodes images, too, if there is an exchange: a zero to call ``backward`` of, or None."""
    if model.exchange is None:
        return None
    zero = model.exchange(batch.image)[0].sum()
    return zero if zero.requires_grad else None


def _different(number: int) -> UsageError:
    return UsageError(
        f"micro-batch {number} of the step is not the same on the first and the last stage",
        fix="give both equal loaders (WorkerConfig.from_mesh(..., stages='ends')), restored to equal states",
    )


@contextmanager
def _recorded(record: Record | None, action: Action, device: torch.device) -> Iterator[None]:
    """Tell who wants to know it when all of the work began and was done."""
    if record is None:
        yield
        return
    clock = getattr(record, "clock", time.perf_counter)
    began = _now(device, clock)
    yield
    record(action, began, _now(device, clock))


def _now(device: torch.device, clock: Callable[[], float]) -> float:
    """Seconds at which all of the work so far is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock()


def _fingerprint(tokens: torch.Tensor) -> torch.Tensor:
    """A number that differs if tokens or their order do, nearly always."""
    flat = tokens.flatten()
    return ((flat + 1) * torch.arange(1, 2 * len(flat) + 1, 2, device=flat.device)).sum()
