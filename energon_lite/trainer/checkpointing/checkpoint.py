"""Checkpoints that any layout of ranks can read, that appear atomically, and that are written in the background.

Each tensor is saved under its global name, and each rank writes its part as rectangles of the global tensor;
each rank that reads takes what it needs of them. Nothing is gathered. Everything else (step,
loader state, configuration) is one JSON text, stored as a tensor of bytes, so that reading a checkpoint never unpickles
an object. ``files.py`` describes how a checkpoint is published.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from energon_lite.errors import StateError, StateMismatchError, listed
from energon_lite.trainer.checkpointing.files import CheckpointFiles, Place, of_all, of_main
from energon_lite.trainer.checkpointing.files import find_checkpoint as find_checkpoint
from energon_lite.trainer.checkpointing.files import latest_checkpoint as latest_checkpoint
from energon_lite.trainer.checkpointing.tensors import (
    JSON_NAME,
    CheckpointReader,
    CheckpointWriter,
    json_tensor,
    read_content,
    read_tensors,
    save_tensors,
)
from energon_lite.trainer.optimizer.overlapped_optimizer import OverlappedDistributedOptimizer
from energon_lite.trainer.parallel.mesh import ParallelMesh
from energon_lite.trainer.parallel.parameters import local_tensor
from energon_lite.trainer.parallel.shards import ChunkedTensor, Shard, whole_tensors

logger = logging.getLogger(__name__)

#: Seconds between two log messages while a checkpoint is waited for.
_TOLD = 60.0

T = TypeVar("T")


class CheckpointSaver:
    """Writer of checkpoints in the background. Training waits only for a copy of the state.

    The memory of the copy, as large as the state that a rank saves, is kept for the next checkpoint, because new memory
    costs several times as long to write. For state on a GPU it is pinned.

    Args:
        root: folder or URL of all checkpoints of the run, seen by all ranks.
        mesh: the ranks. All of them must make a saver, and call its methods.
        keep: finished checkpoints that are kept, the newest.
        keep_every: in addition, keep the first at or after each multiple of this number of steps; 0 for none.
        timeout: seconds that :meth:`close`, and the exit of the process, wait for a checkpoint that is being written.

    Attributes:
        seconds_blocked: seconds for which the last :meth:`save` blocked its caller.
        seconds_written: seconds that the slowest checkpoint so far took to be written.

    Example:
        >>> saver = CheckpointSaver("s3://bucket/run", mesh)
        >>> saver.save(100, model, optimizer, {"loader": loader.save_state_rank()})
        >>> saver.finish()  # before the process ends
    """

    def __init__(self, root: Place, mesh: ParallelMesh, *, keep: int = 2, keep_every: int = 0, timeout: float = 300.0):
        self.files = CheckpointFiles(root)
        self.mesh = mesh
        self.timeout = timeout
        self.keep = keep
        self.keep_every = keep_every
        self.seconds_blocked = self.seconds_written = 0.0
        # A group of its own: collectives of training must not come between those of saving.
        self._group = dist.new_group(backend="gloo", timeout=mesh.timeout) if mesh.world_size > 1 else None
        self._copies: dict[str, torch.Tensor] = {}
        self._under_way: tuple[threading.Thread, weakref.finalize] | None = None
        self._errors: list[BaseException] = []  # of the last checkpoint; at most one

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: OverlappedDistributedOptimizer,
        state: Mapping[str, Any],
        *,
        prune: bool = True,
    ) -> Place:
        """Start to write a checkpoint, after the one before it is on disk. Arguments as :func:`save_checkpoint`.

        Args:
            prune: remove older ones by ``keep`` and ``keep_every`` when it is written.

        Returns:
            The future path or URL of the checkpoint.
        """
        began = time.perf_counter()
        self.finish()
        tensors = _everything(step, model, optimizer, self.mesh, state)
        self._copies = {name: _copy(tensor, self._copies.get(name)) for name, tensor in tensors.items()}
        if self.mesh.device.type == "cuda":
            torch.cuda.synchronize(self.mesh.device)  # one wait for all copies
        # A daemon thread: the exit of the process waits for it with a limit, as a peer may be stuck.
        arguments = (step, self._copies, (self.keep, self.keep_every) if prune else None)
        name = f"the checkpoint of step {step}"
        thread = threading.Thread(target=self._write, args=arguments, name=name, daemon=True)
        thread.start()
        self._under_way = thread, weakref.finalize(self, _join_at_exit, thread, self.timeout, self._errors)
        self.seconds_blocked = time.perf_counter() - began
        return self.files.place(f"step-{step:08d}")

    def finish(self) -> None:
        """Wait until the last checkpoint is on disk.

        Raises:
            StateError: the checkpoint could not be written.
        """
        self._wait(math.inf)

    def close(self) -> None:
        """Call :meth:`finish` with a limit of ``timeout`` seconds, as a peer may be gone. Save no more afterwards.

        Raises:
            StateError: the last checkpoint could not be written, or not in time.
        """
        self._wait(self.timeout)

    def _wait(self, patience: float) -> None:
        """Wait, with log messages: the thread's collectives have a time limit, its storage may have none."""
        if self._under_way is None:
            return
        thread, at_exit = self._under_way
        thread.join(min(_TOLD, patience))
        while thread.is_alive() and (patience := patience - _TOLD) > 0:
            logger.warning("waiting for %s, which is still being written", thread.name)
            thread.join(min(_TOLD, patience))
        self._under_way = None
        at_exit.detach()
        if thread.is_alive():
            fix = "the checkpoint before it is used; if no rank was stuck, allow more seconds (train.save_timeout)"
            raise StateError(_too_late(thread, self.timeout), where=self.files.root, fix=fix)
        if self._errors:
            error = self._errors.pop()
            known = error if isinstance(error, StateError) else StateError(str(error), where=self.files.root)
            fix = known.fix or "check free space and permissions"
            raise StateError(f"a checkpoint could not be written: {known.what}", where=known.where, fix=fix) from error

    def _write(self, step: int, tensors: dict[str, torch.Tensor], keep: tuple[int, int] | None) -> None:
        began = time.perf_counter()
        try:
            _write(self.files, step, tensors, self.mesh, keep, self._group)
            self.seconds_written = max(self.seconds_written, time.perf_counter() - began)
        except BaseException as error:  # raised in the training thread
            self._errors.append(error)


