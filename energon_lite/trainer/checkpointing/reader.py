"""Reading of a checkpoint's index, tensors and JSON, without unpickling objects that could run code."""

from __future__ import annotations

import json
import os
import pickle
from contextlib import ExitStack
from functools import cached_property, partial
from typing import Any

import fsspec
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view

from energon_lite.errors import StateError
from energon_lite.trainer.checkpointing.files import INDEX
from energon_lite.trainer.parallel.shards import Box, ChunkedTensor, copy_box

#: Format version that is written and read.
FORMAT = 2
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
        dtype: torch.dtype = self._tensor(name).properties.dtype
        return dtype

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
        values: torch.Tensor = torch.load(part, map_location="cpu", weights_only=True)
        return values

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
