"""Checkpoints that any layout of ranks can read, and that are either whole or not there.

Each tensor is saved under its global name as a slice of the global tensor (a DTensor), so that
``torch.distributed.checkpoint`` can cut it anew for the ranks that read it. Everything else (step, loader state,
configuration) is one JSON text, stored as a tensor of bytes, so that reading a checkpoint never unpickles an object.

    <root>/step-00000200/     a finished checkpoint: it got this name when everything in it was on disk
    <root>/.saving-00000300/  one being written, or left behind by a crash; nobody reads it
    <root>/latest             the name of the newest finished one
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.tensor import DTensor, Replicate, Shard

from energon_lite.errors import StateError, StateMismatchError
from energon_lite.training.mesh import ParallelMesh
from energon_lite.training.optimizer import AdamW
from energon_lite.training.parameters import layout_of

_FORMAT = 1
_JSON = "state.json"
_LATEST = "latest"


def save_checkpoint(
    root: str | os.PathLike[str],
    step: int,
    model: nn.Module,
    optimizer: AdamW,
    mesh: ParallelMesh,
    state: Mapping[str, Any],
    *,
    keep: int = 2,
) -> Path:
    """Write a checkpoint. Every rank must call it; when it returns, the checkpoint is on disk.

    Args:
        root: folder of all checkpoints of the run, seen by all ranks.
        step: number of steps done.
        model, optimizer: their parameters, moments and number of updates are saved.
        mesh: the ranks.
        state: what else to keep, as JSON can hold it. Rank 0's counts.
        keep: finished checkpoints that are kept, the newest.

    Returns:
        The folder of the checkpoint.
    """
    root = Path(root)
    final, unfinished = root / f"step-{step:08d}", root / f".saving-{step:08d}"
    if mesh.is_main:
        root.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
    mesh.barrier()
    # The text is rank 0's and all ranks must plan with equal shapes, so only rank 0 has it in its dict.
    tensors = dict(_model_tensors(model, mesh)) | dict(_optimizer_tensors(optimizer, mesh)) | _random_states(mesh)
    if mesh.is_main:
        content = {"format": _FORMAT, "step": step, "updates": optimizer.updates, "world_size": mesh.world_size}
        text = json.dumps({**content, "state": dict(state)}, allow_nan=False).encode()
        tensors[_JSON] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    # The writer itself flushes each file to disk; what is left is the folder's own entries.
    with _no_warning_when_alone():
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(unfinished), no_dist=mesh.world_size == 1)
    mesh.barrier()
    if mesh.is_main:
        _publish(unfinished, final)
        _prune(root, keep)
    mesh.barrier()
    return final


def load_checkpoint(
    path: str | os.PathLike[str], model: nn.Module, mesh: ParallelMesh, optimizer: AdamW | None = None
) -> tuple[int, dict[str, Any]]:
    """Read a checkpoint of any layout into a model and an optimizer of this one. Every rank must call it.

    With as many ranks as saved it, torch's random number generators are restored too.

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
    path = Path(path)
    reader = _Reader(path)
    content = _read_content(reader, path)
    tensors = dict(_model_tensors(model, mesh))
    if optimizer is not None:
        tensors |= dict(_optimizer_tensors(optimizer, mesh))
    random_states = _random_states(mesh) if optimizer is not None else {}
    if content["world_size"] == mesh.world_size and all(reader.shape(name) is not None for name in random_states):
        tensors |= random_states
    for name, tensor in tensors.items():
        saved = reader.shape(name)
        if saved != tuple(tensor.shape):
            has = "nothing" if saved is None else f"shape {list(saved)}"
            raise StateMismatchError(
                f"the checkpoint has {has} for {name}, the model has shape {list(tensor.shape)}",
                where=path,
                fix="use the model configuration the checkpoint was made with",
            )
    with _no_warning_when_alone():
        dcp.load(tensors, storage_reader=reader, no_dist=mesh.world_size == 1)
    if optimizer is not None:
        optimizer.set_updates(content["updates"])
        _restore_random_states({name: tensors[name] for name in random_states if name in tensors})
    return content["step"], content["state"]


def read_state(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The ``state`` of a checkpoint alone, without its tensors. One process is enough.

    Raises:
        StateError: not a checkpoint, or one of a later format.
    """
    state: dict[str, Any] = _read_content(_Reader(Path(path)), Path(path))["state"]
    return state


def latest_checkpoint(root: str | os.PathLike[str]) -> Path | None:
    """The newest finished checkpoint under ``root``, or None."""
    root = Path(root)
    try:
        named = root / (root / _LATEST).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        named = root
    if named != root and named.is_dir():
        return named
    # A crash between the last two renames: the checkpoint has its final name, hence is whole, but is not yet "latest".
    finished = _finished(root)
    return finished[-1] if finished else None


# -- what is in a checkpoint ----------------------------------------------------------------------------------------


def _model_tensors(model: nn.Module, mesh: ParallelMesh) -> Iterator[tuple[str, torch.Tensor]]:
    for name, p in model.named_parameters():
        yield f"model.{name}", _global_tensor(p.detach(), p, mesh)


def _optimizer_tensors(optimizer: AdamW, mesh: ParallelMesh) -> Iterator[tuple[str, torch.Tensor]]:
    for name, p, moments in optimizer.moments():
        for kind, tensor in moments.items():
            yield f"optimizer.{name}.{kind}", _global_tensor(tensor, p, mesh)


def _global_tensor(local: torch.Tensor, parameter: nn.Parameter, mesh: ParallelMesh) -> torch.Tensor:
    """This rank's part as a part of the whole: a DTensor over the mesh that shares memory with ``local``."""
    if mesh.device_mesh is None:
        return local
    layout = layout_of(parameter)
    cut = Replicate() if layout.sharded_dim is None else Shard(layout.sharded_dim)
    # The other axes need not be named: copies of a part are written once, and stages have parameters of other names.
    peers = mesh.device_mesh["tp"]
    shape = torch.Size(layout.full_shape)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, peers, [cut], shape=shape, stride=stride)


