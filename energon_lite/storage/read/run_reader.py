"""Reading from slow storage along the order: a run of neighbours is one request.

With ``max_samples_per_sequence`` the order permutes runs: sample ``i`` belongs to run ``i // length``, and is wanted
soon after or before the others of its run. So the first of them fetches the whole run, as one range of the shard (as
several if the samples are large), and the cache keeps it until the window has passed.
"""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Container, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon_lite.storage.files.read_counts import COUNTS
from energon_lite.storage.files.remote_files import is_remote
from energon_lite.storage.files.shard_store import LocalFile, Shard, ShardRange
from energon_lite.storage.read.range_cache import RangeCache, ReadAhead, shared_range_cache
from energon_lite.storage.read.range_stream import StreamedParts
from energon_lite.storage.read.webdataset import Runs, WebdatasetSource
from energon_lite.storage.tar.tar_scan import Int64

__all__ = ["LARGEST_READ", "RunReader", "Usage", "fetch_neighbours", "read_in_runs", "runs_that_fit"]

_log = logging.getLogger(__name__)

#: Bytes between two wanted samples that are cheaper to read than to skip by a second request.
_GAP = 1 << 18
#: Bytes of one request; for larger ones the latency of a request does not matter any more.
_LARGEST = 8 << 20
#: Bytes of memory of a process for runs of local files.
_BUFFER = 32 << 20
#: Runs whose ranges are remembered.
_RUNS = 1 << 12
#: Bytes of one read at most; each thread has a buffer of this size, whose pages are allocated when they are first used.
LARGEST_READ = 4 << 20
#: Bytes that may be read in runs for each wanted sample; beyond that, a system call for each sample is cheaper.
_WORTH = 12 << 10


class RunReader:
    """Fetcher of the samples of one source in runs, through a cache.

    Args:
        source: has ``read_ahead``, and the length of its ``runs``. With length 1 each sample is a request of its own,
            and those of a job are sent at the same time.
        parts: names of the wanted parts; None: all.
        streamed: parts that are not fetched.
    """

    def __init__(self, source: WebdatasetSource, parts: Container[str] | None, streamed: StreamedParts | None = None):
        self.settings = source.read_ahead or ReadAhead()
        self._source = source
        self._parts = parts
        self._streamed = streamed
        self._length = source.runs.length if source.runs else 1
        #: By number of the run: the ranges of each of its samples.
        self._runs: dict[int, list[list[ShardRange]]] = {}

    @cached_property
    def cache(self) -> RangeCache:
        """The range cache of this process."""
        return shared_range_cache(self.settings)

    def ranges(self, index: int) -> list[ShardRange]:
        """Return the ranges to request for the parts of a sample."""
        number, place = divmod(index, self._length)
        run = self._runs.get(number)
        if run is None:
            self._make_room(1)
            first = number * self._length
            run = self._runs[number] = self._ranges_of_run(range(first, min(first + self._length, len(self._source))))
        return run[place]

    def unknown(self, indices: Iterable[int]) -> list[int]:
        """Return the samples whose ranges are unknown and can be learned; none if samples are read in runs."""
        return [index for index in indices if index not in self._runs] if self._length == 1 else []

    def learn(self, indices: Sequence[int], shards: Sequence[Shard], starts: Int64, stops: Int64) -> None:
        """Store the ranges of many samples at once, of those that are one request each.

        Args:
            indices: numbers of ``n`` samples.
            shards: the shard of each.
            starts, stops: ``[n, parts]``, offsets of the wanted parts in bytes.
        """
        self._make_room(len(indices))
        begins, ends = starts.min(axis=1), stops.max(axis=1)
        is_one = ((starts[:, 1:] - stops[:, :-1]) <= _GAP).all(axis=1) & (ends - begins <= _LARGEST) & (ends > begins)
        for row in zip(indices, shards, begins.tolist(), (ends - begins).tolist(), is_one.tolist(), strict=True):
            index, shard, begin, size, is_alone = row
            if is_alone:
                self._runs[index] = [[ShardRange(shard, begin, size)]]

    def spans(self, indices: Sequence[int]) -> list[tuple[int, memoryview]] | None:
        """Return offset and bytes of the one range of each sample; None if not every sample has exactly one.

        Raises:
            MissingShardError, ShardChangedError, DatasetError: the storage failed, or the shard changed.
        """
        if self._length > 1:
            return None
        ranges = [self.ranges(index) for index in indices]
        if any(len(spans) != 1 for spans in ranges):
            return None
        get = self.cache.get
        return [(spans[0].offset, get(spans[0])) for spans in ranges]

    def _make_room(self, wanted: int) -> None:
        while self._runs and len(self._runs) + wanted > _RUNS:
            self._runs.pop(next(iter(self._runs)))

    def fetch(self, index: int, offset: int, size: int) -> bytes:
        """Return ``size`` bytes at ``offset`` of the shard of sample ``index``, cut out of a requested range.

        Raises:
            MissingShardError, ShardChangedError, DatasetError: the storage failed, or the shard changed.
        """
        if not size:
            return b""
        for span in self.ranges(index):
            start = offset - span.offset
            if start >= 0 and start + size <= span.size:
                return bytes(self.cache.get(span)[start : start + size])
        raise IndexError(f"sample {index} has no part of {size} bytes at {offset}")

    def _ranges_of_run(self, indices: Sequence[int]) -> list[list[ShardRange]]:
        """For each sample the ranges that hold its parts; neighbours share ranges."""
        ranges_of = [list[ShardRange]() for _ in indices]
        places: dict[Shard, list[tuple[int, int, int]]] = {}  # offset, size, number of the sample
        for number, index in enumerate(indices):
            _, _, names, ranges = self._source.choice.wanted(index, self._parts)
            for name, (shard, offset, size) in zip(names, ranges, strict=True):
                if size and not (self._streamed is not None and self._streamed.takes(name, size)):
                    places.setdefault(shard, []).append((offset, size, number))
        for shard, inside in places.items():
            for group in _neighbours(sorted(inside)):
                start, stop = group[0][0], max(offset + size for offset, size, _ in group)
                for number in dict.fromkeys(number for _, _, number in group):
                    ranges_of[number].append(ShardRange(shard, start, stop - start))
        return ranges_of


def _neighbours(ranges: Sequence[tuple[int, int, int]]) -> Iterator[list[tuple[int, int, int]]]:
    """Group ascending ranges (offset, size, number of the sample) of one shard; each group becomes one request."""
    group = [*ranges[:1]]
    for span in ranges[1:]:
        if span[0] - group[-1][0] - group[-1][1] > _GAP or span[0] + span[1] - group[0][0] > _LARGEST:
            yield group
            group = []
        group.append(span)
    yield group


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
    local = [source for source in sources if settings is None and not is_remote(source.path)]
    runs = Runs(length, mixed)
    fits = runs_that_fit(runs, [len(source) for source in local], [source.mean_bytes for source in local])
    for source in local:
        source.read_ahead = None
        source.runs = runs if fits else None
    chosen = [source for source in sources if settings is not None or is_remote(source.path)]
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
