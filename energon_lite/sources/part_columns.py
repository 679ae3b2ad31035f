"""Many samples of one source at once, by columns: all keys, all bytes of a part, all bytes of another.

What takes a sample at a time several look-ups in Python is done for a whole micro-batch in a few numpy calls. Only for
samples that have the same parts in the same order, as nearly all data sets have; for others :func:`PartColumns.read`
says that it is not for them.
"""

from __future__ import annotations

import itertools
import mmap
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from energon_lite.sources.run_ring import ring_of_this_thread
from energon_lite.sources.shard_store import LocalFile

if TYPE_CHECKING:
    from energon_lite.sources.webdataset import WebdatasetSource

__all__ = ["Columns", "PartColumns"]

Ints = NDArray[np.int64]

#: Bytes between two wanted parts of a sample that are rather read than skipped.
_GAP = 1 << 20
#: A run is read as a whole if at least this part of it is wanted: headers of tiny samples are most of their shard.
_SPARSE = 8
#: Runs whose place is remembered.
_REMEMBERED = 1 << 12

_ZERO_ONE = np.arange(2)
_UNKNOWN = (-1, -1)
_marks = itertools.count(1)


class Columns(NamedTuple):
    """Samples by columns.

    Attributes:
        keys: of each sample.
        shards: the name of each sample's shard.
        names: the parts that were read, in the order of the tar.
        parts: by name, the bytes of each sample's part.
    """

    keys: list[str]
    shards: list[str]
    names: tuple[str, ...]
    parts: dict[str, list[bytes]]


