"""A remote file that is read sequentially, with gaps, in few requests."""

from __future__ import annotations

from energon_lite.storage.files.remote_files import read_range

__all__ = ["RangeFile"]

#: Bytes of the first request. A request takes about as long as the transfer of a MiB.
_FIRST = 1 << 16
#: Bytes of a request at least.
_FEWEST = 1 << 13
#: Bytes of a request at most.
_MOST = 8 << 20
#: Bytes between two reads that count as near each other.
_NEAR = 1 << 20


class RangeFile:
    """Buffered reader of a file behind a URL; requests grow while reads are near each other.

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
        self._block = _FIRST

    def read(self, size: int, offset: int) -> bytes:
        """Return ``size`` bytes at ``offset``, fewer at the end of the file."""
        size = max(0, min(size, self.length - offset))
        start = offset - self._base
        if start < 0 or start + size > len(self._data):
            gap = offset - self._base - len(self._data)
            near = bool(self._data) and -len(self._data) <= gap <= _NEAR
            if self._data:
                self._block = min(4 * self._block, _MOST) if near else max(self._block // 4, _FEWEST)
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
