"""Shards: one rank's part of the optimizer state of a parameter, also as boxes of the whole tensor.

Slices of buckets are independent of rows, so a rank's shard of a matrix is a run of its elements. A run is a few
rectangles, and any other layout of ranks can read rectangles of global tensors.
Buckets and files of tensors are groups of neighbours of limited size.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from energon_lite.trainer.parallel.mesh import ParallelMesh
from energon_lite.trainer.parallel.parameters import layout_of, local_tensor


class Shard(NamedTuple):
    """One rank's part of the state of a parameter.

    Args:
        name, parameter: the parameter.
        start: first element of the shard, counted in the rank's own part of the parameter, flattened.
        tensors: views of the state, by name, with equal numbers of elements. ``master`` are the values themselves, in
            at least float32; the others are moments.
    """

    name: str
    parameter: nn.Parameter
    start: int
    tensors: dict[str, torch.Tensor]

    @property
    def stop(self) -> int:
        return self.start + next(iter(self.tensors.values())).numel()

    @property
    def values(self) -> torch.Tensor:
        """The elements of the parameter itself, in the model's type."""
        return local_tensor(self.parameter).detach().flatten()[self.start : self.stop]

    def take_values(self) -> None:
        """Set the master values from the parameter, after it was given other values."""
        if "master" in self.tensors:
            self.tensors["master"].copy_(self.values)


class Box(NamedTuple):
    """A rectangle of a tensor, ``[offset, offset + size)`` along each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Return the elements ``[start, stop)`` of a flattened tensor as rectangles of that tensor, in order.

    Each is one run of the flattened tensor. A matrix has at most three: the end of a row, whole rows, and the beginning
    of a row.

    Example:
        >>> boxes((4, 5), 3, 16)
        [Box(offsets=(0, 3), sizes=(1, 2)), Box(offsets=(1, 0), sizes=(2, 5)), Box(offsets=(3, 0), sizes=(1, 1))]
    """
    if start >= stop:
        return []
    if not shape:
        return [Box((), ())]
    row = math.prod(shape[1:])
    number, last = start // row, stop // row
    if number * row < start or number == last:  # not all of the first row
        end = min(stop, (number + 1) * row)
        inside = boxes(shape[1:], start - number * row, end - number * row)
        return [Box((number, *part.offsets), (1, *part.sizes)) for part in inside] + boxes(shape, end, stop)
    whole = Box((number,) + (0,) * (len(shape) - 1), (last - number, *shape[1:]))
    return [whole, *boxes(shape, last * row, stop)]


class ChunkedTensor(torch.Tensor):
    """A tensor of which this process has only some boxes, for ``torch.distributed.checkpoint``.

    It has the shape of the whole and no memory of its own: torch plans with shapes alone, and requests values when it
    writes them. The three methods with underscores are its protocol for such tensors
    (``torch/distributed/_checkpointable.py``), which its DTensor follows as well.

    Args:
        shape, dtype: of the whole.
        boxes: the boxes in this process.
        read: function that returns the values of a box, ``[*box.sizes]``: a view of the memory, if the tensor is to be
            loaded.

    Example:
        >>> ChunkedTensor((4, 2), torch.float32, [Box((0, 0), (4, 2))], lambda box: torch.ones(box.sizes))
    """

    boxes: tuple[Box, ...]
    read: Callable[[Box], torch.Tensor]

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], dtype: torch.dtype, boxes: Iterable[Box], read: Callable[[Box], torch.Tensor]
    ) -> ChunkedTensor:
        device = torch.device("cpu")
        made: ChunkedTensor = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device=device)
        made.boxes, made.read = tuple(boxes), read
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func}: a tensor of which some boxes are here can only be saved and loaded")

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self.read(next(box for box in self.boxes if box.offsets == tuple(index.offset)))


def whole_box(tensor: torch.Tensor) -> ChunkedTensor:
    """Return a tensor of which this process has all as one box, in the same memory."""
    box = Box((0,) * tensor.dim(), tuple(tensor.shape))
    return ChunkedTensor(tensor.shape, tensor.dtype, [box], lambda _: tensor)


def copy_box(box: Box, read: Callable[[Box], torch.Tensor], target: ChunkedTensor) -> None:
    """Copy a box of a tensor into another division of it; it is read with ``read(box)`` only if it is needed."""
    common = [(mine, both) for mine in target.boxes if (both := _overlap(box, mine)) is not None]
    values = read(box) if common else None
    for mine, both in common:
        assert values is not None
        target.read(mine)[_within(mine, both)].copy_(values[_within(box, both)])


def _overlap(one: Box, other: Box) -> Box | None:
    starts = tuple(map(max, one.offsets, other.offsets))
    stops = [min(a + m, b + n) for a, m, b, n in zip(*one, *other, strict=True)]
    sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
    return Box(starts, sizes) if all(size > 0 for size in sizes) else None


def _within(whole: Box, part: Box) -> tuple[slice, ...]:
    """Return the slices of a part within the values of a box."""
    return tuple(slice(a - b, a - b + size) for a, b, size in zip(part.offsets, whole.offsets, part.sizes, strict=True))


def whole_tensors(shard: Shard, mesh: ParallelMesh) -> dict[str, ChunkedTensor]:
    """Return a shard as boxes of the whole model's tensors, in the same memory.

    Args:
        shard: shard of a parameter with a layout.
        mesh: the ranks.

    Returns:
        For each tensor of the shard, by name, this rank's boxes of the whole.
    """
    layout = layout_of(shard.parameter)
    shape = layout.local_shape(mesh)
    first = [mesh.rank("tp") * size if dim == layout.sharded_dim else 0 for dim, size in enumerate(shape)]
    here = boxes(shape, shard.start, shard.stop)
    placed = [Box(tuple(map(operator.add, first, box.offsets)), box.sizes) for box in here]
    chunked = {}
    for kind, tensor in shard.tensors.items():
        values = tensor.split([math.prod(box.sizes) for box in placed])
        parts = {box: part.view(box.sizes) for box, part in zip(placed, values, strict=True)}
        chunked[kind] = ChunkedTensor(layout.full_shape, tensor.dtype, parts, parts.__getitem__)
    return chunked


T = TypeVar("T")


def neighbours(sized: Iterable[tuple[T, int]], most: int) -> list[list[T]]:
    """Divide things in order into groups of limited total size, or of one thing.

    Args:
        sized: pairs of a thing and its size.
        most: the largest total size of a group.

    Example:
        >>> neighbours([("a", 2), ("b", 1), ("c", 9), ("d", 3)], 3)
        [['a', 'b'], ['c'], ['d']]
    """
    groups: list[list[T]] = []
    filled = 0
    for thing, size in sized:
        if not groups or filled + size > most:
            groups.append([])
            filled = 0
        groups[-1].append(thing)
        filled += size
    return groups