class PartColumns:
    """Reads parts of many samples of one source.

    Args:
        source: where they are.
        parts: names of the wanted parts.
    """

    def __init__(self, source: WebdatasetSource, parts: frozenset[str]):
        self._source, self.parts = source, parts
        self._index = source.index
        self._shards = len(source.shard_names)
        self._is_wanted = np.array([name in parts for name in self._index.part_names])
        self._layouts: dict[tuple[int, ...], tuple[list[int] | slice, tuple[str, ...]] | None] = {}
        #: Keeps what this object has in the ring apart from what others have.
        self._mark = next(_marks) << 62
        self._spans: dict[int, tuple[int, int] | None] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return PartColumns, (self._source, self.parts)

    def read(self, indices: Ints) -> Columns | None:
        """The samples ``indices``; None: they do not all have the same parts.

        Raises:
            MissingShardError, ShardChangedError, DatasetError: as :meth:`WebdatasetSource.read`.
        """
        place, sample = self._source.locate_many(indices)
        rows = self._index.samples.take(self._both(sample), 0)
        parts, keys = rows[:, :, 0], rows[:, :, 1].tolist()
        first = parts[:, 0]
        count = int(parts[0, 1] - first[0])
        if not count or ((parts[:, 1] - first) != count).any():
            return None
        table = self._index.parts.take(first[:, None] + np.arange(count), 0)
        layout = self._layout(table[:, :, 2])
        if layout is None:
            return None
        wanted, names = layout
        shard_names, key = self._source.shard_names, self._index.key_between
        places = place.tolist()
        return Columns(
            [key(start, stop) for start, stop in keys],
            [shard_names[number] for number in places],
            names,
            self._bytes(indices, place, places, table[:, wanted, 0], table[:, wanted, 1], names),
        )

    @staticmethod
    def _both(sample: Ints) -> Ints:
        """Each number and the next one."""
        both: Ints = sample[:, None] + _ZERO_ONE
        return both

    def _layout(self, numbers: Ints) -> tuple[list[int] | slice, tuple[str, ...]] | None:
        """Which columns of parts are wanted, and their names; None: samples differ, or have a part twice."""
        first = numbers[0]
        if len(numbers) > 1 and (numbers != first).any():
            return None
        known = tuple(first.tolist())
        if known not in self._layouts:
            every = [self._index.part_names[number] for number in known]
            wanted = [column for column, name in enumerate(every) if name in self.parts]
            names = tuple(every[column] for column in wanted)
            all_of_them = slice(None) if len(wanted) == len(every) else wanted
            self._layouts[known] = (all_of_them, names) if len(set(names)) == len(names) else None
        return self._layouts[known]

    def _bytes(
        self, indices: Ints, place: Ints, places: list[int], starts: Ints, sizes: Ints, names: tuple[str, ...]
    ) -> dict[str, list[bytes]]:
        source = self._source
        if source.run_reader is not None:
            reader, parts = source.run_reader, self.parts
            return {
                name: [
                    reader.read(source, index, parts, start, size)
                    for index, start, size in zip(
                        indices.tolist(), starts[:, column].tolist(), sizes[:, column].tolist(), strict=True
                    )
                ]
                for column, name in enumerate(names)
            }
        if source.run_length > 1:
            found = self._from_ring(indices, place, starts, sizes, names)
            if found is not None:
                return found
        return self._positioned(places, starts, sizes, names)

    def _from_ring(
        self, indices: Ints, place: Ints, starts: Ints, sizes: Ints, names: tuple[str, ...]
    ) -> dict[str, list[bytes]] | None:
        """Slices of runs that are read as a whole; None: the runs are too large for that."""
        ring = ring_of_this_thread(self._source.ring_bytes)
        # A run may lie in two shards; what it has in each is a piece of its own.
        pieces = ((indices // self._source.run_length) * self._shards + place).tolist()
        shifts: dict[int, int] = {}  # from a place in the shard to the place in the ring
        loaded = False
        for piece in set(pieces):
            span = self._span(piece)
            if span is None:
                return None
            at = ring.find(self._mark + piece)
            if at is None:
                shard = self._source.open_shard(piece % self._shards)
                at = ring.load(self._mark + piece, shard, *span) if isinstance(shard, LocalFile) else None
                if at is None:
                    return None
                loaded = True
            shifts[piece] = at - span[0]
        if loaded and any(ring.find(self._mark + piece) is None for piece in shifts):
            return None  # the last runs overwrote the first ones
        begin = starts + np.array([shifts[piece] for piece in pieces])[:, None]
        return _slices(ring.memory, begin, begin + sizes, names)

    def _span(self, piece: int) -> tuple[int, int] | None:
        """Offset and size of what the samples of a run have in a shard; None: not worth to be read as a whole."""
        span = self._spans.get(piece, _UNKNOWN)
        if span is _UNKNOWN:
            while len(self._spans) >= _REMEMBERED:
                self._spans.pop(next(iter(self._spans)))
            span = self._spans[piece] = self._measure(*divmod(piece, self._shards))
        return span

    def _measure(self, run: int, place: int) -> tuple[int, int] | None:
        length = self._source.run_length
        places, samples = self._source.locate_many(np.arange(run * length, min((run + 1) * length, len(self._source))))
        samples = samples[places == place]
        # The first and the last sample in the shard bound the others.
        parts = self._index.parts[self._index.samples[samples[0], 0] : self._index.samples[samples[-1] + 1, 0]]
        wanted = parts[self._is_wanted[parts[:, 2]]]
        start, stop = int(wanted[:, 0].min()), int((wanted[:, 0] + wanted[:, 1]).max())
        if wanted[:, 1].sum() * _SPARSE < stop - start or (stop - start) * 8 > self._source.ring_bytes:
            return None
        return start, stop - start

    def _positioned(
        self, places: list[int], starts: Ints, sizes: Ints, names: tuple[str, ...]
    ) -> dict[str, list[bytes]]:
        """One positioned read for each sample; one for each part if there is much between them."""
        read, shards = self._source.read_bytes, [self._source.shard(place) for place in places]
        if len(names) == 1:
            column = zip(shards, starts[:, 0].tolist(), sizes[:, 0].tolist(), strict=True)
            return {names[0]: [read(*shard, start, size) for shard, start, size in column]}
        first, stops = starts[:, 0], starts + sizes
        if len(names) and (starts[:, 1:] - stops[:, :-1] <= _GAP).all():
            spans = zip(shards, first.tolist(), (stops[:, -1] - first).tolist(), strict=True)
            found = [read(*shard, start, size) for shard, start, size in spans]
            begin, end = (starts - first[:, None]).tolist(), (stops - first[:, None]).tolist()
            return {
                name: [data[one[column] : other[column]] for data, one, other in zip(found, begin, end, strict=True)]
                for column, name in enumerate(names)
            }
        return {
            name: [
                read(*shard, start, size)
                for shard, start, size in zip(
                    shards, starts[:, column].tolist(), sizes[:, column].tolist(), strict=True
                )
            ]
            for column, name in enumerate(names)
        }


def _slices(memory: mmap.mmap, begin: Ints, end: Ints, names: tuple[str, ...]) -> dict[str, list[bytes]]:
    """By part the bytes of each sample, from places ``[samples, parts]`` of the memory."""
    if len(names) == 1:
        return {names[0]: [memory[i:j] for i, j in zip(begin[:, 0].tolist(), end[:, 0].tolist(), strict=True)]}
    columns = zip(names, begin.T.tolist(), end.T.tolist(), strict=True)
    return {name: [memory[i:j] for i, j in zip(starts, stops, strict=True)] for name, starts, stops in columns}
