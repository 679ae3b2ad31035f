"""A checkpoint without a model in memory: written from tensors that are read when they are written, and read so.

A :class:`ChunkedTensor` may make the values of a box at the moment they are asked for, and the writer keeps none of
them; so a model of any size passes through the memory of its largest box.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from energon_lite.trainer.checkpointing.checkpoint import Place
from energon_lite.trainer.checkpointing.files import CheckpointFiles, CheckpointWriter
from energon_lite.trainer.checkpointing.reader import JSON_NAME, CheckpointReader, json_tensor
from energon_lite.trainer.checkpointing.tensors import save_tensors
from energon_lite.trainer.parallel.shards import Box


def write_weights(root: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> Place:
    """Write a checkpoint of step 0, which has weights only, from one process.

    Args:
        root: folder or URL of the checkpoints.
        tensors: by their global names, as ``model.norm.weight``.
        state: what else to keep, as JSON can hold it.

    Returns:
        The path or URL of the checkpoint.
    """
    files = CheckpointFiles(root)
    writer = CheckpointWriter(files.begin(0))
    content = json_tensor(step=0, updates=0, world_size=0, order=[], state=dict(state))
    save_tensors({JSON_NAME: content, **tensors}, writer, alone=True)
    return files.publish(0, writer.sums)


class SavedTensors:
    """The tensors of a checkpoint, read rectangle by rectangle, as they were saved.

    Args:
        place: a checkpoint's folder or URL.

    Example:
        >>> with SavedTensors(latest_checkpoint("output/checkpoints")) as saved:
        ...     for box in saved.boxes("model.norm.weight"):
        ...         saved.read("model.norm.weight", box)
    """

    def __init__(self, place: str | os.PathLike[str]):
        self.reader = CheckpointReader(place)
        self.index = self.reader.read_metadata_once()
        self._open = ""
        self._stream: Any = None
        self._stack = ExitStack()

    def names(self) -> list[str]:
        """Of all tensors, in the order of the index."""
        return list(self.index.state_dict_metadata)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensor(name).size)

    def dtype(self, name: str) -> torch.dtype:
        dtype: torch.dtype = self._tensor(name).properties.dtype
        return dtype

    def boxes(self, name: str) -> list[Box]:
        """The rectangles in which a tensor was saved; together they are the whole."""
        return [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in self._tensor(name).chunks]

    def read(self, name: str, box: Box) -> torch.Tensor:
        """The values of one of :meth:`boxes`."""
        info = self.index.storage_data[MetadataIndex(name, box.offsets)]
        if info.relative_path != self._open:
            self._stack.close()
            path = self.reader.fs.concat_path(self.reader.path, info.relative_path)
            self._stream = self._stack.enter_context(self.reader.fs.create_stream(path, "rb"))
            self._open = info.relative_path
        part = self.reader._slice_file(self._stream, info)
        values: torch.Tensor = torch.load(part, map_location="cpu", weights_only=True)
        return values

    def close(self) -> None:
        self._stack.close()
        self._open = ""

    def __enter__(self) -> SavedTensors:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _tensor(self, name: str) -> Any:
        return self.index.state_dict_metadata[name]
