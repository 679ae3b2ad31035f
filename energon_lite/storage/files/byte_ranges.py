"""Ranges of bytes of local and remote files, without an open file that a fork or a pickle would break."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping
from typing import Any

from energon_lite.errors import MissingShardError, ShardChangedError
from energon_lite.storage.files.file_versions import expect_version
from energon_lite.storage.files.open_file import open_file
from energon_lite.storage.files.remote_files import file_info, file_size, is_remote, read_range

__all__ = ["RangeFile", "RangedFile", "found_at", "missing", "read_bytes", "size_of"]

#: Bytes of the first request. A request takes about as long as the transfer of a MiB.
_FIRST_REQUEST = 1 << 16
#: Bytes of a request at least.
_SMALLEST_REQUEST = 1 << 13
#: Bytes of a request at most.
_LARGEST_REQUEST = 8 << 20
#: Bytes between two reads that count as near each other.
_NEAR = 1 << 20


def found_at(path: str) -> os.stat_result | Mapping[str, Any]:
    """Return the current record of a file in its file system or store; from now on its version is expected.

    Raises:
        MissingShardError: there is no such file.
        DatasetError: the store does not answer.
    """
    try:
        if not is_remote(path):
            return os.stat(path)
        info = file_info(path)
    except (FileNotFoundError, NotADirectoryError):
        raise missing(path) from None
    expect_version(path, info)
    return info


def size_of(path: str, found: os.stat_result | Mapping[str, Any] | None = None) -> int:
    """Return the bytes of a file; ``found`` is the result of :func:`found_at` if that was called before.

    Raises:
        MissingShardError, DatasetError: as :func:`found_at`; or the store's record has no size.
    """
    found = found_at(path) if found is None else found
    return found.st_size if isinstance(found, os.stat_result) else file_size(path, found)


def read_bytes(path: str, offset: int, size: int) -> bytes:
    """Read the ``size`` bytes at ``offset``.

    Raises:
        MissingShardError: there is no such file.
        ShardChangedError: the file ends before the last of them.
        DatasetError: the store does not answer.
    """
    if size <= 0:
        return b""
    try:
        if is_remote(path):
            return read_range(path, offset, size)
        with open(path, "rb", buffering=0, opener=open_file) as file:
            pieces, left = [], size
            while left and (data := os.pread(file.fileno(), left, offset + size - left)):
                pieces.append(data)
                left -= len(data)
    except FileNotFoundError:
        raise missing(path) from None
    if left:
        raise ShardChangedError(
            f"the file ends {left} bytes before byte {offset + size}", where=path, fix="restore or download it again"
        )
    return b"".join(pieces)


def missing(path: str) -> MissingShardError:
    """Return the error for a file that does not exist."""
    return MissingShardError("the file does not exist", where=path, fix="restore it, or correct the path")


class RangedFile(io.RawIOBase):
    """A seekable file, or a stretch of one. Each read is one request; nothing stays open between two reads.

    Args:
        size: its bytes.
        read_at: ``(offset, size) -> bytes``.
    """

    def __init__(self, size: int, read_at: Callable[[int, int], bytes]):
        super().__init__()
        self.size = size
        self._read_at = read_at
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self.size - self._position)
        data = self._read_at(self._position, left if size is None or size < 0 else min(size, left))
        self._position += len(data)
        return data

    def readall(self) -> bytes:
        return self.read()

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)


class RangeFile:
    """Buffered reader of a file behind a URL that is read sequentially, with gaps: few requests, which grow while reads
    are near each other.

    Args:
        url: the file.
        length: bytes in it.

    Raises:
        DatasetError, FileNotFoundError: (while reading) as :func:`~energon_lite.storage.files.remote_files.read_range`.
    """

    def __init__(self, url: str, length: int):
        self.url = url
        self.length = length
        self._data = b""
        self._base = 0
        self._block = _FIRST_REQUEST

    def read(self, size: int, offset: int) -> bytes:
        """Return ``size`` bytes at ``offset``, fewer at the end of the file."""
        size = max(0, min(size, self.length - offset))
        start = offset - self._base
        if start < 0 or start + size > len(self._data):
            gap = offset - self._base - len(self._data)
            near = bool(self._data) and -len(self._data) <= gap <= _NEAR
            if self._data:
                self._block = (
                    min(4 * self._block, _LARGEST_REQUEST) if near else max(self._block // 4, _SMALLEST_REQUEST)
                )
            wanted = min(max(size, self._block), self.length - offset)
            self._data = read_range(self.url, offset, wanted)
            self._base = offset
            start = 0
        return self._data[start : start + size]

    def read_into(self, memory: memoryview, offset: int) -> int:
        """Fill ``memory`` with the bytes from ``offset`` on; return the number of bytes that were read."""
        data = self.read(len(memory), offset)
        memory[: len(data)] = data
        return len(data)
