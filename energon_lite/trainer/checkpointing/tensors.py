"""Files of a checkpoint: its tensors, their index, and one JSON text.

They are read without unpickling objects that could run code, and written by ``torch.distributed.checkpoint``, with
clear errors if storage is full.
"""

from __future__ import annotations

import dataclasses
import errno
import inspect
import json
import math
import os
import pickle
import shutil
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import fsspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsspec.implementations.local import LocalFileSystem
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.distributed.checkpoint.utils import _create_file_view
from torch.futures import Future

from energon_lite.errors import StateError, StateMismatchError
from energon_lite.trainer.checkpointing.files import INDEX, FileSum
from energon_lite.trainer.parallel.shards import Box, ChunkedTensor, copy_box, neighbours, whole_box

#: Format version that is written and read.
FORMAT = 1
#: Name of the tensor whose bytes hold all data other than tensors, as JSON.
JSON_NAME = "state.json"


class CheckpointReader:
    """Reader of a checkpoint at a path or URL, box by box; unpickling its index cannot run code.

    It keeps a file open, and must be closed.

    Args:
        place: a checkpoint's folder or URL.

    Example:
        >>> with CheckpointReader(latest_checkpoint("output/checkpoints")) as saved:
        ...     for box in saved.boxes("model.norm.weight"):
        ...         saved.read("model.norm.weight", box)
    """

    def __init__(self, place: str | os.PathLike[str]):
        self.fs, self.path = fsspec.core.url_to_fs(os.fspath(place))
        self._open = ""
        self._stream: Any = None
        self._stack = ExitStack()

    @cached_property
    def index(self) -> Metadata:
        """Index of the saved tensors and their places."""
        with self.fs.open(f"{self.path}/{INDEX}", "rb") as stream:
            index: Metadata = _PlainUnpickler(stream).load()
        return index

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Global shapes of all saved tensors by name, in the order of the index."""
        saved = self.index.state_dict_metadata.items()
        return {name: tuple(tensor.size) for name, tensor in saved if isinstance(tensor, TensorStorageMetadata)}

    def dtype(self, name: str) -> torch.dtype:
        return self._tensor(name).properties.dtype

    def boxes(self, name: str) -> list[Box]:
        """Return the boxes in which a tensor was saved; together they cover it."""
        return [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in self._tensor(name).chunks]

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Read the values of one of :meth:`boxes`."""
        info = self._place(name, box)
        if info.relative_path != self._open:
            self.close()
            self._stream = self._stack.enter_context(self.fs.open(f"{self.path}/{info.relative_path}", "rb"))
            self._open = info.relative_path
        part: Any = _create_file_view(self._stream, info.offset, info.length)
        return torch.load(part, map_location="cpu", weights_only=True)

    def fill(self, targets: dict[str, ChunkedTensor]) -> None:
        """Read values into the boxes of existing tensors, in the order of the files; boxes not needed are not read."""
        parts = [(name, box) for name in targets for box in self.boxes(name)]
        for name, box in sorted(parts, key=lambda part: (self._place(*part).relative_path, self._place(*part).offset)):
            copy_box(box, partial(self.read, name), targets[name])

    def _place(self, name: str, box: Box) -> Any:
        return self.index.storage_data[MetadataIndex(name, box.offsets)]

    def close(self) -> None:
        self._stack.close()
        self._open = ""

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _tensor(self, name: str) -> Any:
        return self.index.state_dict_metadata[name]


class _PlainUnpickler(pickle.Unpickler):
    """Unpickler restricted to the record types of a distributed checkpoint's index."""

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
        raise pickle.UnpicklingError(f"{module}.{name} does not belong in a checkpoint's index")


