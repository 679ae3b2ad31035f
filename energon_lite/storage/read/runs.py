"""Runs: neighbours of the order, which are read together.

With ``max_samples_per_sequence`` the order permutes runs: sample ``i`` belongs to run ``i // length``, and is wanted
soon after or before the others of its run. So the first of them brings the whole run.
"""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Container, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from energon_lite.documents.paths import is_url
from energon_lite.storage.files.byte_ranges import remote_guest
from energon_lite.storage.files.shard_store import COUNTS, LocalFile, ShardRange
from energon_lite.storage.read.ranges import ReadAhead, StreamedParts
from energon_lite.storage.read.webdataset import Runs, WebdatasetSource
from energon_lite.storage.tar_members import Int64

_log = logging.getLogger(__name__)

#: Bytes of memory of a process for runs of local files.
_BUFFER = 32 << 20
#: Most bytes of one read; each thread has a buffer of this size, whose pages are allocated when they are first used.
LARGEST_READ = 4 << 20
#: Bytes that may be read in runs for each wanted sample; beyond that, a system call for each sample is cheaper.
_WORTH = 12 << 10
#: Entry of the guest that reads ahead; its task, the option, and the ways without it, for messages.
_GUEST = ("reader_ahead", "shards are read ahead", "read_ahead", "leave it out, or copy the data set to a local disk")


class Ahead(Protocol):
    """Fetcher of the samples of one source that requests them in advance, through a cache.

    ``(source, parts, streamed) -> Ahead`` is the entry ``reader_ahead`` of the table ``STORAGE_GUESTS``: ``parts`` are
    the names of the wanted parts (None: all), and ``streamed`` the parts that are not fetched.
    """

    @property
    def settings(self) -> ReadAhead: ...

    def ranges(self, index: int) -> list[ShardRange]:
        """Return the ranges to request for the parts of a sample."""

    def fetch(self, index: int, offset: int, size: int) -> bytes:
        """Return ``size`` bytes at ``offset`` of the shard of sample ``index``, cut out of a requested range.

        Raises:
            MissingShardError, ShardChangedError, DatasetError: the storage failed, or the shard changed.
        """


def reader_ahead(
    source: WebdatasetSource, parts: Container[str] | None, streamed: StreamedParts | None
) -> Ahead | None:
    """Return the reader-ahead of a source; None: the source is read directly.

    Raises:
        UsageError: the guest is not installed.
    """
    if source.read_ahead is None:
        return None
    return remote_guest(*_GUEST)(source, parts, streamed)


def runs_that_fit(runs: Runs, lengths: Sequence[int] | Int64, mean_bytes: Sequence[float] | NDArray[Any]) -> bool:
    """Return True if there are runs, and the memory of a process can hold those of local data sets.

    Args:
        lengths: number of samples of each data set.
        mean_bytes: bytes of a sample of each on average.
    """
    samples = np.minimum(np.asarray(lengths, dtype=np.int64), runs.kept * runs.length)
    return runs.length > 1 and float((samples * np.asarray(mean_bytes, dtype=np.float64)).sum()) <= _BUFFER


def read_in_runs(
    sources: Sequence[WebdatasetSource], settings: ReadAhead | None, *, run: int | None, window: int | None
) -> None:
    """Set the way that sources are read: remote ones, and local ones if ``settings`` are given, with read-ahead through
    a cache; other local ones in runs through reused memory, if that memory holds their windows.

    Args:
        sources: all leaves of a data set.
        run: ``max_samples_per_sequence``.
        window: ``shuffle_buffer_size``: this many samples of each leaf have to be kept, or runs are fetched repeatedly.
            If they do not fit into memory, samples are fetched one by one.
    """
    length, mixed = run or 1, window or 0
    local = [source for source in sources if settings is None and not is_url(source.path)]
    runs = Runs(length, mixed)
    fits = runs_that_fit(runs, [len(source) for source in local], [source.mean_bytes for source in local])
    for source in local:
        source.read_ahead = None
        source.runs = runs if fits else None
    chosen = [source for source in sources if settings is not None or is_url(source.path)]
    if settings is not None:
        remote_guest(*_GUEST)  # before workers are started
    settings = settings or ReadAhead()
    kept = sum(min(len(source), mixed + 2 * length) * source.mean_bytes for source in chosen)
    if length > 1 and kept > settings.memory_bytes and settings.folder is None:
        _log.warning(
            "the windows of %d data sets take %.0f MiB, but read_ahead keeps %.0f MiB: samples are fetched one by one "
            "(raise memory_bytes of read_ahead, give it a folder, or make shuffle_buffer_size smaller)",
            len(chosen),
            kept / 2**20,
            settings.memory_bytes / 2**20,
        )
        length = 1
    for source in chosen:
        source.read_ahead = settings
        source.runs = Runs(length)


# -- runs of a local shard ------------------------------------------------------------------------------------------
#
# Read by one call and cut up: the fastest way to many small samples. A system call for each small sample costs more
# than its bytes. With runs and windows, the first sample of a run that is wanted causes one read of the whole run, into
# memory that is reused (and therefore stays in the processor's cache). The run is cut into ``bytes`` at once. Files are
# read instead of mapped, so read errors stay exceptions, and the page cache does not count as memory of the process.


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


_threads = threading.local()


def fetch_neighbours(shard: LocalFile, starts: Int64, stops: Int64) -> list[list[bytes]] | None:
    """Read ranges of a shard with one read.

    Args:
        shard: an open file.
        starts, stops: ``[samples, parts]``, offsets; each sample lies behind the one before, and there are at most
            :data:`LARGEST_READ` bytes from the first to the last.

    Returns:
        For each part the bytes of each sample; None: the shard is too short.
    """
    if not hasattr(_threads, "memory"):
        _threads.memory = mmap.mmap(-1, LARGEST_READ, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
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