def _too_late(thread: threading.Thread, timeout: float) -> str:
    return f"{thread.name} was not finished within {timeout:g} s, and is given up"


def _join_at_exit(thread: threading.Thread, timeout: float, errors: list[BaseException]) -> None:
    """Wait for the checkpoint at process exit, if ``finish`` was not called."""
    thread.join(timeout)
    if thread.is_alive():
        logger.error("%s", _too_late(thread, timeout))
    for error in errors:
        logger.error("%s could not be written: %s", thread.name, error)


def save_checkpoint(
    root: str | os.PathLike[str],
    step: int,
    model: nn.Module,
    optimizer: OverlappedDistributedOptimizer,
    mesh: ParallelMesh,
    state: Mapping[str, Any],
    *,
    keep: int = 2,
) -> Place:
    """Write a checkpoint. Every rank must call it; when it returns, the checkpoint is on disk.

    Args:
        root: folder or URL of all checkpoints of the run, seen by all ranks.
        step: number of steps done.
        model, optimizer: parameters, moments and number of updates are saved.
        mesh: the ranks.
        state: further values to keep, as JSON can hold them; those of rank 0 are saved.
        keep: finished checkpoints that are kept, the newest.

    Returns:
        The path or URL of the checkpoint.
    """
    return _write(CheckpointFiles(root), step, _everything(step, model, optimizer, mesh, state), mesh, (keep, 0), None)


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    mesh: ParallelMesh,
    optimizer: OverlappedDistributedOptimizer | None = None,
) -> tuple[int, dict[str, Any]]:
    """Read a checkpoint of any layout into a model and an optimizer. Every rank must call it.

    If the number of ranks is that of the saved run, torch's random number generators are restored too.

    Args:
        path: the folder of the checkpoint.
        model: filled in place.
        mesh: the ranks.
        optimizer: filled in place; None to read the model only.

    Returns:
        The number of steps done, and the ``state`` that was saved.

    Raises:
        StateError: not a checkpoint, or one of a later format.
        StateMismatchError: a tensor is missing or has another shape: it is of another model.
    """
    reader = CheckpointReader(path)
    content = read_content(reader, path)
    if optimizer is None:
        read_tensors(reader, dict(model_tensors(model, mesh)), path)
        return content["step"], content["state"]
    if content["world_size"] == 0:
        raise StateError(
            "the checkpoint has weights only: there is no run to go on with",
            where=path,
            fix="begin a new run with train.init_from",
        )
    optimizer.wait_parameters()
    saved, of_model = reader.shapes.keys(), dict(model_tensors(model, mesh))
    # Stages of a pipeline have a part of the tensors each.
    if mesh.pp == 1 and (more := [n for n in saved if n.startswith("model.") and n not in of_model]):
        what = f"the checkpoint has {listed(more, 4)}, which the model has not"
        raise StateMismatchError(what, where=path, fix="use the model configuration the checkpoint was made with")
    # Master values are read, whatever the model's type was and is; a model saved in float32 has no separate ones.
    of_model = {_master(n) if t.dtype.itemsize >= 4 and _master(n) in saved else n: t for n, t in of_model.items()}
    of_optimizer = dict(_optimizer_tensors(optimizer, mesh))
    unsaved = of_optimizer.keys() - saved
    of_values = {n: of_optimizer.pop(_master(n)) for n in saved if _master(n) in unsaved}
    random_states = _random_states(mesh)
    if content["world_size"] != mesh.world_size or random_states.keys() - saved:
        random_states = {}
    for tensors in ({**of_model, **of_optimizer, **random_states}, of_values):
        read_tensors(reader, tensors, path)
    optimizer.set_updates(content["updates"])
    for name, state in random_states.items():
        (torch.cuda if name.endswith(".cuda") else torch).set_rng_state(state)
    return content["step"], content["state"]


