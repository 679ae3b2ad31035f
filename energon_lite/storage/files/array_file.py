"""The library's own container format: a file of arrays in which every byte is verified before it is used.

The packed index, columns, the results of units of work and packed lists are kinds of it; each kind has its own magic
and version. Format (little endian)::

    bytes 0..63    magic of 8 bytes, u32 crc32 of what follows in these 64, u32 version, u64 end of the body, u64 length
                   of the table, u32 crc32 of checksums and table, zeros
    body           from byte 64 on: the arrays, each of which starts at a multiple of 64
    checksums      u32 for each 8 KiB of the file up to the end of the body: crc32; the first excludes the 64 bytes of
                   the header
    table          JSON, up to the end of the file: {"arrays": {name: [dtype, shape, offset]}, "meta": {...}}

This module writes such files, and reads small ones as a whole; :mod:`energon_lite.storage.files.stored_array` reads
large ones.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from energon_lite.errors import DataIndexError
from energon_lite.storage.files.atomic_file import replacing
from energon_lite.storage.files.byte_ranges import open_file

#: Start of the header: magic and checksum.
_START = struct.Struct("<8sI")
#: Rest of the header: version, end of the body, length of the table, checksum of checksums and table.
_HEADER = struct.Struct("<IQQI28x")
#: Bytes of the header; arrays start at multiples of this.
ALIGN = 64
#: Bytes of a block, which has one checksum.
BLOCK = 1 << 13

#: Place of an array: type, shape and offset in the file.
Place = tuple[str, list[int], int]


class FileKind(NamedTuple):
    """Magic, version and name of a kind of array file.

    Attributes:
        magic: the first eight bytes of its files.
        version: version of its format.
        name: its name in messages.
        cure: advice for a damaged file.
    """

    magic: bytes
    version: int
    name: str
    cure: str

    def damaged(self, path: str, how: str) -> DataIndexError:
        """Return the error for a damaged file of this kind."""
        return self.refused(path, f"the {self.name} is damaged ({how})")

    def refused(self, path: str, what: str, also: str = "") -> DataIndexError:
        """Return the error for a file that is of another kind, or incomplete."""
        return DataIndexError(what, where=path, fix=also + self.cure)


class ArrayWriter:
    """Sequential writer of an array file.

    Args:
        file: open for writing, and empty.
        kind: kind of the file.
        meta: plain data stored with the arrays; may be changed until :meth:`finish`.
    """

    def __init__(self, file: BinaryIO, kind: FileKind, meta: Mapping[str, Any]):
        self.meta = dict(meta)
        self._file = file
        self._kind = kind
        self._sums = array("I")
        self._sum = 0
        self._end = ALIGN
        self._places: dict[str, Place] = {}
        file.write(bytes(ALIGN))

    def add(self, name: str, values: NDArray[Any]) -> None:
        """Append an array of at least one dimension."""
        flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        self.stream(name, values.dtype.str, values.shape[1:], [flat.data])
        self._places[name][1][0] = len(values)  # stream() cannot count rows of zero bytes

    def stream(self, name: str, dtype: str, row: Iterable[int], chunks: Iterable[bytes | memoryview]) -> None:
        """Append an array from chunks of bytes; its length need not be known in advance.

        Args:
            name: name of the array.
            dtype: such as ``"<i8"``.
            row: shape without the first dimension.
            chunks: bytes of the array.
        """
        self._write(bytes(-self._end % ALIGN))
        start = self._end
        for chunk in chunks:
            self._write(chunk)
        row = list(row)
        row_bytes = max(1, np.dtype(dtype).itemsize * math.prod(row))
        self._places[name] = dtype, [(self._end - start) // row_bytes, *row], start

    def finish(self) -> None:
        """Write checksums and table behind the body, and the header in front of it."""
        self._write(bytes(-self._end % ALIGN))
        if self._end % BLOCK:
            self._sums.append(self._sum)
        table = json.dumps({"arrays": self._places, "meta": self.meta}).encode()
        rest = np.array(self._sums, dtype="<u4").tobytes() + table
        self._file.write(rest)
        head = _HEADER.pack(self._kind.version, self._end, len(table), zlib.crc32(rest))
        self._file.seek(0)
        self._file.write(_START.pack(self._kind.magic, zlib.crc32(head)) + head)

    def _write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        view = memoryview(data)
        while view:
            part = view[: BLOCK - self._end % BLOCK]
            self._sum = zlib.crc32(part, self._sum)
            self._end += len(part)
            if self._end % BLOCK == 0:
                self._sums.append(self._sum)
                self._sum = 0
            view = view[len(part) :]


@contextmanager
def writing(path: str, kind: FileKind, meta: Mapping[str, Any], *, flush: bool = True) -> Iterator[ArrayWriter]:
    """Write the array file ``path`` atomically, array by array.

    Args:
        path: the file.
        kind: kind of the file.
        meta: see :class:`ArrayWriter`.
        flush: also flush it to the disk.

    Example:
        >>> with writing("a.idx", KIND, {"name": "a"}) as file:
        ...     file.add("values", np.arange(5))
    """
    with replacing(path, flush=flush) as temporary, open(temporary, "xb") as file:
        writer = ArrayWriter(file, kind, meta)
        yield writer
        writer.finish()


def write_arrays(
    path: str, kind: FileKind, arrays: Mapping[str, NDArray[Any]], meta: Mapping[str, Any], *, flush: bool = True
) -> None:
    """Write an array file atomically from arrays in memory; see :func:`writing`."""
    with writing(path, kind, meta, flush=flush) as file:
        for name, values in arrays.items():
            file.add(name, values)


class Head(NamedTuple):
    """The verified contents of an array file except its body.

    Attributes:
        kind: kind of the file.
        path: path of the file.
        size: bytes of the file.
        start: its first 512 bytes, or all of a shorter file.
        end: end of the body, in bytes from the start of the file.
        checksums: one for each block.
        places: places of the arrays.
        meta: the plain data that was stored with them.
    """

    kind: FileKind
    path: str
    size: int
    start: bytes
    end: int
    checksums: memoryview
    places: Mapping[str, Place]
    meta: Any

    def check(self, data: bytes | memoryview, first: int) -> None:
        """Verify the checksums of whole blocks.

        Args:
            data: bytes of the blocks.
            first: number of the first block.

        Raises:
            DataIndexError: one of them has a wrong checksum.
        """
        if first and len(data) <= BLOCK and zlib.crc32(data) == self.checksums[first]:
            return  # fast path for single blocks, the most frequent case of random look-ups
        view, start = memoryview(data), first * BLOCK
        for low in range(0, len(view), BLOCK):
            block = view[max(low, ALIGN - start) : low + BLOCK]
            if zlib.crc32(block) != self.checksums[first + low // BLOCK]:
                raise self.kind.damaged(self.path, f"the block at byte {start + low} has a wrong checksum")


def read_head(file: BinaryIO, path: str, kind: FileKind) -> Head:
    """Read and verify all of an array file except its body.

    Raises:
        DataIndexError: it is damaged, incomplete, or of another kind or version.
    """
    size = os.fstat(file.fileno()).st_size
    start = file.read(512)
    if len(start) < ALIGN or start[:8] != kind.magic:
        raise kind.refused(path, f"this is not a {kind.name}")
    version, end, length, checksum = _HEADER.unpack_from(start, _START.size)
    if version != kind.version:
        what = f"the {kind.name} has format {version}, this library reads format {kind.version}"
        raise kind.refused(path, what, "update energon_lite, or ")
    if start[: _START.size] != _START.pack(kind.magic, zlib.crc32(start[_START.size : ALIGN])):
        raise kind.damaged(path, "its header has a wrong checksum")
    sums = 4 * -(-end // BLOCK)
    if end < ALIGN or end + sums + length != size:
        what = f"the {kind.name} is too short or too long: {size} bytes instead of {end + sums + length}"
        raise kind.refused(path, what)
    file.seek(end)
    rest = file.read(sums + length)
    if zlib.crc32(rest) != checksum:
        raise kind.damaged(path, "its table has a wrong checksum")
    values = np.frombuffer(rest, dtype="<u4", count=sums // 4).astype(np.uint32, copy=False)
    try:
        table = json.loads(rest[sums:])
        places = {
            name: (np.dtype(dtype).str, [int(length) for length in shape], int(offset))
            for name, (dtype, shape, offset) in table["arrays"].items()
        }
        return Head(kind, path, size, start, end, memoryview(values), places, table["meta"])  # type: ignore[arg-type]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise kind.damaged(path, "its table is incomplete") from None


def read_arrays(path: str, kind: FileKind) -> tuple[dict[str, NDArray[Any]], Any]:
    """Read the arrays of a file into memory, verified; return them with the stored plain data.

    Raises:
        DataIndexError: it is damaged, incomplete, or of another kind or version.
        FileNotFoundError: there is no such file.

    Example:
        >>> arrays, meta = read_arrays("a.idx", KIND)
        >>> arrays["values"].tolist(), meta
        ([0, 1, 2, 3, 4], {'name': 'a'})
    """
    with open(path, "rb", opener=open_file) as file:
        head = read_head(file, path, kind)
        file.seek(0)
        data = file.read(head.end)
    head.check(data, 0)
    return {
        name: np.frombuffer(data, dtype, math.prod(shape), offset).reshape(shape)
        for name, (dtype, shape, offset) in head.places.items()
    }, head.meta
