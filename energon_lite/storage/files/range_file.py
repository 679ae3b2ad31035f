"""A remote file that is read from its beginning to its end, in few requests, though not all of it is wanted."""

from __future__ import annotations

from energon_lite.storage.files.remote_files import read_range

__all__ = ["RangeFile"]

#: Bytes of a request: the first one, the fewest, the most. A request costs about as long as a MiB takes.
_FIRST, _FEWEST, _MOST = 1 << 16, 1 << 13, 8 << 20
_NEAR = 1 << 20


class RangeFile:
    """Reads of a file behind a URL, with what follows them; requests grow while reads are near each other.

    Args:
        url: the file.
        length: bytes in it.

    Raises:
        DatasetError, FileNotFoundError: (while reading) as :func:`~energon_lite.storage.files.remote_files.read_range`.
    """

    def __init__(self, url: str, length: int):
        self.url, self.length = url, length
        self._data, self._base, self._block = b"", 0, _FIRST

    def read(self, size: int, offset: int) -> bytes:
        """``size`` bytes at ``offset``, fewer at the end of the file."""
        size = max(0, min(size, self.length - offset))
        start = offset - self._base
        if start < 0 or start + size > len(self._data):
            gap = offset - self._base - len(self._data)
            near = bool(self._data) and -len(self._data) <= gap <= _NEAR
            if self._data:
                self._block = min(4 * self._block, _MOST) if near else max(self._block // 4, _FEWEST)
            wanted = min(max(size, self._block), self.length - offset)
            self._data, self._base, start = read_range(self.url, offset, wanted), offset, 0
        return self._data[start : start + size]

    def read_into(self, memory: memoryview, offset: int) -> int:
        """Fill ``memory`` from ``offset`` on; returns how many bytes there were."""
        data = self.read(len(memory), offset)
        memory[: len(data)] = data
        return len(data)
