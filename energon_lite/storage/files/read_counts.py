"""How much this process has read: bytes, requests, and what was found in caches."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["COUNTS", "ReadCounts", "Reads"]


class Reads(NamedTuple):
    """What was read.

    Attributes:
        bytes_read: of samples, from local files, from slow storage, or from a source of the user's.
        requests: to slow storage.
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
    """Counts up. One for a process, since threads read for each other; whoever takes what was counted has it alone.

    Attributes:
        bytes_read, requests, memory_hits, folder_hits: see :class:`Reads`; since the last time they were taken.
    """

    __slots__ = Reads._fields

    def __init__(self) -> None:
        self.bytes_read = self.requests = self.memory_hits = self.folder_hits = 0

    def take(self) -> Reads:
        """What was counted since the last time."""
        found = Reads(self.bytes_read, self.requests, self.memory_hits, self.folder_hits)
        # What another thread counts meanwhile stays.
        self.bytes_read -= found.bytes_read
        self.requests -= found.requests
        self.memory_hits -= found.memory_hits
        self.folder_hits -= found.folder_hits
        return found


#: Those of this process.
COUNTS = ReadCounts()
