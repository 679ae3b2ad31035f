"""Many samples of one source at once, by columns: all keys, all bytes of a part, all bytes of another.

What takes a sample at a time several look-ups in Python is done for a whole run, or else for a whole micro-batch, in a
few numpy calls. Only for samples that have the same parts in the same order, as nearly all data sets have; for others
:func:`PartColumns.read` says that it is not for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, pairwise, repeat
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from energon_lite.errors import EnergonLiteError
from energon_lite.samples import SourceInfo
from energon_lite.storage.files.shard_store import LocalFile
from energon_lite.storage.read.run_buffer import Row, RunBuffer, Runs, Scratch, Usage, shelf_of_this_thread
from energon_lite.storage.read.webdataset import RawSample, WebdatasetSource

__all__ = ["Columns", "PartColumns"]

Ints = NDArray[np.int64]

#: Bytes between two wanted parts of a sample that are rather read than skipped.
_GAP = 1 << 20
#: A run is read as a whole if at least this part of it is wanted: headers of tiny samples are most of their shard.
_SPARSE = 8
#: Runs of which it is remembered that they cannot be read as a whole.
_REMEMBERED = 1 << 12

#: Bytes that a key may have on the average to be looked up together with others.
_LONGEST_KEY = 256
_owners = count()


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


class _Found(NamedTuple):
    """Where samples are in their shards: ``n`` of them, with ``p`` wanted parts.

    Attributes:
        keys: ``n``.
        names: ``p``, of the parts, in the order of the tar.
        starts: ``[n, p]``, offsets.
        sizes: ``[n, p]``.
    """

    keys: list[str]
    names: tuple[str, ...]
    starts: Ints
    sizes: Ints


class _Piece(NamedTuple):
    """Neighbours in a shard.

    Attributes:
        place: of the shard among the chosen ones.
        first: number of the first sample, over all shards of the folder.
        length: samples.
    """

    place: int
    first: int
    length: int


class PartColumns:
    """Reads parts of many samples of one source.

    Args:
        source: where they are.
        parts: names of the wanted parts; None: all.
    """

    def __init__(self, source: WebdatasetSource, parts: frozenset[str] | None):
        self.source, self.parts = source, parts
        self._index = source.index
        self._layouts: dict[tuple[int, ...], tuple[list[int] | slice, tuple[str, ...]] | None] = {}
        #: Keeps what this object has on the shelf apart from what others have.
        self._owner = next(_owners)
        self._unfit: dict[int, None] = {}
        self._runs = source.runs
        self._usage = Usage(source.runs or Runs(1, 0, 0), source.mean_bytes)

    def __reduce__(self) -> tuple[Any, ...]:
        return PartColumns, (self.source, self.parts)

    def read(self, indices: Sequence[int]) -> Columns | None:
        """The samples ``indices``; None: they do not all have the same parts.

        Raises:
            MissingShardError, ShardChangedError, DatasetError: as :meth:`WebdatasetSource.read`.
        """
        found = None if self._runs is None else self._from_shelf(self._runs, indices)
        return self._one_by_one(indices) if found is None else found

    def sample(self, index: int) -> RawSample:
        """One sample, as :meth:`WebdatasetSource.read` reads it: the same, or the same error."""
        source = self.source
        if self._runs is not None:
            shelf, (number, place) = shelf_of_this_thread(self._runs.memory), divmod(index, self._runs.length)
            row = self._take(shelf, number, place)
            if row is not None:
                names, key, shard, *data = row
                files = tuple([f"{key}.{name}" for name in names])
                where = SourceInfo(dataset_path=source.path, index=index, shard_name=shard, file_names=files)
                return RawSample(key, dict(zip(names, data, strict=True)), where)
        return source.read(index, self.parts)

    # -- runs as a whole ------------------------------------------------------------------------------------------

    def _from_shelf(self, reading: Runs, indices: Sequence[int]) -> Columns | None:
        """Rows of runs that are read as a whole; None: a run cannot be, or samples are not alike."""
        shelf, length = shelf_of_this_thread(reading.memory), reading.length
        runs, found = shelf.runs(self._owner), list[Row]()
        # For small samples, this loop is where much of the time goes; so it does not call _take for each.
        for index in indices:
            number, place = index // length, index % length
            rows = runs.get(number)
            if rows is None or (row := rows[place]) is None:
                row = self._take(shelf, number, place)
                if row is None:
                    self._put_back(runs, length, indices, found)
                    return None
            else:
                rows[place] = None
            found.append(row)
        columns = zip(*found, strict=False)
        names = next(columns)
        if names.count(names[0]) != len(names):
            self._put_back(runs, length, indices, found)
            return None
        keys, shards, *parts = map(list, columns)
        return Columns(keys, shards, names[0], dict(zip(names[0], parts, strict=True)))

    def _put_back(
        self, runs: dict[int, list[Row | None]], length: int, indices: Sequence[int], rows: list[Row]
    ) -> None:
        """The samples that were taken, the first of ``indices``, will be wanted one by one."""
        for index, row in zip(indices, rows, strict=False):
            if index // length in runs:
                runs[index // length][index % length] = row

    def _take(self, shelf: RunBuffer, number: int, place: int) -> Row | None:
        """A row to be handed out; None: its run cannot be read as a whole."""
        rows = shelf.runs(self._owner).get(number)
        if rows is not None and rows[place] is None:
            # It was handed out before. If most of the run was, this is the next epoch of it.
            if self._runs is not None and 2 * rows.count(None) <= len(rows):
                return self._alone(number * self._runs.length + place)
            shelf.drop(self._owner, number)
            rows = None
        rows = self._bring(shelf, number) if rows is None else rows
        if rows is None:
            return None
        row, rows[place] = rows[place], None
        return row

    def _alone(self, index: int) -> Row:
        """A row, read by itself."""
        found = self._one_by_one([index])
        assert found is not None  # one sample is like itself
        return (found.names, *found.keys, *found.shards, *(data for [data] in found.parts.values()))

    def _bring(self, shelf: RunBuffer, number: int) -> list[Row | None] | None:
        """Read a run; None: it is too large, samples are not alike, or most of it is not wanted."""
        if number in self._unfit or self._runs is None:
            return None
        if not self._usage.pays:
            self._runs = None  # from now on they are read one by one
            return None
        length = self._runs.length
        try:
            rows, size = self._read_whole(shelf.scratch, number * length, min((number + 1) * length, len(self.source)))
        except (EnergonLiteError, OSError):
            rows, size = None, 0  # what is wrong may be wrong with some of the samples only
        if rows is None:
            while len(self._unfit) >= _REMEMBERED:
                self._unfit.pop(next(iter(self._unfit)))
            self._unfit[number] = None
            return None
        shelf.put(self._owner, number, rows, size, self._usage)
        return rows

    def _read_whole(self, scratch: Scratch, first: int, stop: int) -> tuple[list[Row | None] | None, int]:
        """The samples ``first..stop-1``, and how many bytes were read; None: they are not to be read as a whole."""
        names, rows, total = None, list[Row | None](), 0
        for piece in self._pieces(first, stop):
            found = self._look_up_neighbours(piece)
            if found is None or (names is not None and found.names is not names):
                return None, 0
            names, starts, stops = found.names, found.starts, found.starts + found.sizes
            # Neighbours lie one behind the other.
            begin = min(starts[0].tolist(), default=0)
            size = max(stops[-1].tolist(), default=0) - begin
            total += size
            if total > len(scratch) or int(found.sizes.sum()) * _SPARSE < size:
                return None, 0
            shard = self.source.open_shard(piece.place)
            memory = scratch.read(shard, begin, size) if isinstance(shard, LocalFile) else None
            if memory is None:
                return None, 0
            parts = [
                [memory[low:high] for low, high in zip(lows, highs, strict=True)]
                for lows, highs in zip((starts - begin).T.tolist(), (stops - begin).T.tolist(), strict=True)
            ]
            shard_name = self.source.shard_names[piece.place]
            rows += zip(repeat(names, piece.length), found.keys, repeat(shard_name, piece.length), *parts, strict=True)
        return rows, total

    def _pieces(self, first: int, stop: int) -> Iterator[_Piece]:
        """Where the samples ``first..stop-1`` are, as stretches of neighbours in a shard."""
        place, begin = self.source.locate(first)
        other, end = self.source.locate(stop - 1)
        if place == other and end - begin == stop - 1 - first:
            yield _Piece(place, begin, stop - first)
            return
        middle = (first + stop) // 2
        yield from self._pieces(first, middle)
        yield from self._pieces(middle, stop)

    # -- one by one -----------------------------------------------------------------------------------------------

    def _one_by_one(self, indices: Sequence[int]) -> Columns | None:
        """Samples that are read one by one; None: they do not all have the same parts."""
        numbers = np.array(indices, dtype=np.int64)
        found = self._look_up(numbers)
        if found is None:
            return None
        source, places = self.source, found[0].tolist()
        shards = [source.shard_names[place] for place in places]
        return Columns(found[1].keys, shards, found[1].names, self._bytes(numbers, places, found[1]))

    def _bytes(self, indices: Ints, places: list[int], found: _Found) -> dict[str, list[bytes]]:
        source = self.source
        if source.run_reader is None:
            return self._positioned(places, found.starts, found.sizes, found.names)
        reader, parts = source.run_reader, self.parts
        return {
            name: [
                reader.read(source, index, parts, start, size)
                for index, start, size in zip(
                    indices.tolist(), found.starts[:, column].tolist(), found.sizes[:, column].tolist(), strict=True
                )
            ]
            for column, name in enumerate(found.names)
        }

    def _positioned(
        self, places: list[int], starts: Ints, sizes: Ints, names: tuple[str, ...]
    ) -> dict[str, list[bytes]]:
        """One positioned read for each sample; one for each part if there is much between them."""
        read_each, shards = self.source.read_each, [self.source.shard(place) for place in places]
        if not names:
            return {}
        if len(names) == 1:
            column = zip(shards, starts[:, 0].tolist(), sizes[:, 0].tolist(), strict=True)
            return {names[0]: read_each(column)}
        first, stops = starts[:, 0], starts + sizes
        if (starts[:, 1:] - stops[:, :-1] <= _GAP).all():
            spans = zip(shards, first.tolist(), (stops[:, -1] - first).tolist(), strict=True)
            found = read_each(spans)
            begin, end = (starts - first[:, None]).tolist(), (stops - first[:, None]).tolist()
            return {
                name: [data[one[column] : other[column]] for data, one, other in zip(found, begin, end, strict=True)]
                for column, name in enumerate(names)
            }
        return {
            name: read_each(zip(shards, starts[:, column].tolist(), sizes[:, column].tolist(), strict=True))
            for column, name in enumerate(names)
        }

    # -- the index ------------------------------------------------------------------------------------------------

    def _look_up(self, indices: Ints) -> tuple[Ints, _Found] | None:
        """Places of the shards of samples, and where they are in them; None: they are not alike."""
        place, sample = self.source.locate_many(indices)
        rows = self._index.sample_ends(sample)
        parts, keys = rows[:, :, 0], rows[:, :, 1]
        first = parts[:, 0]
        count = int(parts[0, 1] - first[0])
        if not count or ((parts[:, 1] - first) != count).any():
            return None
        found = self._found(self._index.parts_of(first, count))
        return None if found is None else (place, found._replace(keys=self._index.keys_between(keys)))

    def _look_up_neighbours(self, piece: _Piece) -> _Found | None:
        """Where they are in their shard; None: they are not alike."""
        rows = self._index.samples[piece.first : piece.first + piece.length + 1]
        parts, keys = rows[:, 0], rows[:, 1]
        begin, end = int(parts[0]), int(parts[-1])
        count = (end - begin) // piece.length
        if not count or ((parts[1:] - parts[:-1]) != count).any():
            return None
        found = self._found(self._index.parts[begin:end].reshape(piece.length, count, 3))
        return None if found is None else found._replace(keys=self._keys_of_neighbours(keys))

    def _keys_of_neighbours(self, places: Ints) -> list[str]:
        """The keys between places of the section of keys, cut out of one text if that is not long."""
        key, first, last = self._index.key_between, int(places[0]), int(places[-1])
        if last - first <= _LONGEST_KEY * len(places):
            text = key(first, last)
            if len(text) == last - first:  # each character is a byte
                return [text[start:stop] for start, stop in pairwise((places - first).tolist())]
        return [key(start, stop) for start, stop in pairwise(places.tolist())]

    def _found(self, table: Ints) -> _Found | None:
        """What is wanted of ``[samples, parts, 3]`` rows of parts; None: samples differ, or have a part twice."""
        layout = self._layout(table[:, :, 2])
        if layout is None:
            return None
        wanted, names = layout
        return _Found([], names, table[:, wanted, 0], table[:, wanted, 1])

    def _layout(self, numbers: Ints) -> tuple[list[int] | slice, tuple[str, ...]] | None:
        """Which columns of parts are wanted, and their names; None: samples differ, or have a part twice."""
        first = numbers[0]
        if len(numbers) > 1 and (numbers != first).any():
            return None
        known = tuple(first.tolist())
        if known not in self._layouts:
            every = [self._index.part_names[number] for number in known]
            wanted = [column for column, name in enumerate(every) if self.parts is None or name in self.parts]
            names = tuple(every[column] for column in wanted)
            all_of_them = slice(None) if len(wanted) == len(every) else wanted
            self._layouts[known] = (all_of_them, names) if len(set(names)) == len(names) else None
        return self._layouts[known]
