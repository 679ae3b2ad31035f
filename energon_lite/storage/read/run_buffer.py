"""Neighbours of a local shard, read by one call and cut up: the quickest way to many small samples.

A system call for each small sample costs more than its bytes. With runs and windows, the first sample of a run that is
wanted has the whole run read by one call, into memory that is used again and again and so stays in the processor's
cache, and at once cut into ``bytes``. Reading, instead of mapping the files, keeps read errors exceptions and the page
cache out of the process's memory.
"""

from __future__ import annotations

import mmap
import threading
from typing import NamedTuple, Protocol

from energon_lite.storage.files.read_counts import COUNTS
from energon_lite.storage.tar.tar_scan import Int64

__all__ = ["LARGEST", "Runs", "Usage", "fetch_neighbours"]

#: Bytes that are read by one call at most; each thread has memory for so many, which is real where it was used.
LARGEST = 4 << 20
#: Bytes that may be read in runs for each sample that is wanted; more cost more than a system call or two.
_WORTH = 12 << 10


class Runs(NamedTuple):
    """How the samples of a source are read in runs.

    Attributes:
        length: of a run, in samples.
        window: samples of the source that are mixed.
    """

    length: int
    window: int = 0

    @property
    def kept(self) -> int:
        """Runs that are kept: those of the present window, the ones that it cuts at either end, and as many more."""
        return self.window // self.length + 4


class Usage:
    """Whether it pays to read a source's runs as a whole. Other processes may want most of their samples.

    Args:
        runs: how they are read.
        mean_bytes: of a sample.

    Attributes:
        read, wanted: samples so far.
    """

    def __init__(self, runs: Runs, mean_bytes: float):
        # Runs of the present window are read already, and their samples not wanted yet. The first windows may be half
        # over when a run is resumed.
        self._ahead = runs.window + 2 * runs.length
        self._mean_bytes = mean_bytes
        self.read = self.wanted = 0

    @property
    def pays(self) -> bool:
        """So far."""
        return self.read < 4 * self._ahead or (self.read - self._ahead) * self._mean_bytes <= self.wanted * _WORTH


class ScratchReader(Protocol):
    """A shard that can be read into memory that is there."""

    def read_into(self, memory: memoryview, offset: int) -> int:
        """Fill ``memory`` from ``offset`` on; returns how many bytes there were."""


_threads = threading.local()


def fetch_neighbours(shard: ScratchReader, starts: Int64, stops: Int64) -> list[list[bytes]] | None:
    """Ranges of a shard, all read as one.

    Args:
        shard: an open file.
        starts, stops: ``[samples, parts]``, offsets; each sample lies behind the one before, and there are at most
            :data:`LARGEST` bytes from the first to the last.

    Returns:
        For each part the bytes of each sample; None: the shard is too short.
    """
    if not hasattr(_threads, "memory"):
        _threads.memory = mmap.mmap(-1, LARGEST, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory: mmap.mmap = _threads.memory
    if not starts.size:
        return []
    begin, view = min(starts[0].tolist()), memoryview(memory)
    done, size = 0, max(stops[-1].tolist()) - begin
    while done < size:
        got = shard.read_into(view[done:size], begin + done)
        if not got:
            return None
        done += got
    COUNTS.bytes_read += size
    return [
        [memory[low:high] for low, high in zip(lows, highs, strict=True)]
        for lows, highs in zip((starts - begin).T.tolist(), (stops - begin).T.tolist(), strict=True)
    ]
