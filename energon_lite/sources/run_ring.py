"""The runs of the present windows, in memory: the quickest way to many small samples that lie near each other.

A system call for each small sample costs more than its bytes. With runs and windows, the first sample of a run that is
wanted has the whole run read by one call, into a ring of memory where the oldest runs give way to new ones; the others
are then slices. Reading into memory of our own, instead of mapping the files, keeps read errors exceptions, and keeps
the page cache out of the process's memory.
"""

from __future__ import annotations

import mmap
import os
import threading
from typing import Protocol

__all__ = ["RingReader", "RunRing", "ring_of_this_thread"]


class RingReader(Protocol):
    """A shard that can be read into memory that is there."""

    def read_into(self, memory: memoryview, offset: int) -> int:
        """Fill ``memory`` from ``offset`` on; returns how many bytes there were."""


class RunRing:
    """Pieces of shards, by any key, in one block of memory; the oldest pieces are overwritten.

    Args:
        size: bytes.

    Attributes:
        memory: slices of it are ``bytes``.
    """

    def __init__(self, size: int):
        self.memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._view = memoryview(self.memory)
        #: By key: where the piece begins in the memory, and its size; the oldest stands first.
        self._pieces: dict[object, tuple[int, int]] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self.memory)

    def find(self, key: object) -> int | None:
        """Where in the memory a piece begins; None: it is not there (any more)."""
        piece = self._pieces.get(key)
        return None if piece is None else piece[0]

    def load(self, key: object, shard: RingReader, offset: int, size: int) -> int | None:
        """Read a piece; returns where in the memory it begins, or None if it is larger than the ring or the file."""
        if size > len(self.memory):
            return None
        if self._next + size > len(self.memory):
            self._drop(self._next, len(self.memory))
            self._next = 0
        start, stop = self._next, self._next + size
        self._drop(start, stop)
        done = 0
        while done < size:
            got = shard.read_into(self._view[start + done : stop], offset + done)
            if not got:
                return None
            done += got
        self._pieces[key] = start, size
        self._next = stop
        return start

    def _drop(self, start: int, stop: int) -> None:
        """Forget the pieces in a part of the memory; they are the oldest ones."""
        for key, (begin, size) in list(self._pieces.items()):
            if begin >= stop or begin + size <= start:
                break
            del self._pieces[key]


_threads = threading.local()


def ring_of_this_thread(size: int) -> RunRing:
    """The ring that all sources read by this thread share; it grows to the largest ``size`` that is asked for."""
    ring: RunRing | None = getattr(_threads, "ring", None)
    if ring is None or _threads.process != os.getpid() or len(ring) < size:
        ring = _threads.ring = RunRing(size)
        _threads.process = os.getpid()
    return ring
