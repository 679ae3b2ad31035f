"""Reading of a checkpoint's index and JSON, without unpickling objects that could run code."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata

from energon_lite.errors import StateError
from energon_lite.trainer.parallel.shards import Box

#: Format version that is written and read.
FORMAT = 2
#: Name of the tensor whose bytes hold all data other than tensors, as JSON.
JSON_NAME = "state.json"


class _Streams(FileSystem):
    """fsspec files for reading: some versions of torch's own class remove a file that cannot be read."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        assert self.fs is not None
        with self.fs.open(os.fspath(path), mode) as stream:
            yield stream


class CheckpointReader(dcp.FileSystemReader):
    """Reader of a checkpoint at a path or URL; unpickling its index cannot run code.

    torch uses it to load into existing tensors. It can also return the boxes in which a tensor was saved, one after the
    other, without a model in memory; in this case it keeps a file open, and must be closed.

    Args:
        place: a checkpoint's folder or URL.

    Example:
        >>> with CheckpointReader(latest_checkpoint("output/checkpoints")) as saved:
        ...     for box in saved.boxes("model.norm.weight"):
        ...         saved.read("model.norm.weight", box)
    """

    def __init__(self, place: str | os.PathLike[str]):
        super().__init__(os.fspath(place))
        self.fs = _Streams()  # type: ignore[assignment]
        self.path = self.fs.init_path(os.fspath(place))
        self._open = ""
        self._stream: Any = None
        self._stack = ExitStack()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with self.fs.create_stream(self.fs.concat_path(self.path, ".metadata"), "rb") as stream:
            metadata: Metadata = _PlainUnpickler(stream).load()
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    @cached_property
    def index(self) -> Metadata:
        """Index of the saved tensors and their places."""
        return self.read_metadata()

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
        info = self.index.storage_data[MetadataIndex(name, box.offsets)]
        if info.relative_path != self._open:
            self.close()
            path = self.fs.concat_path(self.path, info.relative_path)
            self._stream = self._stack.enter_context(self.fs.create_stream(path, "rb"))
            self._open = info.relative_path
        part = self._slice_file(self._stream, info)
        values: torch.Tensor = torch.load(part, map_location="cpu", weights_only=True)
        return values

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
        raise pickle.UnpicklingError(f"{module}.{name} does not belong into a checkpoint's index")


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