def json_tensor(**content: Any) -> torch.Tensor:
    """Return all data of a checkpoint other than tensors, as the bytes of their JSON."""
    text = json.dumps({"format": FORMAT, **content}, allow_nan=False).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def read_content(reader: CheckpointReader, path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the JSON of a checkpoint.

    Raises:
        StateError: not a checkpoint, or one of another format.
    """
    try:
        if JSON_NAME not in reader.shapes:
            raise StateError("the checkpoint does not say what it is", where=path, fix="use one made by this trainer")
        with reader:
            (box,) = reader.boxes(JSON_NAME)
            content: dict[str, Any] = json.loads(bytes(reader.read(JSON_NAME, box).tolist()))
    except (OSError, EOFError, pickle.UnpicklingError, ValueError, RuntimeError, LookupError) as error:
        if isinstance(error, StateError):
            raise
        raise StateError(f"not a readable checkpoint: {error}", where=path, fix="use another checkpoint") from error
    if content.get("format") != FORMAT:
        raise StateError(
            f"the checkpoint has format {content.get('format')}, this version reads {FORMAT}",
            where=path,
            fix="update energon_lite",
        )
    return content


@torch.no_grad()
def read_tensors(reader: CheckpointReader, tensors: Mapping[str, torch.Tensor], path: str | os.PathLike[str]) -> None:
    """Read values into existing tensors.

    Raises:
        StateMismatchError: a tensor is missing or has another shape: it is of another model, or optimizer.
    """
    tensors = {name: t for name, t in tensors.items() if t.numel() or name in reader.shapes}  # an empty one has no box
    of_model = {name: tensor for name, tensor in tensors.items() if not name.startswith("optimizer.")}
    check_shapes(of_model, reader.shapes, path, "use the model configuration the checkpoint was made with")
    fix = "keep its optimizer.algorithm, optimizer.groups and train.freeze, or begin a run with train.init_from"
    check_shapes(tensors, reader.shapes, path, fix)
    with reader:
        reader.fill({name: t if isinstance(t, ChunkedTensor) else whole_box(t) for name, t in tensors.items()})


def check_shapes(
    tensors: Mapping[str, torch.Tensor],
    saved: Mapping[str, tuple[int, ...]],
    path: str | os.PathLike[str],
    fix: str,
    of: str = "checkpoint",
) -> None:
    """Check that each of a model's tensors was saved, in its shape.

    Raises:
        StateMismatchError: one was not.
    """
    for name, tensor in tensors.items():
        if saved.get(name) != tuple(tensor.shape):
            has = f"shape {list(saved[name])}" if name in saved else "nothing"
            what = f"the {of} has {has} for {name}, the model has shape {list(tensor.shape)}"
            raise StateMismatchError(what, where=path, fix=fix)


#: Most bytes of a file, unless it has one tensor. Ranks divide the files among them when they verify a checkpoint.
FILE_BYTES = 4 << 30
#: Approximate overhead of torch's archive per tensor in bytes.
_ARCHIVE_BYTES = 1500
#: Error numbers for lack of space: on the disk, in a quota, or in a file of limited size.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def told(error: OSError, place: str | os.PathLike[str], needed: int = 0) -> OSError | StateError:
    """Return an error of writing a checkpoint; for lack of space, one that states the space needed and available.

    Args:
        error: error of the system.
        place: folder of the unfinished checkpoint.
        needed: size of the checkpoint in bytes; 0 if unknown.
    """
    if error.errno not in _NO_ROOM:
        return error
    takes = f"it takes {needed / 2**20:,.1f} MiB" if needed else "its size is not known"
    free = ""
    if os.path.isdir(place):
        written = sum(file.stat().st_size for file in Path(place).iterdir())
        room = shutil.disk_usage(place).free + written
        free = f", {room / 2**20:,.1f} MiB were free for it on the disk"
    return StateError(
        f"there is no room for the checkpoint ({os.strerror(error.errno)}): {takes}{free}",
        where=place,
        fix="make room there (on the disk, in a quota, or by `ulimit -f`) for one more than are kept, keep fewer "
        "(train.keep), or write elsewhere (train.checkpoints); the checkpoint before it is untouched",
    )


class CheckpointWriter(StorageWriter):
    """Writer of a checkpoint's tensors to a path or URL, box by box, with size and checksum of each file.

    torch's own writer keeps all written data in memory until it closes a file; this one keeps nothing. The file format
    is the one that torch's readers expect.

    Args:
        place: an empty folder.
    """

    def __init__(self, place: str | os.PathLike[str]):
        self.sums: dict[str, FileSum] = {}
        self._fs, self._folder = fsspec.core.url_to_fs(os.fspath(place))
        self._needed = 0  # bytes of all ranks' tensors

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give each rank its number, which is part of its file names, and the total number of bytes."""
        needed = sum(_nbytes(item) + _ARCHIVE_BYTES for plan in plans for item in plan.items)
        return [dataclasses.replace(plan, storage_data=(rank, needed)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        rank, self._needed = plan.storage_data
        for number, items in enumerate(neighbours(((item, _nbytes(item)) for item in plan.items), FILE_BYTES)):
            name = f"__{rank}_{number}.distcp"
            with self._writing(name) as file:
                for item in items:
                    offset = file.size
                    values = planner.resolve_data(item).detach().cpu()  # type: ignore[union-attr]
                    # torch.save would write the whole memory behind a view.
                    whole = values.untyped_storage().size() == values.nbytes
                    torch.save(values if whole else values.clone(), file)  # type: ignore[arg-type]
                    del values  # free it before the next one is made, to hold only one in memory
                    length = file.size - offset
                    results.append(WriteResult(item.index, length, _StorageInfo(name, offset, length)))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index of the saved tensors and their places."""
        metadata.storage_data = {result.index: result.storage_data for part in results for result in part}
        with self._writing(INDEX) as file:
            pickle.dump(metadata, file)

    @contextmanager
    def _writing(self, name: str) -> Iterator[_SummedFile]:
        file = _SummedFile()
        try:
            with self._fs.open(f"{self._folder}/{name}", "wb") as file.stream:
                yield file
                file.stream.flush()
                # A remote stream is complete when it is closed.
                if isinstance(self._fs, LocalFileSystem):
                    os.fsync(file.stream.fileno())
        except (OSError, RuntimeError) as error:
            # torch's error is about its archive; the system's own error has the reason.
            why = file.error or error
            raise (told(why, self._folder, self._needed) if isinstance(why, OSError) else why) from error
        self.sums[name] = (file.size, file.known)

    # Methods that torch's interface requires and that have nothing to do.

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _nbytes(item: WriteItem) -> int:
    assert item.tensor_data is not None  # checkpoints contain tensors only
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


class _SummedFile:
    """Stream wrapper that counts the bytes, updates the checksum, and keeps the first error."""

    stream: Any

    def __init__(self) -> None:
        self.size = self.known = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.known, self.size = zlib.crc32(view, self.known), self.size + view.nbytes
        try:
            self.stream.write(view)
        except OSError as error:
            self.error = self.error or error
            raise
        return view.nbytes

    def flush(self) -> None:
        """Do nothing: the file is flushed at its end."""


#: In torch 2.6, only the deprecated function supports one rank among many working alone.
_SAVE = dcp.save if "no_dist" in inspect.signature(dcp.save).parameters else dcp.save_state_dict


def save_tensors(
    tensors: dict[str, Any], writer: StorageWriter, *, alone: bool, group: dist.ProcessGroup | None = None
) -> None:
    """Write tensors to storage, together with other ranks or alone.

    Args:
        tensors: this rank's part of each tensor, by name.
        writer: the storage.
        alone: True if this process writes all tensors, without waiting for other ranks.
        group: the ranks that write; None for all.

    Raises:
        StateError, OSError: on all ranks: one of them could not write.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            warnings.filterwarnings("ignore", message="`save_state_dict` is deprecated")
            _SAVE(tensors, storage_writer=writer, process_group=group, no_dist=alone)
    except CheckpointException as error:
        # The exception holds long tracebacks; the first rank's own error has the reason.
        why, _ = next(iter(error.failures.values()))
        raise (why if isinstance(why, (OSError, StateError)) else error) from error