def read_state(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the ``state`` of a checkpoint alone, without its tensors. One process is enough.

    Raises:
        StateError: not a checkpoint, or one of a later format.
    """
    return read_content(CheckpointReader(path), path)["state"]


def _write(
    files: CheckpointFiles,
    step: int,
    tensors: dict[str, torch.Tensor],
    mesh: ParallelMesh,
    keep: tuple[int, int] | None,
    group: dist.ProcessGroup | None,
) -> Place:
    """Write the tensors of all ranks; publish when all are on disk; then remove older ones, unless ``keep`` is None.

    Raises:
        StateError, OSError: on all ranks: one of them could not write its share. The unfinished files are removed.
    """
    place = _on_main(lambda: files.begin(step), mesh, group)
    writer = CheckpointWriter(place)
    try:
        save_tensors(tensors, writer, group=group, alone=mesh.world_size == 1)
        sums = of_all(writer.sums, mesh.world_size, group)

        def publish() -> None:
            files.publish(step, {name: known for part in sums for name, known in part.items()})
            if keep is not None:
                files.prune(*keep)

        _on_main(publish, mesh, group)
    except BaseException:
        if mesh.is_main:
            files.abandon(step)
        raise
    return files.place(f"step-{step:08d}")


def _on_main(work: Callable[[], T], mesh: ParallelMesh, group: dist.ProcessGroup | None) -> T:
    """Run ``work`` on the main rank; return its result or raise its error on all ranks, so that none waits for ever."""
    done: tuple[Any, Exception | None] = None, None
    if mesh.is_main:
        try:
            done = work(), None
        except Exception as error:  # that of a store's client may not be picklable
            done = None, error if isinstance(error, OSError | StateError) else StateError(repr(error))
    value, failed = of_main(done, mesh, group)
    if failed is not None:
        raise failed
    return value


# -- contents of a checkpoint ---------------------------------------------------------------------------------------


def _everything(
    step: int, model: nn.Module, optimizer: OverlappedDistributedOptimizer, mesh: ParallelMesh, state: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Return the tensors that this rank saves, by name, without copies."""
    optimizer.wait_parameters()
    sharded = {f"model.{name}" for name in optimizer.parameters}
    tensors = {name: tensor for name, tensor in model_tensors(model, mesh) if name not in sharded}
    # Of sharded parameters, each rank saves the values it updates: the same boxes, in the model's type.
    tensors |= {f"model.{shard.name}": _values_of(shard, mesh) for shard in optimizer.shards()}
    tensors |= dict(_optimizer_tensors(optimizer, mesh)) | _random_states(mesh)
    # Only rank 0 includes the JSON text, because all ranks must plan with equal shapes.
    if mesh.is_main:
        about = {"step": step, "updates": optimizer.updates, "world_size": mesh.world_size}
        tensors[JSON_NAME] = json_tensor(**about, state=dict(state))
    return tensors


def _copy(tensor: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
    """Start to copy a tensor to the CPU, into the memory of a former copy if that fits; a GPU may still be copying."""
    if isinstance(tensor, ChunkedTensor):
        former = into if isinstance(into, ChunkedTensor) and into.boxes == tensor.boxes else None
        parts = {box: _copy(tensor.read(box), None if former is None else former.read(box)) for box in tensor.boxes}
        return ChunkedTensor(tensor.shape, tensor.dtype, parts, parts.__getitem__)
    if into is None or into.shape != tensor.shape or into.dtype != tensor.dtype:
        into = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return into.copy_(tensor.detach(), non_blocking=True)


def model_tensors(model: nn.Module, mesh: ParallelMesh) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a model's parameters by global name, each as this rank's part of the whole. Copies are written once.

    Persistent buffers, such as running statistics, are those of one rank.
    """
    for name, p in model.named_parameters():
        here = local_tensor(p)
        if not here.is_contiguous():
            here.data = here.data.contiguous()  # a flat view must share its memory when it is filled
        yield f"model.{name}", _values_of(Shard(name, p, 0, {"values": here.detach().flatten()}), mesh)
    for prefix, module in model.named_modules(prefix="model"):
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}", buffer


def _optimizer_tensors(
    optimizer: OverlappedDistributedOptimizer, mesh: ParallelMesh
) -> Iterator[tuple[str, torch.Tensor]]:
    for shard in optimizer.shards():
        for kind, tensor in whole_tensors(shard, mesh).items():
            # A master value of the model's own precision needs no second copy.
            if kind != "master" or shard.parameter.dtype.itemsize < 4:
                yield f"optimizer.{shard.name}.{kind}", tensor


def _master(name: str) -> str:
    """Return the name of the master values of a tensor of the model."""
    return f"optimizer.{name.removeprefix('model.')}.master"


def _values_of(shard: Shard, mesh: ParallelMesh) -> torch.Tensor:
    return whole_tensors(shard._replace(tensors={"values": shard.values}), mesh)["values"]


def _random_states(mesh: ParallelMesh) -> dict[str, torch.Tensor]:
    """Return the states of torch's generators, one name per rank."""
    states = {f"random.{mesh.global_rank}.cpu": torch.get_rng_state()}
    if mesh.device.type == "cuda":
        states[f"random.{mesh.global_rank}.cuda"] = torch.cuda.get_rng_state(mesh.device)
    return states
