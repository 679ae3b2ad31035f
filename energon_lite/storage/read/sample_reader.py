"""Reader of the samples of one source: turns their numbers into bytes.

Many samples are looked up together, in a few numpy calls, and returned by columns: all keys, all bytes of one part, all
bytes of the next. That requires samples with the same parts in the same order, as nearly all data sets have; other
samples are read one by one. Below that, bytes are fetched by ranges of shards (shard, offset, size), in one of three
ways:

* by a positioned read for each (:meth:`ShardStore.fetch`),
* from a run of neighbours that is read by one call, and cut up (:func:`fetch_neighbours`), or
* from slow storage, out of ranges that were requested ahead, many at the same time, and kept
  (:class:`~energon_lite.storage.read.runs.Ahead`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise, repeat
from typing import Any, NamedTuple, Protocol

import numpy as np

from energon_lite.errors import EnergonLiteError
from energon_lite.samples import SourceInfo
from energon_lite.storage.files.shard_store import LocalFile, Range, Shard, ShardRange, drop_oldest
from energon_lite.storage.read.opened_source import OpenedSource
from energon_lite.storage.read.ranges import PartRange, ReadAhead, StreamedParts, range_cache
from energon_lite.storage.read.runs import LARGEST_READ, Ahead, Usage, fetch_neighbours, reader_ahead
from energon_lite.storage.read.webdataset import Columns, RawSample, Runs, WebdatasetSource
from energon_lite.storage.tar_members import Int64

#: A sample: the names of its parts, its key, the name of its shard, and the bytes of its parts.
Row = tuple[Any, ...]

#: Bytes between wanted parts of a sample that are read rather than skipped: what a disk streams during a seek.
_GAP = 1 << 20
#: Least share of a run, 1/8, with which it is read as a whole; headers make up most of a shard of tiny samples.
_SPARSE = 8
#: Most runs that are remembered as unfit to be read as a whole.
_REMEMBERED = 1 << 12
#: Largest key, in bytes on average, with which keys are looked up together.
_LONGEST_KEY = 256


class _Found(NamedTuple):
    """Places of ``n`` samples in their shards, with ``p`` wanted parts each.

    Attributes:
        keys: ``n`` keys.
        names: ``p`` names of the parts, in the order of the tar.
        starts, stops: ``[n, p]``, offsets in bytes.
        wanted: positions of these parts among all parts of a sample.
    """

    keys: list[str]
    names: tuple[str, ...]
    starts: Int64
    stops: Int64
    wanted: list[int] | slice


class SampleReader:
    """Reader of the samples of one source.

    Args:
        source: the samples; its ``runs`` and ``read_ahead`` decide the way of reading.
        parts: names of the wanted parts; None: all. Names that a sample does not have are ignored.
        streamed: parts that are not read: a :class:`~energon_lite.storage.read.ranges.PartRange` takes their
            place.

    Attributes:
        ahead: fetches ranges from slow storage in advance; None: the source is read directly.

    Example:
        >>> reader = SampleReader(source, frozenset({"jpg", "txt"}))
        >>> sample = reader.sample(len(source) - 1)
        >>> sample.key, sample.parts["txt"]
        ('000412', b'a red bicycle')
        >>> reader.read([7, 412]).parts["txt"]
        [b'two cats', b'a red bicycle']
    """

    def __init__(
        self, source: WebdatasetSource, parts: frozenset[str] | None = None, streamed: StreamedParts | None = None
    ):
        self.source = source
        self.parts = parts
        self.streamed = streamed
        self.ahead = reader_ahead(source, parts, streamed)
        self._layouts: dict[tuple[int, ...], tuple[list[int] | slice, tuple[str, ...]] | None] = {}
        self._runs = source.runs if self.ahead is None else None
        if self._runs is not None:
            self._usage = Usage(self._runs, source.mean_bytes)
        #: The samples of runs, by number of the run; the oldest run comes first.
        self._kept: dict[int, list[Row]] = {}
        self._unfit: dict[int, None] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return SampleReader, (self.source, self.parts, self.streamed)

    def read(self, indices: Sequence[int]) -> Columns | None:
        """Read the samples ``indices`` (at least one) by columns; None: they do not all have the same parts.

        Raises:
            MissingShardError, ShardChangedError, DatasetError: a shard changed after opening, or the storage failed.
        """
        rows = None if self._runs is None else self._buffered(self._runs, indices)
        if rows is not None:
            columns = zip(*rows, strict=False)
            names = next(columns)
            if names.count(names[0]) != len(names):
                return None
            keys, shards, *parts = map(list, columns)
            return Columns(keys, shards, names[0], dict(zip(names[0], parts, strict=True)))
        choice = self.source.choice
        places, samples = choice.locate_many(np.array(indices, dtype=np.int64))
        table = self._look_up(samples)
        if table is None:
            return None
        shard_names = [choice.shard_names[place] for place in places.tolist()]
        data = self._fetch_columns(indices, [choice.shards[place] for place in places.tolist()], table)
        choice.verify(samples, table.wanted, table.names, data)
        return Columns(table.keys, shard_names, table.names, dict(zip(table.names, data, strict=True)))

    def sample(self, index: int) -> RawSample:
        """Read one sample by one positioned read (several if more than 1 MiB of unwanted bytes lie between its parts).

        Raises:
            IndexError: there is no such sample.
            MissingShardError, ShardChangedError, DatasetError: as :meth:`read`.
        """
        rows = None if self._runs is None else self._buffered(self._runs, (index,))
        if rows is not None:
            names, key, shard_name, *data = rows[0]
        else:
            shard_name, key, names, ranges = self.source.choice.wanted(index, self.parts)
            data = self._fetch(index, ranges) if self.streamed is None else self._fetch_some(index, names, ranges)
            self._verify_one(index, names, data)
        files = tuple([f"{key}.{name}" for name in names])
        info = SourceInfo(dataset_path=self.source.path, index=index, shard_name=shard_name, file_names=files)
        return RawSample(key, dict(zip(names, data, strict=True)), info)

    def peek(self, index: int, part: str, size: int) -> bytes:
        """Read at most ``size`` bytes from the start of a wanted part, which the sample has."""
        *_, ranges = self.source.choice.wanted(index, {part})
        shard, offset, length = ranges[-1]  # of two parts with one name the last counts, as in sample()
        return self._fetch(index, [(shard, offset, min(size, length))])[0]

    def ranges(self, indices: Sequence[int]) -> list[ShardRange]:
        """Return the ranges that these samples request from slow storage."""
        ahead = self.ahead
        return [] if ahead is None else [span for index in indices for span in ahead.ranges(index)]

    # -- one by one -----------------------------------------------------------------------------------------------

    def _fetch(self, index: int, ranges: list[Range]) -> list[bytes]:
        """The bytes of parts of one sample."""
        if self.ahead is not None:
            return [self.ahead.fetch(index, offset, size) for _, offset, size in ranges]
        fetch = self.source.store.fetch
        if len(ranges) < 2:
            return fetch(ranges)
        shard, start, _ = ranges[0]
        _, last, length = ranges[-1]
        if last + length - start - sum([size for _, _, size in ranges]) > _GAP:
            return fetch(ranges)
        [span] = fetch([(shard, start, last + length - start)])
        return [span[offset - start : offset - start + size] for _, offset, size in ranges]

    def _fetch_some(self, index: int, names: list[str], ranges: list[Range]) -> list[Any]:
        """The parts of one sample; streamed parts are not read, a range stands for them."""
        assert self.streamed is not None
        is_left = [self.streamed.takes(name, span[2]) for name, span in zip(names, ranges, strict=True)]
        data = iter(self._fetch(index, [span for span, left in zip(ranges, is_left, strict=True) if not left]))
        read_ahead = self.source.read_ahead
        return [
            PartRange(*span, read_ahead) if left else next(data) for span, left in zip(ranges, is_left, strict=True)
        ]

    def _verify_one(self, index: int, names: Sequence[str], data: Sequence[Any]) -> None:
        choice = self.source.choice
        if choice.checksums is not None:
            sample, every = choice.locate(index)[1], choice.wanted(index, None)[2]
            wanted = [place for place, name in enumerate(every) if self.parts is None or name in self.parts]
            choice.verify(np.array([sample]), wanted, names, [[part] for part in data])

    def _fetch_columns(self, indices: Sequence[int], shards: list[Shard], found: _Found) -> list[list[bytes]]:
        """The bytes of each part: by one read for each sample, or one for each part if they lie far apart."""
        starts, stops = found.starts, found.stops
        columns = zip(starts.T.tolist(), (stops - starts).T.tolist(), strict=True)
        if self.ahead is not None:
            fetch_one = self.ahead.fetch
            return [[fetch_one(*where) for where in zip(indices, *column, strict=True)] for column in columns]
        fetch = self.source.store.fetch
        if len(found.names) < 2 or (starts[:, 1:] - stops[:, :-1] > _GAP).any():
            return [fetch(zip(shards, *column, strict=True)) for column in columns]
        first = starts[:, 0]
        spans = fetch(zip(shards, first.tolist(), (stops[:, -1] - first).tolist(), strict=True))
        cuts = zip((starts - first[:, None]).T.tolist(), (stops - first[:, None]).T.tolist(), strict=True)
        return [[span[low:high] for span, low, high in zip(spans, *cut, strict=True)] for cut in cuts]

    # -- runs as a whole ------------------------------------------------------------------------------------------

    def _buffered(self, runs: Runs, indices: Sequence[int]) -> list[Row] | None:
        """Rows of runs that are read as a whole; None: a run cannot be read in this way."""
        kept, length = self._kept, runs.length
        rows: list[Row] = []
        for index in indices:
            run = kept.get(index // length) or self._bring(runs, index // length)
            if run is None:
                return None
            rows.append(run[index % length])
        self._usage.wanted += len(rows)
        return rows

    def _bring(self, runs: Runs, number: int) -> list[Row] | None:
        """Read a run; None: it is too large, its samples are not alike, or most of it is not wanted."""
        if number in self._unfit:
            return None
        if not self._usage.pays:
            self._runs = None  # from now on samples are read one by one
            self._kept.clear()
            return None
        drop_oldest(self._kept, runs.kept - 1)  # before reading, so that the memory of old runs is reused
        first = number * runs.length
        try:
            rows = self._read_run(first, min(first + runs.length, len(self.source)))
        except (EnergonLiteError, OSError):
            rows = None  # the error may concern only some of the samples
        if rows is None:
            drop_oldest(self._unfit, _REMEMBERED - 1)
            self._unfit[number] = None
            return None
        self._usage.read += len(rows)
        self._kept[number] = rows
        return rows

    def _read_run(self, first: int, stop: int) -> list[Row] | None:
        """The samples ``first..stop-1`` of a run; None: the run does not suit being read as a whole."""
        choice = self.source.choice
        names = None
        rows = list[Row]()
        for place, begin, length in choice.stretches(first, stop):
            table = self._look_up_neighbours(begin, length)
            if table is None or (names is not None and table.names is not names):
                return None
            names = table.names
            starts = table.starts
            stops = table.stops
            size = max(stops[-1].tolist(), default=0) - min(starts[0].tolist(), default=0)
            shard = self.source.store.open(*choice.shards[place])
            sparse = int((stops - starts).sum()) * _SPARSE < size
            if sparse or size > LARGEST_READ or not isinstance(shard, LocalFile):
                return None
            data = fetch_neighbours(shard, starts, stops)
            if data is None:
                return None
            choice.verify(np.arange(begin, begin + length), table.wanted, table.names, data)
            name = choice.shard_names[place]
            rows += zip(repeat(names, length), table.keys, repeat(name, length), *data, strict=True)
        return rows

    # -- the index ------------------------------------------------------------------------------------------------

    def _look_up(self, samples: Int64) -> _Found | None:
        """Look up the places of samples in their shards; None: the samples are not alike."""
        index = self.source.choice.index
        rows = index.samples.stretches(samples, 2)
        parts, keys = rows[:, :, 0], rows[:, :, 1]
        first = parts[:, 0]
        count = int(parts[0, 1] - first[0])
        if not count or ((parts[:, 1] - first) != count).any():
            return None
        table = self._wanted_of(index.parts.stretches(first, count))
        return None if table is None else table._replace(keys=index.keys_between(keys))

    def _look_up_neighbours(self, first: int, length: int) -> _Found | None:
        """:meth:`_look_up` for ``length`` neighbours from ``first`` on, in the same shard."""
        index = self.source.choice.index
        rows = index.samples[first : first + length + 1]
        parts, keys = rows[:, 0], rows[:, 1]
        begin, end = int(parts[0]), int(parts[-1])
        count = (end - begin) // length
        if not count or ((parts[1:] - parts[:-1]) != count).any():
            return None
        table = self._wanted_of(index.parts[begin:end].reshape(length, count, 3))
        return None if table is None else table._replace(keys=self._keys_of_neighbours(keys))

    def _keys_of_neighbours(self, places: Int64) -> list[str]:
        """The keys between these offsets in the section of keys, cut out of one text if that is not too long."""
        key = self.source.choice.index.key_between
        first = int(places[0])
        last = int(places[-1])
        if last - first <= _LONGEST_KEY * len(places):
            text = key(first, last)
            if len(text) == last - first:  # each character is a byte
                return [text[start:stop] for start, stop in pairwise((places - first).tolist())]
        return [key(start, stop) for start, stop in pairwise(places.tolist())]

    def _wanted_of(self, table: Int64) -> _Found | None:
        """Select the wanted columns from ``[samples, parts, 3]`` rows of parts; None: the samples differ, have a part
        twice, or have a part that is streamed."""
        first = table[0, :, 2]
        if len(table) > 1 and (table[:, :, 2] != first).any():
            return None
        known = tuple(first.tolist())
        if known not in self._layouts:
            every = [self.source.choice.index.part_names[number] for number in known]
            wanted = [column for column, name in enumerate(every) if self.parts is None or name in self.parts]
            names = tuple(every[column] for column in wanted)
            all_of_them = slice(None) if len(wanted) == len(every) else wanted
            self._layouts[known] = (all_of_them, names) if len(set(names)) == len(names) else None
        layout = self._layouts[known]
        if layout is None:
            return None
        starts, sizes = table[:, layout[0], 0], table[:, layout[0], 1]
        if self.streamed is not None and any(map(self.streamed.takes, layout[1], sizes.max(axis=0).tolist())):
            return None
        return _Found([], layout[1], starts, starts + sizes, layout[0])


class Reader(Protocol):
    """Reader of the samples of a source; see :class:`SampleReader`."""

    @property
    def ahead(self) -> Ahead | None: ...

    def ranges(self, indices: Sequence[int]) -> list[ShardRange]: ...

    def read(self, indices: Sequence[int]) -> Columns | None: ...

    def sample(self, index: int) -> RawSample: ...


def fetch_samples(samples: Iterable[tuple[Reader | OpenedSource, int]], *, wait: bool = True) -> None:
    """Fetch the bytes of these samples before they are read one by one: all missing ranges are requested at the same
    time. Does nothing for sources that are read directly. Never raises; the read itself does.

    Args:
        wait: until the bytes have arrived; False: only start to fetch.
    """
    of_reader: dict[int, tuple[Reader, list[int]]] = {}
    for reader, index in samples:
        if not isinstance(reader, OpenedSource) and reader.ahead is not None:
            of_reader.setdefault(id(reader), (reader, []))[1].append(index)
    wanted: dict[ReadAhead, list[ShardRange]] = {}
    for reader, indices in of_reader.values():
        if reader.ahead is not None:
            wanted.setdefault(reader.ahead.settings, []).extend(reader.ranges(indices))
    for settings, ranges in wanted.items():
        cache = range_cache(settings)
        cache.load(ranges) if wait else cache.prefetch(ranges)
