"""Reading from slow storage along the order: a run of neighbours is one request.

With ``max_samples_per_sequence`` the order permutes runs: sample ``i`` belongs to run ``i // length``, and is wanted
soon after or before the others of its run. So the first of them brings all of them, as one range of the shard (as
several if they are large), and the cache keeps it while the window is walked through.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from energon_lite.storage.files.remote_files import is_remote
from energon_lite.storage.read.range_cache import ByteRange, RangeCache, ReadAhead, shared_range_cache
from energon_lite.storage.read.run_buffer import Runs

if TYPE_CHECKING:
    from energon_lite.storage.read.webdataset import WebdatasetSource

__all__ = ["RunReader", "fetch_samples", "read_in_runs"]

_log = logging.getLogger(__name__)

#: Bytes between two wanted samples that are rather read than asked for in a request of their own.
_GAP = 1 << 18
#: Bytes of one request; for larger ones the delay of a request does not matter any more.
_LARGEST = 8 << 20
#: Memory of a process for runs of local files.
_SHELF = 32 << 20
#: Runs whose ranges are remembered.
_RUNS = 1 << 12

Parts = Container[str] | None


class RunReader:
    """Fetches the samples of one source in runs, through a cache.

    Args:
        settings: of the cache, which all sources of a process share.
        length: samples in a run; 1: each sample is a request of its own, and a job's are made at the same time.
    """

    def __init__(self, settings: ReadAhead, length: int):
        self.settings, self.length = settings, max(1, length)
        self._parts: Parts = None
        #: By run: the ranges of each of its samples.
        self._runs: dict[int, list[tuple[ByteRange, ...]]] = {}

    @property
    def cache(self) -> RangeCache:
        """The cache of this process."""
        return shared_range_cache(self.settings)

    def ranges(self, source: WebdatasetSource, index: int, parts: Parts) -> tuple[ByteRange, ...]:
        """The ranges in which the parts of a sample are."""
        if parts != self._parts:
            self._runs.clear()
            self._parts = parts
        number, place = divmod(index, self.length)
        run = self._runs.get(number)
        if run is None:
            while len(self._runs) >= _RUNS:
                self._runs.pop(next(iter(self._runs)))
            first = number * self.length
            run = _ranges_of_run(source, range(first, min(first + self.length, len(source))), parts)
            self._runs[number] = run
        return run[place]

    def read(self, source: WebdatasetSource, index: int, parts: Parts, offset: int, size: int) -> bytes:
        """The part of sample ``index`` that has ``size`` bytes at ``offset`` of its shard.

        Raises:
            MissingShardError, ShardChangedError, DatasetError: the storage failed, or the shard changed.
        """
        if not size:
            return b""
        for one in self.ranges(source, index, parts):
            if one.start <= offset and offset + size <= one.stop:
                return bytes(self.cache.get(one)[offset - one.start : offset - one.start + size])
        raise IndexError(f"sample {index} has no part of {size} bytes at {offset}")

    def __getstate__(self) -> dict[str, object]:
        return {"settings": self.settings, "length": self.length}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def _ranges_of_run(source: WebdatasetSource, indices: Sequence[int], parts: Parts) -> list[tuple[ByteRange, ...]]:
    """For each sample the ranges that its parts are in; neighbours share theirs."""
    places: list[tuple[int, int, int, int]] = []  # shard, start, stop, which sample
    for number, index in enumerate(indices):
        shard, _, wanted = source.wanted(index, parts)
        places += [(shard, offset, offset + size, number) for offset, size, _ in wanted if size]
    found: list[list[ByteRange]] = [[] for _ in indices]
    for shard, inside in groupby(sorted(places), key=lambda place: place[0]):
        for group in _merged(list(inside)):
            one = ByteRange(*source.shard(shard), group[0][1], max(stop for _, _, stop, _ in group))
            for number in dict.fromkeys(number for _, _, _, number in group):
                found[number].append(one)
    return [tuple(ranges) for ranges in found]


def _merged(places: list[tuple[int, int, int, int]]) -> Iterable[list[tuple[int, int, int, int]]]:
    """Groups of neighbours, each to be one request."""
    group = places[:1]
    for place in places[1:]:
        if place[1] - group[-1][2] > _GAP or place[2] - group[0][1] > _LARGEST:
            yield group
            group = []
        group.append(place)
    yield group


def fetch_samples(samples: Iterable[tuple[WebdatasetSource, int, Parts]]) -> None:
    """Have the bytes of these samples at hand before they are read one by one: what is missing is requested at the
    same time. Does nothing for sources that are read directly. Never raises; the read itself does."""
    wanted: dict[ReadAhead, list[ByteRange]] = {}
    for source, index, parts in samples:
        reader = source.run_reader
        if reader is not None:
            wanted.setdefault(reader.settings, []).extend(reader.ranges(source, index, parts))
    for settings, ranges in wanted.items():
        shared_range_cache(settings).load(ranges)


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
    _through_shelf([source for source in sources if settings is None and not is_remote(source.path)], run, window)
    chosen = [source for source in sources if settings is not None or is_remote(source.path)]
    settings = settings or ReadAhead()
    length = run or 1
    kept = sum(min(len(source), (window or 0) + 2 * length) * source.mean_bytes for source in chosen)
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
        source.run_reader = RunReader(settings, length)


def _through_shelf(sources: Sequence[WebdatasetSource], run: int | None, window: int | None) -> None:
    length = run or 1
    # What is left of one window and all of the next one, and a run that is cut at either end.
    kept = sum(min(len(source), 2 * (window or 0) + 2 * length) * source.mean_bytes for source in sources)
    fits = length > 1 and kept <= _SHELF
    for source in sources:
        source.runs = Runs(length, window or 0, int(kept)) if fits else None
