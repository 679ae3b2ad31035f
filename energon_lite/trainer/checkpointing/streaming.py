"""Checkpoints of tensors that are in no memory: each is made rectangle by rectangle when it is written, and so read.

``torch.distributed.checkpoint`` plans with shapes alone, and asks for the values when it writes. So what is saved may
be read from a file at that moment and forgotten afterwards, and a model of any size passes through the memory of its
largest rectangle. (torch's own writer keeps all that it has written until it closes a file; hence one of ours.)
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from energon_lite.trainer.checkpointing.checkpoint import Place
from energon_lite.trainer.checkpointing.files import CheckpointFiles, SummingWriter
from energon_lite.trainer.checkpointing.reader import FORMAT, JSON_NAME, CheckpointReader
from energon_lite.trainer.checkpointing.tensors import save_tensors
from energon_lite.trainer.parallel.pieces import Box

#: Bytes after which the next file is begun. Ranks share the work of checking by files.
FILE_BYTES = 4 << 30


class UnreadTensor(torch.Tensor):
    """A tensor to be saved whose values are fetched when they are written.

    Args:
        shape, dtype: of the whole.
        boxes: the rectangles it is saved in; together they are the whole.
        read: makes the values of one of them, ``[*box.sizes]``, in memory of their own.

    Example:
        >>> UnreadTensor((4, 2), torch.float32, [Box((0, 0), (4, 2))], lambda box: torch.ones(box.sizes))
    """

    boxes: tuple[Box, ...]
    read: Callable[[Box], torch.Tensor]

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], dtype: torch.dtype, boxes: Sequence[Box], read: Callable[[Box], torch.Tensor]
    ) -> UnreadTensor:
        device = torch.device("cpu")
        made: UnreadTensor = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device=device)
        made.boxes, made.read = tuple(boxes), read
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func}: a tensor that was not read can only be saved")

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        items = []
        for chunk in self.__create_chunk_list__():
            data = TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=self.dtype), size=self.size())
            items.append(WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        return items

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self.read(next(box for box in self.boxes if box.offsets == tuple(index.offset)))


def write_unread(root: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> Place:
    """Write a checkpoint of step 0, from one process.

    Args:
        root: folder or URL of the checkpoints.
        tensors: by their global names, as ``model.norm.weight``.
        state: what else to keep, as JSON can hold it.

    Returns:
        The path or URL of the checkpoint.
    """
    content = {"format": FORMAT, "step": 0, "updates": 0, "world_size": 0, "order": [], "state": dict(state)}
    text = torch.frombuffer(bytearray(json.dumps(content, allow_nan=False).encode()), dtype=torch.uint8)
    files = CheckpointFiles(root)
    writer = StreamingWriter(files.begin(0))
    save_tensors({JSON_NAME: text, **tensors}, writer, alone=True)
    return files.publish(0, writer.sums)


class StreamingWriter(SummingWriter):
    """Writes one rectangle after the other and keeps none of them.

    Args:
        place: an empty folder.
        file_bytes: when a file has so many bytes, the next is begun.
    """

    def __init__(self, place: str | os.PathLike[str], *, file_bytes: int = FILE_BYTES):
        super().__init__(place)
        self.file_bytes = file_bytes

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        for number, items in enumerate(_by_bytes(plan.items, self.file_bytes)):
            name = f"__0_{number}.distcp"
            with self.fs.create_stream(self.fs.concat_path(self.path, name), "wb") as stream:
                for item in items:
                    offset = stream.tell()
                    torch.save(planner.resolve_data(item), stream)  # type: ignore[arg-type]
                    length = stream.tell() - offset
                    results.append(WriteResult(item.index, length, _StorageInfo(name, offset, length)))
                stream.flush()
                if self.sync_files:
                    os.fsync(stream.fileno())
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future


def _by_bytes(items: Sequence[WriteItem], limit: int) -> Iterator[list[WriteItem]]:
    """The items, in order, in groups of up to ``limit`` bytes or of one item."""
    group: list[WriteItem] = []
    size = 0
    for item in items:
        assert item.tensor_data is not None  # there is nothing else in our checkpoints
        more = math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
        if group and size + more > limit:
            yield group
            group, size = [], 0
        group.append(item)
        size += more
    if group:
        yield group


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
