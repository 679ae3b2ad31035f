"""What one rank has of the optimizer's state of one parameter: a piece, and the same as rectangles of the whole tensor.

Slices of buckets know nothing of rows, so a rank's piece of a matrix is a run of its elements. A run is a few
rectangles, and rectangles of global tensors are what any other layout of ranks can read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from energon_lite.trainer.parallel.mesh import ParallelMesh
from energon_lite.trainer.parallel.parameters import ParameterLayout


class Piece(NamedTuple):
    """What a rank has of the state of a parameter.

    Args:
        name, parameter: the parameter.
        start: the first element that this is of, counted in the rank's own part of the parameter, flattened.
        tensors: views of the state, by name, each with as many elements. ``master`` are the values themselves, in at
            least float32; the others are moments.
    """

    name: str
    parameter: nn.Parameter
    start: int
    tensors: dict[str, torch.Tensor]

    @property
    def stop(self) -> int:
        return self.start + next(iter(self.tensors.values())).numel()


def carry_state(
    parameter: nn.Parameter,
    source: Piece | None,
    target: Piece | None,
    like: dict[str, torch.Tensor],
    group: dist.ProcessGroup | None,
) -> None:
    """Carry a parameter's state from one division among ranks to another. Every rank of the group must call it.

    Args:
        parameter: this rank's part of it, which is the same on all ranks of the group.
        source, target: this rank's pieces of it in the two divisions; None where it has nothing.
        like: tensors with the names and types of the state.
        group: the ranks that share the state; None if there is one.
    """
    for kind, example in like.items():
        whole = torch.zeros(parameter.numel(), dtype=example.dtype, device=example.device)
        if source is not None:
            whole[source.start : source.stop] = source.tensors[kind]
        if group is not None:
            dist.all_reduce(whole, group=group)
        if target is not None:
            target.tensors[kind].copy_(whole[target.start : target.stop])


class Box(NamedTuple):
    """A rectangle of a tensor, ``[offset, offset + size)`` along each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The elements ``[start, stop)`` of a flattened tensor, as rectangles of that tensor, in order.

    Each is one run of the flattened tensor. Of a matrix there are at most three: the end of a row, whole rows, and the
    beginning of a row.

    Example:
        >>> boxes((4, 5), 3, 16)
        [Box(offsets=(0, 3), sizes=(1, 2)), Box(offsets=(1, 0), sizes=(2, 5)), Box(offsets=(3, 0), sizes=(1, 1))]
    """
    if start >= stop:
        return []
    if not shape:
        return [Box((), ())]
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # inside of one
        return _in_row(shape, last, start, stop)
    found = _in_row(shape, first - 1, start, first * row)
    if first < last:
        found.append(Box((first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:])))
    return found + _in_row(shape, last, last * row, stop)


def _in_row(shape: Sequence[int], number: int, start: int, stop: int) -> list[Box]:
    begin = number * math.prod(shape[1:])
    parts = boxes(shape[1:], start - begin, stop - begin)
    return [Box((number, *part.offsets), (1, *part.sizes)) for part in parts]


class PartOfTensor(torch.Tensor):
    """A tensor of which this rank has some rectangles only, for ``torch.distributed.checkpoint``.

    It has the shape of the whole and no memory of its own. The three methods with underscores are torch's protocol for
    such tensors (``torch/distributed/_checkpointable.py``), which its DTensor follows as well.
    """

    parts: dict[torch.Size, torch.Tensor]  # by offset in the whole

    @staticmethod
    def __new__(cls, shape: Sequence[int], parts: dict[torch.Size, torch.Tensor], dtype: torch.dtype) -> PartOfTensor:
        device = torch.device("cpu")
        made: PartOfTensor = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device=device)
        made.parts = parts
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func}: a part of a tensor can only be saved and loaded")

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        items = []
        for chunk in self.__create_chunk_list__():
            properties = TensorProperties.create_from_tensor(self.parts[chunk.offsets])
            data = TensorWriteData(chunk=chunk, properties=properties, size=self.size())
            items.append(WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        return items

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offset, part.size()) for offset, part in self.parts.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self.parts[index.offset]


def parts_of_whole(piece: Piece, layout: ParameterLayout, mesh: ParallelMesh) -> dict[str, PartOfTensor]:
    """A piece as rectangles of the whole model's tensors, in the same memory.

    Args:
        piece: of a parameter.
        layout: of that parameter.
        mesh: the ranks.

    Returns:
        For each tensor of the piece, by name, what this rank has of the whole.
    """
    shape = layout.local_shape(mesh)
    first = [0] * len(shape)
    if layout.sharded_dim is not None:
        first[layout.sharded_dim] = mesh.rank("tp") * shape[layout.sharded_dim]
    found = {}
    for kind, tensor in piece.tensors.items():
        parts, done = {}, 0
        for box in boxes(shape, piece.start, piece.stop):
            size = math.prod(box.sizes)
            offset = torch.Size(a + b for a, b in zip(first, box.offsets, strict=True))
            parts[offset] = tensor[done : done + size].view(box.sizes)
            done += size
        found[kind] = PartOfTensor(layout.full_shape, parts, tensor.dtype)
    return found
