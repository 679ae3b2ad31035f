"""Reading from slow storage along the order: a run of neighbours is one request, kept in a cache of ranges.

The first sample of a run that is wanted fetches the whole run, as one range of the shard (as several if the samples are
large), and the cache keeps it until the window has passed. All missing ranges of a job are requested at the same time.
The cache is in memory, and optionally in a folder that all processes share: each range there is a file of a
:class:`~energon_lite.extras.remote.checked_folder.CheckedFolder`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

from energon_lite.documents.paths import is_url
from energon_lite.errors import EnergonLiteError
from energon_lite.extras.remote.checked_folder import CheckedFolder
from energon_lite.extras.remote.fetches import Fetch, Fetches
from energon_lite.extras.remote.remote_files import RemoteFile, explained, read_range_in_loop, reads_in_loop
from energon_lite.storage.files.atomic_file import only_one
from energon_lite.storage.files.shard_store import (
    COUNTS,
    Shard,
    ShardRange,
    ShardStore,
    changed_shard,
    drop_oldest,
    shared_store,
    storage_error,
)
from energon_lite.storage.read.ranges import ReadAhead, StreamedParts
from energon_lite.storage.read.webdataset import WebdatasetSource
from energon_lite.storage.tar_headers import BLOCK

_log = logging.getLogger(__name__)

#: Lock files in a cache folder; the name of a range decides which of them guards it.
_LOCKS = 256
#: Seconds to wait for another process that fetches a range; after that this process fetches it as well.
_PATIENCE = 60.0


class RangeCache:
    """Cache of ranges by their place in a shard, for one thread.

    Args:
        settings: see :class:`ReadAhead`.
        store: the store that ranges are read with.
    """

    def __init__(self, settings: ReadAhead, store: ShardStore | None = None):
        self.settings = settings
        self._store = shared_store() if store is None else store
        #: In order of use: the least recently used range comes first.
        self._kept: dict[ShardRange, memoryview] = {}
        self._bytes = 0
        #: Ranges of the current job; they stay, however small the memory limit is.
        self._held: dict[ShardRange, memoryview] = {}
        self._failed: dict[ShardRange, BaseException] = {}
        #: Requests that have not been answered yet.
        self._coming: dict[ShardRange, Fetch] = {}
        self._process = os.getpid()
        self._requests = Fetches(
            self._read, settings.requests, loop_of=_loop_of, read_in_loop=self._read_in_loop, is_hedged=settings.hedge
        )
        self._fetches = self._requests
        self._folder: CheckedFolder | None = None
        self._told = False
        if settings.folder is not None:
            self._folder = CheckedFolder(settings.folder, settings.folder_bytes, option="read_ahead")
            self._fetches = Fetches(self._from_folder, settings.requests, is_hedged=False)

    def prefetch(self, ranges: Iterable[ShardRange]) -> None:
        """Start to fetch the ranges that will be loaded next, as far as there is room for them. Does not wait."""
        self._after_fork()
        room = self.settings.memory_bytes // 2 - sum(span.size for span in self._coming)
        wanted: dict[ShardRange, None] = {}
        for span in ranges:
            if span not in wanted and span not in self._coming and span not in self._kept and span not in self._held:
                room -= span.size
                if room < 0:
                    break
                wanted[span] = None
        self._start([*wanted])

    def load(self, ranges: Iterable[ShardRange]) -> None:
        """Fetch these ranges and hold them until the next call. A failed range raises in :meth:`get`."""
        self._after_fork()
        data_of = {span: self._held.get(span) or self._kept.get(span) for span in ranges}
        missing = [span for span, data in data_of.items() if data is None]
        self._pass_over(missing)
        COUNTS.memory_hits += len(data_of) - len(missing)
        self._start([span for span in missing if span not in self._coming])
        self._failed = {}
        for fetch in [self._coming[span] for span in missing]:
            data_of[fetch.one] = self._take(fetch)
        self._held = {span: data for span, data in data_of.items() if data is not None}
        for span, data in self._held.items():
            self._keep(span, data)

    def get(self, one: ShardRange) -> memoryview:
        """Return the bytes of a range.

        Raises:
            MissingShardError, ShardChangedError, DatasetError: as :meth:`ShardStore.read`.
        """
        data = self._held.get(one) or self._kept.get(one)
        if data is None and one not in self._failed:
            self._after_fork()
            if one not in self._coming:
                self._start([one])
            data = self._take(self._coming[one])
        if data is None:
            path, identity = one.shard
            error = self._failed.pop(one)
            raise explained(error, path, identity.size) if is_url(path) else error
        return data

    def _after_fork(self) -> None:
        if self._process != os.getpid():  # requests are answered in the process that sent them
            self._process = os.getpid()
            self._coming = {}

    def _start(self, ranges: Sequence[ShardRange]) -> None:
        self._coming.update(zip(ranges, self._fetches.start(ranges), strict=True))

    def _pass_over(self, ranges: Collection[ShardRange]) -> None:
        """Count what was requested before these ranges, and is not among them, as used: its loop may have been left."""
        asked = [*self._coming]
        first = next((place for place, span in enumerate(asked) if span in ranges), 0)
        for fetch in [self._coming[span] for span in asked[:first]]:
            if fetch.done():
                self._take(fetch)

    def _take(self, fetch: Fetch) -> memoryview | None:
        """Wait for the bytes of a fetch, keep and return them; its error is kept for :meth:`get`."""
        error = fetch.exception()
        self._coming.pop(fetch.one, None)
        if error is not None:
            self._failed[fetch.one] = error
            return None
        data = memoryview(fetch.result())
        self._keep(fetch.one, data)
        return data

    def _keep(self, one: ShardRange, data: memoryview) -> None:
        if self._kept.pop(one, None) is None:
            self._bytes += data.nbytes
        self._kept[one] = data
        while self._bytes > self.settings.memory_bytes and len(self._kept) > 1:
            self._bytes -= self._kept.pop(next(iter(self._kept))).nbytes

    def _from_folder(self, one: ShardRange) -> memoryview:
        assert self._folder is not None
        path, identity = one.shard
        if is_url(path) and not identity.version:  # the folder may have a range of an earlier object
            return memoryview(self._from_store(one))
        key = repr(tuple(one)).encode("utf-8", "surrogateescape")
        file = self._folder.place(key)
        data = self._folder.find(file)
        if data is not None:
            COUNTS.folder_hits += 1
            return data
        try:
            # One process fetches, the others wait and read its file.
            place = os.path.join(self._folder.path, f"{int(os.path.basename(file)[:8], 16) % _LOCKS:03d}")
            with only_one(place, mode=0o600, patience=_PATIENCE):
                data = self._folder.find(file)
                if data is None:
                    fetched = self._from_store(one)
                    data = memoryview(fetched)
                    self._folder.write(file, fetched)
                return data
        except OSError as error:
            if isinstance(error, EnergonLiteError):
                raise
            if not self._told:
                self._told = True
                _log.warning("the cache folder %s cannot be used (%s); reading on without it", self._folder.path, error)
            return data if data is not None else memoryview(self._from_store(one))

    def _from_store(self, one: ShardRange) -> bytes:
        [fetch] = self._requests.start([one])
        return bytes(fetch.result())

    def _read(self, one: ShardRange) -> bytes:
        COUNTS.requests += 1
        return self._store.read(*one.shard, one.offset, one.size)

    async def _read_in_loop(self, one: ShardRange) -> bytes:
        """:meth:`ShardStore.read` of a range of an object, awaited in the event loop of its file system."""
        COUNTS.requests += 1
        (path, identity), offset, size = one
        try:
            if one.shard not in self._store:
                block = await read_range_in_loop(path, 0, min(BLOCK, identity.size), identity.version)
                self._store.keep(one.shard, RemoteFile(path, identity.size, identity.version), block)
            if offset + size > identity.size:
                raise changed_shard(path, offset + size, identity.size)
            data = await read_range_in_loop(path, offset, size, identity.version)
        except OSError as error:
            raise storage_error(path, error) from error
        COUNTS.bytes_read += size
        return data


def _loop_of(one: ShardRange) -> Any:
    path = one.shard[0]
    return reads_in_loop(path) if is_url(path) else None


_shared: dict[ReadAhead, RangeCache] = {}


def shared_range_cache(settings: ReadAhead) -> RangeCache:
    """Return the cache that all data sets of this process with these settings share."""
    cache = _shared.get(settings)
    return _shared.setdefault(settings, RangeCache(settings)) if cache is None else cache


#: Largest gap between two wanted samples, in bytes, that is cheaper to read than to skip by a second request.
_GAP = 1 << 18
#: Bytes of one request; for larger ones the latency of a request does not matter any more.
_LARGEST = 8 << 20
#: Most runs whose ranges are remembered.
_RUNS = 1 << 12


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
            drop_oldest(self._runs, _RUNS - 1)
            first = number * self._length
            run = self._runs[number] = self._ranges_of_run(range(first, min(first + self._length, len(self._source))))
        return run[place]

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
