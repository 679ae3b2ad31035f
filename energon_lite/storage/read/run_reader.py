"""Reading from slow storage along the order: a run of neighbours is one request.

With ``max_samples_per_sequence`` the order permutes runs: sample ``i`` belongs to run ``i // length``, and is wanted
soon after or before the others of its run. So the first of them brings all of them, as one range of the shard (as
several if they are large), and the cache keeps it while the window is walked through.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon_lite.storage.files.remote_files import is_remote
from energon_lite.storage.files.shard_store import Shard, ShardRange
from energon_lite.storage.read.range_cache import RangeCache, ReadAhead, shared_range_cache
from energon_lite.storage.read.range_stream import StreamedParts
from energon_lite.storage.read.run_buffer import Runs
from energon_lite.storage.read.webdataset import WebdatasetSource
from energon_lite.storage.tar.tar_scan import Int64

__all__ = ["RunReader", "read_in_runs", "runs_that_fit"]

_log = logging.getLogger(__name__)

#: Bytes between two wanted samples that are rather read than asked for in a request of their own.
_GAP = 1 << 18
#: Bytes of one request; for larger ones the delay of a request does not matter any more.
_LARGEST = 8 << 20
#: Memory of a process for runs of local files.
_BUFFER = 32 << 20
#: Runs whose ranges are remembered.
_RUNS = 1 << 12


class RunReader:
    """Fetches the samples of one source in runs, through a cache.

    Args:
        source: has ``read_ahead``, and the length of its ``runs``; 1: each sample is a request of its own, and a job's
            are made at the same time.
        parts: names of the wanted parts; None: all.
        streamed: parts that are not fetched.
    """

    def __init__(self, source: WebdatasetSource, parts: Container[str] | None, streamed: StreamedParts | None = None):
        self.settings = source.read_ahead or ReadAhead()
        self._source, self._parts, self._streamed = source, parts, streamed
        self._length = source.runs.length if source.runs else 1
        #: By run: the ranges of each of its samples.
        self._runs: dict[int, list[list[ShardRange]]] = {}

    @cached_property
    def cache(self) -> RangeCache:
        """The cache of this process."""
        return shared_range_cache(self.settings)

    def ranges(self, index: int) -> list[ShardRange]:
        """The ranges to be requested that the parts of a sample are in."""
        number, place = divmod(index, self._length)
        run = self._runs.get(number)
        if run is None:
            self._make_room(1)
            first = number * self._length
            run = self._runs[number] = self._ranges_of_run(range(first, min(first + self._length, len(self._source))))
        return run[place]

    def unknown(self, indices: Iterable[int]) -> list[int]:
        """Those samples whose ranges are not known yet and may be learned; none if they are read in runs."""
        return [index for index in indices if index not in self._runs] if self._length == 1 else []

    def learn(self, indices: Sequence[int], shards: Sequence[Shard], starts: Int64, stops: Int64) -> None:
        """The ranges of many samples at once, as far as each is one request.

        Args:
            indices: of ``n`` samples.
            shards: of each.
            starts, stops: ``[n, parts]``, offsets of the wanted parts.
        """
        self._make_room(len(indices))
        begins, ends = starts.min(axis=1), stops.max(axis=1)
        is_one = ((starts[:, 1:] - stops[:, :-1]) <= _GAP).all(axis=1) & (ends - begins <= _LARGEST) & (ends > begins)
        for row in zip(indices, shards, begins.tolist(), (ends - begins).tolist(), is_one.tolist(), strict=True):
            index, shard, begin, size, is_alone = row
            if is_alone:
                self._runs[index] = [[ShardRange(shard, begin, size)]]

    def spans(self, indices: Sequence[int]) -> list[tuple[int, memoryview]] | None:
        """Offset and bytes of the one range of each sample; None: they have none each for itself.

        Raises:
            MissingShardError, ShardChangedError, DatasetError: the storage failed, or the shard changed.
        """
        if self._length > 1:
            return None
        ranges = [self.ranges(index) for index in indices]
        if any(len(some) != 1 for some in ranges):
            return None
        get = self.cache.get
        return [(some[0].offset, get(some[0])) for some in ranges]

    def _make_room(self, wanted: int) -> None:
        while self._runs and len(self._runs) + wanted > _RUNS:
            self._runs.pop(next(iter(self._runs)))

    def fetch(self, index: int, offset: int, size: int) -> bytes:
        """The bytes of sample ``index`` at ``offset`` of its shard, cut out of a range that is requested.

        Raises:
            MissingShardError, ShardChangedError, DatasetError: the storage failed, or the shard changed.
        """
        if not size:
            return b""
        for one in self.ranges(index):
            start = offset - one.offset
            if start >= 0 and start + size <= one.size:
                return bytes(self.cache.get(one)[start : start + size])
        raise IndexError(f"sample {index} has no part of {size} bytes at {offset}")

    def _ranges_of_run(self, indices: Sequence[int]) -> list[list[ShardRange]]:
        """For each sample the ranges that its parts are in; neighbours share theirs."""
        found = [list[ShardRange]() for _ in indices]
        places: dict[Shard, list[tuple[int, int, int]]] = {}  # offset, size, which sample
        for number, index in enumerate(indices):
            _, _, names, ranges = self._source.choice.wanted(index, self._parts)
            for name, (shard, offset, size) in zip(names, ranges, strict=True):
                if size and not (self._streamed is not None and self._streamed.takes(name, size)):
                    places.setdefault(shard, []).append((offset, size, number))
        for shard, inside in places.items():
            for group in _neighbours(sorted(inside)):
                start, stop = group[0][0], max(offset + size for offset, size, _ in group)
                for number in dict.fromkeys(number for _, _, number in group):
                    found[number].append(ShardRange(shard, start, stop - start))
        return found


def _neighbours(ranges: Sequence[tuple[int, int, int]]) -> Iterator[list[tuple[int, int, int]]]:
    """Groups of ascending ranges (offset, size, which sample) of one shard, each to be one request."""
    group = [*ranges[:1]]
    for one in ranges[1:]:
        if one[0] - group[-1][0] - group[-1][1] > _GAP or one[0] + one[1] - group[0][0] > _LARGEST:
            yield group
            group = []
        group.append(one)
    yield group


def runs_that_fit(runs: Runs, lengths: Sequence[int] | Int64, mean_bytes: Sequence[float] | NDArray[Any]) -> bool:
    """Whether there are runs, and the memory of a process holds those of local data sets.

    Args:
        lengths: samples of each data set.
        mean_bytes: of a sample of each.
    """
    samples = np.minimum(np.asarray(lengths, dtype=np.int64), runs.kept * runs.length)
    return runs.length > 1 and float((samples * np.asarray(mean_bytes, dtype=np.float64)).sum()) <= _BUFFER


def read_in_runs(
    sources: Sequence[WebdatasetSource], settings: ReadAhead | None, *, run: int | None, window: int | None
) -> None:
    """Choose how sources are read: remote ones, and local ones if ``settings`` are given, with read-ahead through a
    cache; other local ones in runs through memory that is reused, if that memory holds their windows.

    Args:
        sources: all leaves of a data set.
        run: ``max_samples_per_sequence``.
        window: ``shuffle_buffer_size``: so many samples of each leaf have to be kept, or runs are fetched again and
            again. If they do not fit, samples are fetched one by one.
    """
    length, mixed = run or 1, window or 0
    local = [source for source in sources if settings is None and not is_remote(source.path)]
    runs = Runs(length, mixed)
    fits = runs_that_fit(runs, [len(source) for source in local], [source.mean_bytes for source in local])
    for source in local:
        source.read_ahead, source.runs = None, runs if fits else None
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
        source.read_ahead, source.runs = settings, Runs(length)
