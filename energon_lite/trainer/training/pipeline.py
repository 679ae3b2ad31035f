"""Running a step's micro-batches through the stages of a pipeline: who computes what when, and what is sent to whom.

With one stage, :func:`_one_stage` is all of it. Else a stage goes through its :func:`pipeline_schedule`. Before an
action it waits for what the action needs, and it never waits for what it sends, so no order of messages can block it. A
micro-batch may have any shape: it travels with a header, and stages between the first and the last need no data.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from energon_lite.errors import UsageError
from energon_lite.trainer.models.batch import MultimodalBatch
from energon_lite.trainer.models.config import ModelConfig
from energon_lite.trainer.models.llama import LlamaModel, Stream
from energon_lite.trainer.models.sequence import whole_length
from energon_lite.trainer.parallel.mesh import ParallelMesh
from energon_lite.trainer.training.pipeline_schedule import Action, pipeline_schedule

#: Told of each pass: what it was, and the seconds at which it began and ended.
Record = Callable[[Action, float, float], None]
#: Rows, positions, width, whether documents follow, and the fingerprint of the tokens.
_HEADER = 5


class Wire:
    """Messages to and from the neighbouring stages.

    Args:
        mesh: the ranks; with ``virtual`` chunks, the last stage's next is the first.
        config: the model's shape.
    """

    def __init__(self, mesh: ParallelMesh, config: ModelConfig):
        self.mesh, self.dtype = mesh, config.torch_dtype
        self._sending: list[tuple[Any, torch.Tensor]] = []  # works, and what they send

    def send_stream(self, stream: Stream, fingerprint: torch.Tensor) -> None:
        """To the next stage. A stream without elements is a header only."""
        hidden, documents = stream.hidden.detach(), stream.documents
        header = torch.tensor([*hidden.shape, int(documents is not None), 0], device=hidden.device)
        header[-1] = fingerprint
        for tensor in (header, hidden, documents):
            if tensor is not None:
                self.send(tensor, 1)

    def receive_stream(self) -> tuple[Stream, torch.Tensor]:
        """From the stage before: what it has made, and the fingerprint of the tokens it began with."""
        header = self.receive((_HEADER,), torch.int64, -1)
        rows, positions, width, has_documents, _ = header.tolist()
        hidden = self.receive((rows, positions, width), self.dtype, -1)
        shape = (rows, whole_length(positions, self.mesh))
        return Stream(hidden, self.receive(shape, torch.int64, -1) if has_documents else None), header[-1]

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
    mesh, divisor = model.mesh, torch.as_tensor(divisor, device=model.mesh.device)
    after_backward = after_backward or (lambda chunk: None)
    if mesh.pp == mesh.virtual == 1:
        return _one_stage(model, micro_batches, divisor, backward, after_backward, record)
    stage = _Stage(model, micro_batches, divisor, record)
    schedule = pipeline_schedule(mesh.rank("pp"), mesh.pp, len(micro_batches), chunks=mesh.virtual, backward=backward)
    for action in schedule:
        if not action.backward:
            stage.forward(action, keep=backward)
            continue
        stage.backward(action)
        after_backward(action.chunk)
    stage.wire.finish()
    return stage.loss


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
        self.wire = Wire(self.model.mesh, self.model.config)
        self.loss = torch.zeros((), dtype=torch.float64, device=self.model.mesh.device)
        #: What the passes that are not back yet have received and made, by (chunk, micro-batch).
        self._held: dict[tuple[int, int], tuple[Stream | None, torch.Tensor]] = {}

    def forward(self, action: Action, *, keep: bool) -> None:
        """Receive, compute, send; ``keep`` what the backward pass will need."""
        model, chunk, batch = self.model, action.chunk, self.micro_batches[action.micro_batch]
        received = None
        if model.starts(chunk):
            assert batch is not None, "the first stage needs its micro-batches"
            fingerprint = _fingerprint(batch.tokens)
            empty = batch.tokens.numel() == 0
        else:
            received, fingerprint = self.wire.receive_stream()
            empty = received.hidden.numel() == 0
            if model.ends(chunk):
                self._check(action, fingerprint)
        if empty:
            if not model.ends(chunk):
                self.wire.send_stream(Stream(self.loss.new_empty(0, 0, 0)), fingerprint)
            return
        if received is not None:
            received.hidden.requires_grad_(keep)
        with _recorded(self.record, action, self.loss.device):
            made = model.run_chunk(chunk, batch, received)
            if isinstance(made, torch.Tensor):
                made = made / self.divisor.to(made.dtype)
                self.loss += made.detach()
        if isinstance(made, Stream):
            self.wire.send_stream(made, fingerprint)
            made = made.hidden
        if keep:
            self._held[chunk, action.micro_batch] = received, made

    def backward(self, action: Action) -> None:
        """Receive the gradient, compute, send on."""
        held = self._held.pop((action.chunk, action.micro_batch), None)
        if held is None:
            return  # it was empty
        received, made = held
        gradient = None if self.model.ends(action.chunk) else self.wire.receive(made.shape, made.dtype, 1)
        with _recorded(self.record, action, self.loss.device):
            # With frozen parameters it may be that nothing before here learns.
            if made.requires_grad:
                made.backward(gradient)
        if received is not None:
            grad = received.hidden.grad
            self.wire.send(torch.zeros_like(received.hidden) if grad is None else grad, -1)

    def _check(self, action: Action, fingerprint: torch.Tensor) -> None:
        """The first and the last stage read their data each for itself, and must have read the same."""
        batch = self.micro_batches[action.micro_batch]
        assert batch is not None, "the last stage needs its micro-batches"
        if int(fingerprint) != int(_fingerprint(batch.tokens)):
            raise UsageError(
                f"micro-batch {action.micro_batch} of the step is not the same on the first and the last stage",
                fix="give both equal loaders (WorkerConfig.from_mesh(..., stages='ends')), restored to equal states",
            )


@contextmanager
def _recorded(record: Record | None, action: Action, device: torch.device) -> Iterator[None]:
    """Tell who wants to know it when all of the work began and was done."""
    if record is None:
        yield
        return
    began = _now(device)
    yield
    record(action, began, _now(device))


def _now(device: torch.device) -> float:
    """Seconds at which all of the work so far is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _fingerprint(tokens: torch.Tensor) -> torch.Tensor:
    """A number that differs if tokens or their order do, nearly always."""
    flat = tokens.flatten()
    return ((flat + 1) * torch.arange(1, 2 * len(flat) + 1, 2, device=flat.device)).sum()
