"""Runs of neighbouring samples in a local shard, read by one call and cut up: the fastest way to many small samples.

A system call for each small sample costs more than its bytes. With runs and windows, the first sample of a run that is
wanted causes one read of the whole run, into memory that is reused (and therefore stays in the processor's cache). The
run is cut into ``bytes`` at once. Files are read instead of mapped, so read errors stay exceptions, and the page cache
does not count as memory of the process.
"""

from __future__ import annotations

import mmap
import threading
from typing import NamedTuple, Protocol

from energon_lite.storage.files.read_counts import COUNTS
from energon_lite.storage.tar.tar_scan import Int64

__all__ = ["LARGEST", "Runs", "Usage", "fetch_neighbours"]

#: Bytes of one read at most; each thread has a buffer of this size, whose pages are allocated when they are first used.
LARGEST = 4 << 20
#: Bytes that may be read in runs for each wanted sample; beyond that, a system call for each sample is cheaper.
_WORTH = 12 << 10


class Runs(NamedTuple):
    """Length and window of the runs in which the samples of a source are read.

    Attributes:
        length: samples in a run.
        window: samples of the source that are mixed with each other.
    """

    length: int
    window: int = 0

    @property
    def kept(self) -> int:
        """Runs to keep: those of the current window, the ones that it cuts at either end, and two of margin."""
        return self.window // self.length + 4


class Usage:
    """Counts of read and wanted samples, which decide if reading a source's runs as a whole pays. It does not pay when
    other processes want most of their samples.

    Args:
        runs: length and window of the runs.
        mean_bytes: bytes of a sample on average.

    Attributes:
        read, wanted: samples read and samples wanted up to now.
    """

    def __init__(self, runs: Runs, mean_bytes: float):
        # Runs of the current window are read already, while their samples are not wanted yet. The first windows may be
        # half over when a run is resumed.
        self._ahead = runs.window + 2 * runs.length
        self._mean_bytes = mean_bytes
        self.read = self.wanted = 0

    @property
    def pays(self) -> bool:
        """True while the bytes that were read stay below the limit for each wanted sample."""
        return self.read < 4 * self._ahead or (self.read - self._ahead) * self._mean_bytes <= self.wanted * _WORTH


class ScratchReader(Protocol):
    """A shard that can be read into existing memory."""

    def read_into(self, memory: memoryview, offset: int) -> int:
        """Fill ``memory`` with the bytes from ``offset`` on; return the number of bytes that were read."""


_threads = threading.local()


def fetch_neighbours(shard: ScratchReader, starts: Int64, stops: Int64) -> list[list[bytes]] | None:
    """Read ranges of a shard with one read.

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