def _random_states(mesh: ParallelMesh) -> dict[str, torch.Tensor]:
    """The states of torch's generators, one name per rank."""
    states = {f"random.{mesh.global_rank}.cpu": torch.get_rng_state()}
    if mesh.device.type == "cuda":
        states[f"random.{mesh.global_rank}.cuda"] = torch.cuda.get_rng_state(mesh.device)
    return states


def _restore_random_states(states: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in states.items():
        if name.endswith(".cuda"):
            torch.cuda.set_rng_state(tensor)
        else:
            torch.set_rng_state(tensor)


@contextmanager
def _no_warning_when_alone() -> Iterator[None]:
    """torch warns where there is no process group, even when it is told that none is wanted."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


class _Reader(dcp.FileSystemReader):
    """A reader whose index is read without giving a pickle the power to run code."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(Path(self.path) / ".metadata", "rb") as stream:
            metadata: Metadata = _PlainUnpickler(stream).load()
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Global shape of a saved tensor; None if there is none of that name."""
        saved = self.read_metadata_once().state_dict_metadata.get(name)
        size = getattr(saved, "size", None)
        return None if size is None else tuple(size)

    def read_metadata_once(self) -> Metadata:
        if not hasattr(self, "_metadata"):
            self._metadata = self.read_metadata()
        return self._metadata


class _PlainUnpickler(pickle.Unpickler):
    """Makes only the record types that the index of a distributed checkpoint is built of."""

    _RECORDS = {
        "torch.distributed.checkpoint.metadata": {
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        },
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
        "torch": {"Size"},
        "torch.serialization": {"_get_layout"},
        "pathlib": {"Path", "PosixPath", "PurePosixPath"},
        "pathlib._local": {"Path", "PosixPath", "PurePosixPath"},
    }

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in self._RECORDS.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} does not belong into a checkpoint's index")


def _read_content(reader: _Reader, path: Path) -> dict[str, Any]:
    try:
        shape = reader.shape(_JSON)
        if shape is None:
            raise StateError("the checkpoint does not say what it is", where=path, fix="use one made by this trainer")
        tensors = {_JSON: torch.empty(shape, dtype=torch.uint8)}
        with _no_warning_when_alone():
            dcp.load(tensors, storage_reader=_Reader(path), no_dist=True)
        content: dict[str, Any] = json.loads(bytes(tensors[_JSON].tolist()))
    except (OSError, EOFError, pickle.UnpicklingError, ValueError) as error:
        if isinstance(error, StateError):
            raise
        raise StateError(f"not a readable checkpoint: {error}", where=path, fix="use another checkpoint") from error
    if content.get("format") != _FORMAT:
        raise StateError(
            f"the checkpoint has format {content.get('format')}, this version reads {_FORMAT}",
            where=path,
            fix="update energon_lite",
        )
    return content


# -- the folders ----------------------------------------------------------------------------------------------------


def _publish(unfinished: Path, final: Path) -> None:
    """Give a checkpoint its final name, then make it the latest. Each is one rename, so a crash leaves old or new."""
    root = final.parent
    _flush_folder(unfinished)
    if final.exists():
        # The same step again, e.g. after a crash before it became the latest.
        replaced = root / f".replaced-{final.name}"
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
        unfinished.rename(final)
        shutil.rmtree(replaced)
    else:
        unfinished.rename(final)
    _flush_folder(root)
    temporary = root / f".{_LATEST}"
    with open(temporary, "w", encoding="utf-8") as stream:
        stream.write(final.name + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    temporary.rename(root / _LATEST)
    _flush_folder(root)


def _prune(root: Path, keep: int) -> None:
    """Remove all but the newest ``keep`` checkpoints, and what crashes have left behind."""
    for remains in root.glob(".*-*"):
        shutil.rmtree(remains, ignore_errors=True)
    for old in _finished(root)[:-keep]:
        # First out of sight: a folder that is half deleted must not look finished.
        hidden = root / f".deleted-{old.name}"
        shutil.rmtree(hidden, ignore_errors=True)
        old.rename(hidden)
        shutil.rmtree(hidden)


def _finished(root: Path) -> list[Path]:
    """All finished checkpoints, oldest first."""
    return sorted(path for path in root.glob("step-*") if path.is_dir())


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
