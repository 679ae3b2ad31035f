"""The runs of the present windows, taken apart and in memory: the quickest way to many small samples.

A system call for each small sample costs more than its bytes. With runs and windows, the first sample of a run that is
wanted has the whole run read by one call, into memory that is used again and again and so stays in the processor's
cache, and at once cut into ``bytes``. What is handed out is forgotten here, so that a sample is in memory once.
Reading, instead of mapping the files, keeps read errors exceptions and the page cache out of the process's memory.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

__all__ = ["Row", "RunBuffer", "Runs", "Scratch", "ScratchReader", "Usage", "shelf_of_this_thread"]

#: A sample: the names of its parts, its key, the name of its shard, and the bytes of its parts.
Row = tuple[Any, ...]


#: Bytes that may be read in runs for each sample that is wanted; more cost more than a system call or two.
_WORTH = 12 << 10


class Runs(NamedTuple):
    """How the samples of a source are read in runs.

    Attributes:
        length: of a run, in samples.
        window: samples of the source that are mixed.
        memory: bytes of the shelf, which all sources of a thread share.
    """

    length: int
    window: int
    memory: int


class ScratchReader(Protocol):
    """A shard that can be read into memory that is there."""

    def read_into(self, memory: memoryview, offset: int) -> int:
        """Fill ``memory`` from ``offset`` on; returns how many bytes there were."""


class _Kept(NamedTuple):
    """What is known of a run on a shelf, besides its rows."""

    size: int
    usage: Usage


class Usage:
    """Whether it pays to read an owner's runs as a whole. Other processes may want most of their samples.

    Args:
        runs: how they are read.
        mean_bytes: of a sample.
    """

    def __init__(self, runs: Runs, mean_bytes: float):
        # The first windows may be half over when a run is resumed.
        self._enough = 4 * (runs.window + runs.length)
        self._mean_bytes = mean_bytes
        self._read = self._wanted = 0

    def count(self, rows: Sequence[Row | None]) -> None:
        """Count the samples of a run that gives way."""
        self._read += len(rows)
        self._wanted += rows.count(None)

    @property
    def pays(self) -> bool:
        """So far."""
        return self._read < self._enough or self._read * self._mean_bytes <= self._wanted * _WORTH


class Scratch:
    """Memory that shards are read into, to be cut up at once.

    Args:
        size: bytes.
    """

    def __init__(self, size: int):
        self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._view = memoryview(self._memory)

    def __len__(self) -> int:
        return len(self._memory)

    def read(self, shard: ScratchReader, offset: int, size: int) -> mmap.mmap | None:
        """Memory that begins with ``size`` bytes of a shard, until the next read; None: there are not so many.

        Slices of it are ``bytes``.
        """
        done = 0
        while done < size:
            got = shard.read_into(self._view[done:size], offset + done)
            if not got:
                return None
            done += got
        return self._memory


class RunBuffer:
    """Runs of any number of owners; the oldest give way to new ones.

    Args:
        size: bytes of all runs together.

    Attributes:
        scratch: for reading runs; the largest that fits has an eighth of ``size``.
    """

    def __init__(self, size: int):
        self.size = size
        self.scratch = Scratch(max(mmap.PAGESIZE, size // 8))
        self._owners: dict[int, dict[int, list[Row | None]]] = {}
        #: By owner and number of the run; the oldest stands first.
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._total = 0

    def runs(self, owner: int) -> dict[int, list[Row | None]]:
        """The runs of an owner that are here, by number: the rows of their samples, None for those that were handed
        out. Who hands a row out, or gives it back, writes that down; nothing else is to be changed."""
        return self._owners.setdefault(owner, {})

    def put(self, owner: int, number: int, rows: list[Row | None], size: int, usage: Usage) -> None:
        """Keep a run that is not here yet.

        Args:
            size: bytes that were read for it.
            usage: is told when the run gives way.
        """
        while self._kept and self._total + size > self.size:
            self.drop(*next(iter(self._kept)))
        self.runs(owner)[number] = rows
        self._kept[owner, number] = _Kept(size, usage)
        self._total += size

    def drop(self, owner: int, number: int) -> None:
        """Forget a run that is here."""
        size, usage = self._kept.pop((owner, number))
        usage.count(self._owners[owner].pop(number))
        self._total -= size


_threads = threading.local()


def shelf_of_this_thread(size: int) -> RunBuffer:
    """The shelf that all sources read by this thread share; a larger one is made where more is asked for."""
    shelf: RunBuffer | None = getattr(_threads, "shelf", None)
    if shelf is None or shelf.size < size:
        shelf = _threads.shelf = RunBuffer(size)
    return shelf


def _forget() -> None:
    """In a forked child: what its parent has read will not be asked for there."""
    _threads.shelf = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
