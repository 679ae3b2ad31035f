"""Reading a checkpoint's index and its JSON without ever unpickling an object that could run code."""

from __future__ import annotations

import json
import os
import pickle
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from energon_lite.errors import StateError
from energon_lite.trainer.checkpointing.files import reading_streams
from energon_lite.trainer.checkpointing.tensors import load_tensors

#: What this version writes and reads.
FORMAT = 2
#: Name of the tensor whose bytes are everything that is no tensor.
JSON_NAME = "state.json"


class CheckpointReader(dcp.FileSystemReader):
    """A reader of a path or URL, whose index is read without giving a pickle the power to run code."""

    def __init__(self, place: str | os.PathLike[str]):
        streams, path = reading_streams(place)
        super().__init__(path)
        self.fs, self.path = streams, path  # type: ignore[assignment]

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with self.fs.create_stream(self.fs.concat_path(self.path, ".metadata"), "rb") as stream:
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


def json_tensor(**content: Any) -> torch.Tensor:
    """All of a checkpoint that is no tensor, as the bytes of its JSON."""
    text = json.dumps({"format": FORMAT, **content}, allow_nan=False).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def read_content(reader: CheckpointReader, path: str | os.PathLike[str]) -> dict[str, Any]:
    """The JSON of a checkpoint.

    Raises:
        StateError: not a checkpoint, or one of another format.
    """
    try:
        shape = reader.shape(JSON_NAME)
        if shape is None:
            raise StateError("the checkpoint does not say what it is", where=path, fix="use one made by this trainer")
        tensors = {JSON_NAME: torch.empty(shape, dtype=torch.uint8)}
        load_tensors(tensors, CheckpointReader(path), alone=True)
        content: dict[str, Any] = json.loads(bytes(tensors[JSON_NAME].tolist()))
    except (OSError, EOFError, pickle.UnpicklingError, ValueError) as error:
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
