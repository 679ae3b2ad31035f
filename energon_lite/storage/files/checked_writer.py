"""Files of numbers with a checksum of each block: their format, and writing them.

Reading them is for :mod:`energon_lite.storage.index.checked_file`.

Format (little endian)::

    bytes 0..63    magic of 8 bytes, u32 crc32 of what follows in these 64, u32 version, u64 end of the body, u64 length
                   of the table, u32 crc32 of checksums and table, zeros
    body           from byte 64 on; arrays start at multiples of 64
    checksums      u32 for each 8 KiB of the file up to the end of the body: crc32; that of the first leaves out the
                   64 bytes of the header
    table          JSON, up to the end of the file
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from energon_lite.storage.files.atomic_file import replacing

__all__ = ["ALIGN", "BLOCK", "HEADER", "START", "CheckedWriter", "FileKind", "writing_checked"]

#: Magic and checksum of the header, and the rest of it.
START, HEADER = struct.Struct("<8sI"), struct.Struct("<IQQI28x")
#: Bytes of the header; arrays start at multiples of this.
ALIGN = 64
#: Bytes that have a checksum together.
BLOCK = 1 << 13


class FileKind(NamedTuple):
    """What distinguishes one kind of checked file from others.

    Attributes:
        magic: its first eight bytes.
        version: of its format.
        name: what it is called in messages.
        cure: what to do about one that is damaged.
    """

    magic: bytes
    version: int
    name: str
    cure: str


class CheckedWriter:
    """Writes a checked file, from the beginning to the end. Made by :func:`writing_checked`."""

    def __init__(self, file: BinaryIO, kind: FileKind):
        self._file, self._kind = file, kind
        self._sums, self._sum, self._end = array("I"), 0, ALIGN
        file.write(bytes(ALIGN))

    def align(self) -> int:
        """Go on at a multiple of 64; returns where that is."""
        self.write(bytes(-self._end % ALIGN))
        return self._end

    def write(self, data: bytes | memoryview) -> None:
        """Append to the body."""
        view = memoryview(data).cast("B") if data else memoryview(b"")
        self._file.write(view)
        while view:
            part = view[: BLOCK - self._end % BLOCK]
            self._sum, self._end = zlib.crc32(part, self._sum), self._end + len(part)
            if self._end % BLOCK == 0:
                self._sums.append(self._sum)
                self._sum = 0
            view = view[len(part) :]

    def finish(self, table: Mapping[str, Any]) -> None:
        """Write what stands around the body. ``table`` must be plain data."""
        if self._end % BLOCK:
            self._sums.append(self._sum)
        rest = np.array(self._sums, dtype="<u4").tobytes() + json.dumps(table).encode()
        length = len(rest) - 4 * len(self._sums)
        self._file.write(rest)
        head = HEADER.pack(self._kind.version, self._end, length, zlib.crc32(rest))
        self._file.seek(0)
        self._file.write(START.pack(self._kind.magic, zlib.crc32(head)) + head)


@contextmanager
def writing_checked(path: str, kind: FileKind) -> Iterator[CheckedWriter]:
    """Write the checked file ``path``, atomically; the block must end with :meth:`CheckedWriter.finish`."""
    with replacing(path) as temporary, open(temporary, "xb") as file:
        yield CheckedWriter(file, kind)
        file.flush()
        os.fsync(file.fileno())
