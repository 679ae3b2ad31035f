"""Counts of this process's reads: bytes, requests, and hits in caches."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["COUNTS", "ReadCounts", "Reads"]


class Reads(NamedTuple):
    """Counts of reads.

    Attributes:
        bytes_read: bytes of samples, from local files, from slow storage, or from a source of the user's.
        requests: requests to slow storage.
        memory_hits: ranges that :class:`~energon_lite.ReadAhead` had in memory.
        folder_hits: ranges that it had in its folder.
    """

    bytes_read: int = 0
    requests: int = 0
    memory_hits: int = 0
    folder_hits: int = 0

    def __add__(self, other: Reads) -> Reads:  # type: ignore[override]
        return Reads(*map(sum, zip(self, other, strict=True)))


class ReadCounts:
    """Running counts of a process. There is one for all threads, since threads read for each other; each count is
    taken by one caller only.

    Attributes:
        bytes_read, requests, memory_hits, folder_hits: see :class:`Reads`; counted since the last :meth:`take`.
    """

    __slots__ = Reads._fields

    def __init__(self) -> None:
        self.bytes_read = self.requests = self.memory_hits = self.folder_hits = 0

    def take(self) -> Reads:
        """Return the counts since the last call, and subtract them."""
        counts = Reads(self.bytes_read, self.requests, self.memory_hits, self.folder_hits)
        # Subtracted, not set to 0: other threads may count at the same time.
        self.bytes_read -= counts.bytes_read
        self.requests -= counts.requests
        self.memory_hits -= counts.memory_hits
        self.folder_hits -= counts.folder_hits
        return counts


#: The counts of this process.
COUNTS = ReadCounts()
