"""Ranges of bytes of files on local disks and behind URLs, without an open file that a fork or a pickle would break."""

from __future__ import annotations

import io
import os
from typing import Any

from energon_lite.errors import MissingShardError, ShardChangedError
from energon_lite.storage.files.open_file import open_file
from energon_lite.storage.files.remote_files import file_size, is_remote, read_range

__all__ = ["RangeFile", "read_bytes", "size_of"]


def size_of(path: str) -> int:
    """Bytes of a file.

    Raises:
        MissingShardError: there is no such file.
        DatasetError: the store does not answer.
    """
    try:
        return file_size(path) if is_remote(path) else os.stat(path).st_size
    except (FileNotFoundError, NotADirectoryError):
        raise missing(path) from None


def read_bytes(path: str, offset: int, size: int) -> bytes:
    """The ``size`` bytes at ``offset``.

    Raises:
        MissingShardError: there is no such file.
        ShardChangedError: it ends before.
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
    """The error for a file that is not there."""
    return MissingShardError("the file does not exist", where=path, fix="restore it, or correct the path")


class RangeFile(io.RawIOBase):
    """A file behind a URL, for libraries that want an open file. Each read is one request.

    Args:
        path: its URL.
        size: bytes of it.
    """

    def __init__(self, path: str, size: int):
        super().__init__()
        self._path, self._size, self._at = path, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._size - self._at)
        data = read_bytes(self._path, self._at, left if size is None or size < 0 else min(size, left))
        self._at += len(data)
        return data

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)
