"""Reading and writing of safetensors files in any part and order.

The safetensors library maps a file into memory, or writes one from tensors that are all in memory. A conversion needs
neither: it reads some rows, and writes some columns of a tensor before others. The format
(https://github.com/huggingface/safetensors) is eight bytes with the length of a JSON header, the header, and the bytes.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from energon_lite.errors import StateError, UsageError
from energon_lite.storage import replacing
from energon_lite.trainer.parallel.shards import Box

#: Data types by their names in the format.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
#: The largest valid length of a header in bytes (the library's own bound).
_MOST_HEADER = 100_000_000


@dataclass(frozen=True)
class TensorType:
    """Type and shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class TensorEntry(TensorType):
    """Type, shape and offset of a tensor in a file.

    Args:
        dtype, shape: those of the tensor.
        start: offset of its first byte, from the end of the header.
    """

    start: int


class SafetensorsFile:
    """Reader of a file in parts.

    Args:
        path: the file.

    Attributes:
        entries: its tensors by name, in the order of their bytes.
        metadata: the texts of its header.

    Raises:
        StateError: not a safetensors file, or a truncated one.

    Example:
        >>> file = SafetensorsFile("model.safetensors")
        >>> file.read_rows("model.norm.weight", 0, 8)
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        size = self.path.stat().st_size
        with open(self.path, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, _MOST_HEADER):
                raise self._broken("it is too short for its header")
            try:
                header: dict[str, Any] = json.loads(stream.read(length))
                self.metadata: dict[str, str] | None = header.pop("__metadata__", None)
                entries = [_entry(name, fields, self) for name, fields in header.items()]
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise self._broken(f"its header cannot be read: {error}") from error
        self.entries = dict(sorted(entries, key=lambda item: item[1].start))
        self._first = 8 + length
        end = 0
        for name, entry in self.entries.items():
            if entry.start != end:
                raise self._broken(f"the bytes of {name} do not follow those before")
            end += entry.nbytes
        if self._first + end != size:
            raise self._broken(f"it has {size} bytes instead of {self._first + end}")

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Read rows ``[start, stop)`` of a tensor's first dimension into new memory. A scalar has one row."""
        entry = self.entries[name]
        row = entry.nbytes // max(entry.shape[0], 1) if entry.shape else entry.nbytes
        shape = (stop - start, *entry.shape[1:]) if entry.shape else ()
        values = torch.empty(shape, dtype=entry.dtype)
        with open(self.path, "rb") as stream:
            stream.seek(self._first + entry.start + start * row)
            if stream.readinto(_bytes_of(values)) != values.nbytes:
                raise self._broken("it ends too early")
        return values

    def _broken(self, why: str) -> StateError:
        return StateError(f"not a whole safetensors file: {why}", where=self.path, fix="fetch or write it again")


def _entry(name: str, said: dict[str, Any], file: SafetensorsFile) -> tuple[str, TensorEntry]:
    if said["dtype"] not in DTYPES:
        raise UsageError(
            f"{name} is of type {said['dtype']}", where=file.path, fix=f"only these are known: {', '.join(DTYPES)}"
        )
    start, stop = said["data_offsets"]
    entry = TensorEntry(DTYPES[said["dtype"]], tuple(said["shape"]), start)
    if stop - start != entry.nbytes:
        raise ValueError(f"{name} has {stop - start} bytes instead of {entry.nbytes}")
    return name, entry


@contextmanager
def write_safetensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    metadata: Mapping[str, str] | None,
) -> Iterator[SafetensorsWriter]:
    """Write a file by rectangles of its tensors; it exists when the block has written all of them.

    Args:
        path: path of the new file.
        tensors: type and shape of each tensor, by name, in the order of their bytes.
        metadata: texts for the header.

    Raises:
        StateError: an element was not written, or written twice.

    Example:
        >>> with write_safetensors("model.safetensors", {"w": (torch.float32, (2, 2))}, {"format": "pt"}) as writer:
        ...     writer.put("w", Box((0, 0), (2, 2)), torch.eye(2))
    """
    with replacing(os.fspath(path), flush=True) as temporary:
        with open(temporary, "wb") as stream:
            yield (writer := SafetensorsWriter(stream, tensors, metadata))
        if wrong := writer.unwritten():
            what = f"{len(wrong)} tensors were not written whole, the first is {wrong[0]}"
            raise StateError(what, where=path, fix="report it")


class SafetensorsWriter:
    """Writer of the rectangles of tensors, in any order; arguments as :func:`write_safetensors`."""

    def __init__(
        self,
        stream: BinaryIO,
        tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        metadata: Mapping[str, str] | None,
    ):
        header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
        self.entries: dict[str, TensorEntry] = {}
        end = 0
        for name, (dtype, shape) in tensors.items():
            entry = self.entries[name] = TensorEntry(dtype, shape, end)
            end += entry.nbytes
            header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [entry.start, end]}
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)  # so that tensors are aligned
        self._first, self._missing = 8 + len(text), {name: entry.nbytes for name, entry in self.entries.items()}
        self._file = stream
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._file.truncate(self._first + end)

    def put(self, name: str, box: Box, values: torch.Tensor) -> None:
        """Write a rectangle of a tensor. Each element must be written once."""
        entry = self.entries[name]
        view, size = _bytes_of(values.to(entry.dtype).contiguous()), entry.dtype.itemsize
        done = 0
        for first, count in _runs(entry.shape, box):
            self._file.seek(self._first + entry.start + first * size)
            self._file.write(view[done : done + count * size])
            done += count * size
        self._missing[name] -= done

    def unwritten(self) -> list[str]:
        """Return the tensors of which an element was not written, or was written twice."""
        return [name for name, missing in self._missing.items() if missing]


def _runs(shape: tuple[int, ...], box: Box) -> Iterator[tuple[int, int]]:
    """Yield the rectangle as runs of the flattened tensor: first element and length, in order."""
    whole = len(shape)  # first of the last dimensions that are whole
    while whole and box.sizes[whole - 1] == shape[whole - 1]:
        whole -= 1
    strides = [math.prod(shape[place + 1 :]) for place in range(len(shape))]
    inner = max(whole - 1, 0)
    count = math.prod(box.sizes[inner:])
    base = sum(offset * stride for offset, stride in zip(box.offsets[inner:], strides[inner:], strict=True))
    for place in itertools.product(*(range(box.offsets[d], box.offsets[d] + box.sizes[d]) for d in range(inner))):
        yield base + sum(index * stride for index, stride in zip(place, strides[:inner], strict=True)), count


def _bytes_of(values: torch.Tensor) -> memoryview:
    return memoryview(values.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
