"""Reading from slow storage along the order: a run of neighbours is one request.

The first sample of a run that is wanted fetches the whole run, as one range of the shard (as several if the samples are
large), and the cache keeps it until the window has passed.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from functools import cached_property

from energon_lite.extras.remote.range_cache import RangeCache, shared_range_cache
from energon_lite.storage.files.shard_store import Shard, ShardRange, drop_oldest
from energon_lite.storage.read.ranges import ReadAhead, StreamedParts
from energon_lite.storage.read.webdataset import WebdatasetSource
from energon_lite.storage.tar_members import Int64

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
        drop_oldest(self._runs, max(0, _RUNS - len(indices)))
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
