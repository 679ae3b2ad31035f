"""The samples of a data set that are read: those of the chosen shards without excluded, skipped and filtered ones."""

from __future__ import annotations

import hashlib
import logging
import os
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from energon_lite.errors import DatasetError
from energon_lite.storage.files.byte_ranges import uncompared
from energon_lite.storage.files.shard_store import Range, Shard, ShardIdentity
from energon_lite.storage.index.column_file import ColumnFile, RaggedFile
from energon_lite.storage.index.columns import CHECKSUMS, SKIPPED, Column, RaggedColumn
from energon_lite.storage.index.nv_meta import folder_of_shards
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.read.kept_samples import DenseExclusion, KeptSamples, SparseExclusion
from energon_lite.storage.tar.members import Int64

_log = logging.getLogger(__name__)


class SampleFilter(Protocol):
    """A condition on samples, as a guest makes it of a text: entry ``filter`` of the table ``METADATASET_KEYS``.

    Attributes:
        text: the text.
    """

    text: str

    def opened(
        self, path: str, index: PackedIndex | None, column: Callable[[str], Any]
    ) -> Callable[[int, int], NDArray[np.bool_]]:
        """Return ``keep(first, stop)``: a mask of the samples ``first..stop-1``, counted over all shards.

        Args:
            path: the data set.
            index: its packed index; None: a source of another format.
            column: returns the values of a column for all samples, to be cut into slices.

        Raises:
            DataIndexError: the filter needs a file that does not exist, or is damaged.
            UsageError: it is no condition on such a data set.
        """


class SampleChoice:
    """The chosen samples of an open index, by number.

    Args:
        index: the packed index.
        path: the data set: its folder, its URL, or the JSONL file.
        shard_names: the chosen shards, in order.
        excluded: ascending positions, among the samples of these shards, of the samples that ``split.yaml`` excludes.
        span: first and last + 1 of the positions that are read; None: all.
        skips: name of a column whose skipped samples are left out as well; None: no such column.
        filters: conditions that samples have to meet, all of them.
        versions: versions of the shards at opening; None: the times of change that the index has.
        verified: parts are compared with their checksums, if these were measured.
        asked: see :meth:`ColumnFile.find`.

    Attributes:
        shards: path and identity of each chosen shard.
        skipped, filtered: samples that only the column leaves out, and after these the samples that only filters do.
        fingerprint: identifies what is read: shards (name, size, number of samples, in order), the span, and the left
            out samples; independent of the folder's place.
        contents: identifies the data as well: shards of equal names, sizes and counts differ in their first blocks.
        checksums: checksums of the parts of all samples of the folder; None: parts are not verified.

    Raises:
        DataIndexError: the column does not exist, is older than the data, or lacks values for these shards.
    """

    def __init__(
        self,
        index: PackedIndex,
        path: str,
        shard_names: Sequence[str],
        excluded: Int64,
        span: tuple[int, int] | None = None,
        skips: str | None = None,
        filters: Sequence[SampleFilter] = (),
        versions: tuple[int, ...] | None = None,
        verified: bool = False,
        asked: Sequence[str] = (),
    ):
        self.index = index
        self.path = path
        self.shard_names = tuple(shard_names)
        self._asked = asked
        self.excluded = excluded
        self.span = span
        self.skips = skips
        self.filters = tuple(filters)
        numbers = {name: number for number, name in enumerate(index.shard_names)}
        self._shards = [numbers[name] for name in shard_names]
        table, folder = index.shards.tolist(), folder_of_shards(path)
        self.checksums: RaggedFile | None = None
        if verified and RaggedFile.stored(path, CHECKSUMS):
            self.checksums = RaggedFile.find(path, index, CHECKSUMS, self._shards, asked=asked)
        rows = [table[number] for number in self._shards]
        times = map(uncompared, index.shard_times[self._shards].tolist())
        self.versions = tuple(times) if versions is None else versions
        identities = [ShardIdentity(row[0], row[1], version) for row, version in zip(rows, self.versions, strict=True)]
        paths = [os.path.join(folder, name) for name in shard_names]
        self.shards: list[Shard] = list(zip(paths, identities, strict=True))
        #: First sample of each shard in the index, and among the chosen samples; the last entry is their total.
        self._first = [row[3] for row in rows]
        counts = [table[number + 1][3] - table[number][3] for number in self._shards]
        self._starts = [0, *accumulate(counts)]
        self._start, stop = span or (0, self._starts[-1])
        excluded = excluded[(excluded >= self._start) & (excluded < stop)]
        self._kept: KeptSamples | None = None
        if len(excluded):
            self._kept = SparseExclusion(stop - self._start, excluded - self._start)
        without_skips = stop - self._start - len(excluded)
        self.filtered = 0
        left = None if skips is None and not filters else self._left(skips, stop, excluded)
        self._kept = self._kept if left is None else left
        self._length = without_skips if left is None else len(left)
        self.skipped = without_skips - self._length - self.filtered
        starts = np.array(self._starts, dtype=np.int64)
        self._arrays = starts, np.array(self._first, dtype=np.int64) - starts[:-1]
        read = zip(shard_names, [row[0] for row in rows], counts, strict=True)
        part = None if (self._start, stop) == (0, self._starts[-1]) else (self._start, stop)
        self.fingerprint = _fingerprint(read, excluded, part, left)
        heads = b"".join(row[1].to_bytes(4, "little") for row in rows)
        self.contents = hashlib.sha256(self.fingerprint.encode() + heads).hexdigest()

    def __len__(self) -> int:
        return self._length

    def locate(self, index: int) -> tuple[int, int]:
        """Return (position among the chosen shards, number of the sample over all shards of the folder)."""
        if not 0 <= index < self._length:
            raise IndexError(f"sample {index} of {self._length} in {self.path}")
        if self._kept is not None:
            index = self._kept.place(index)
        index += self._start
        place = bisect_right(self._starts, index) - 1
        return place, self._first[place] + index - self._starts[place]

    def index_of(self, sample: int) -> int | None:
        """Return the index of a sample by its number over all shards of the folder (the inverse of :meth:`locate`);
        None: the sample is not among the chosen ones."""
        for first, (begin, end) in zip(self._first, pairwise(self._starts), strict=True):
            if first <= sample < first + end - begin:
                place = begin + sample - first - self._start
                if self._kept is None:
                    return place if 0 <= place < self._length else None
                index = bisect_left(range(self._length), place, key=self._kept.place)
                return index if index < self._length and self._kept.place(index) == place else None
        return None

    def locate_many(self, indices: Int64) -> tuple[Int64, Int64]:
        """:meth:`locate` for many indices, which have to be valid."""
        if self._kept is not None:
            indices = self._kept.places(indices)
        if self._start:
            indices = indices + self._start
        starts, shift = self._arrays
        place = starts.searchsorted(indices, "right") - 1
        return place, indices + shift[place]

    def stretches(self, first: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The samples ``first..stop-1`` as stretches of neighbours in a shard: the shard's position among the chosen
        ones, the number of the first sample over all shards of the folder, and the number of samples."""
        place, begin = self.locate(first)
        other, end = self.locate(stop - 1)
        if place == other and end - begin == stop - 1 - first:
            yield place, begin, stop - first
            return
        middle = (first + stop) // 2
        yield from self.stretches(first, middle)
        yield from self.stretches(middle, stop)

    def wanted(self, index: int, parts: Container[str] | None) -> tuple[str, str, list[str], list[Range]]:
        """Return the place of a sample: the name of its shard, its key, and the names and ranges of those ``parts``
        that it has, in the order of the tar."""
        place, sample = self.locate(index)
        key, rows = self.index.key_and_part_rows(sample)
        part_names, shard = self.index.part_names, self.shards[place]
        names: list[str] = []
        ranges: list[Range] = []
        for row in range(0, len(rows), 3):
            name = part_names[rows[row + 2]]
            if parts is None or name in parts:
                names.append(name)
                ranges.append((shard, rows[row], rows[row + 1]))
        return self.shard_names[place], key, names, ranges

    def verify(self, samples: Int64, wanted: Any, names: Sequence[str], parts: Sequence[Sequence[Any]]) -> None:
        """Compare parts with their checksums, if checksums were measured.

        Args:
            samples: numbers of the samples over all shards of the folder; all have the same parts.
            wanted: the positions of the given parts among all parts of a sample, as a list or a slice.
            names: names of the given parts.
            parts: for each of them the bytes in all samples; values that are not bytes were not read and are ignored.

        Raises:
            DatasetError: the bytes of a part differ from the measured ones.
        """
        if self.checksums is None:
            return
        sums = self.checksums.take(samples).values.reshape(len(samples), -1)[:, wanted].astype(np.uint32)
        for name, column, expected in zip(names, parts, sums.T.tolist(), strict=True):
            for sample, part, checksum in zip(samples.tolist(), column, expected, strict=True):
                if isinstance(part, bytes) and zlib.crc32(part) != checksum:
                    shard = int(self.index.shards[:-1, 3].searchsorted(sample, "right")) - 1
                    raise DatasetError(
                        f"the bytes of part {name!r} are not those that were measured: their checksum differs",
                        where=f"{os.path.join(self.path, self.index.shard_names[shard])}, {self.index.key(sample)}",
                        fix="restore the shard; if it is right as it is, run `energon-lite measure --force-overwrite "
                        f"--checksums {self.path}`",
                    )

    def column(self, name: str) -> Column:
        """The values of a column, such as ``"length"`` or ``"skip"``, for these samples: an array that stays on disk.

        Raises:
            DataIndexError: the column does not exist, is older than the data, or has no values for some shards.
        """
        file = self._file(name)
        in_order = len(set(self._arrays[1].tolist())) <= 1
        start = self._first[0] + self._start if in_order and self._kept is None else None
        fingerprint = file.fingerprint(self._shards)
        return Column(file, self._length, lambda n: self.locate_many(n)[1], start=start, fingerprint=fingerprint)

    def _file(self, name: str) -> ColumnFile:
        return ColumnFile.find(self.path, self.index, name, self._shards, asked=self._asked)

    def ragged_column(self, name: str) -> RaggedColumn:
        """The values of a ragged column, such as ``"image_sizes"``, for these samples.

        Raises:
            DataIndexError: as :meth:`column`.
        """
        file = RaggedFile.find(self.path, self.index, name, self._shards, asked=self._asked)
        fingerprint = file.fingerprint(self._shards)
        return RaggedColumn(file, self._length, lambda n: self.locate_many(n)[1], fingerprint=fingerprint)

    def _left(self, skips: str | None, stop: int, excluded: Int64) -> DenseExclusion | None:
        """The samples that the column ``skips`` and the filters keep; None if they keep all that are not excluded."""
        skipped = None if skips is None else self._file(skips)
        filters = [one.opened(self.path, self.index, lambda name: self._file(name).values) for one in self.filters]

        def kept() -> Iterator[NDArray[np.bool_]]:
            for first, (begin, end) in zip(self._first, pairwise(self._starts), strict=True):
                low, high = max(begin, self._start), min(end, stop)
                if low < high:
                    start, behind = first + low - begin, first + high - begin
                    left = np.ones(high - low, dtype=bool)
                    if skipped is not None:
                        left &= skipped.values[start:behind] != SKIPPED
                    left[excluded[np.searchsorted(excluded, low) : np.searchsorted(excluded, high)] - low] = False
                    before = int(np.count_nonzero(left))
                    for keep in filters:
                        left &= keep(start, behind)
                    self.filtered += before - int(np.count_nonzero(left))
                    yield left

        left = DenseExclusion(stop - self._start, kept())
        return left if len(left) < stop - self._start - len(excluded) else None


def _fingerprint(
    shards: Iterable[tuple[str, int, int]], excluded: Int64, span: tuple[int, int] | None, kept: DenseExclusion | None
) -> str:
    """Digest of what is read: name, bytes and samples of each shard, excluded positions, the span if it is not all, and
    the samples that a column or filters keep."""
    read = [f"{name}\0{size}\0{count}\n" for name, size, count in shards]
    read.append(f"excluded {' '.join(map(str, excluded.tolist()))}")
    if span is not None:
        read.append(f"\nsubset {span[0]} {span[1]}")
    if kept is not None:
        read.append(f"\nkept {kept.digest}")
    return hashlib.sha256("".join(read).encode("utf-8", "surrogateescape")).hexdigest()


def excluded_positions(index: PackedIndex, shards: Sequence[str], excluded: Sequence[tuple[str, str]]) -> Int64:
    """Return the positions, among the samples of ``shards``, of the (shard, key) pairs to leave out."""
    wanted: dict[str, set[str]] = {}
    for shard, key in excluded:
        wanted.setdefault(shard, set()).add(key)
    rows = {name: number for number, name in enumerate(index.shard_names)}
    for shard in wanted.keys() - rows.keys():
        _log.warning("exclude names samples of shard %r, which the data set does not have", shard)
    positions: list[int] = []
    start = 0
    for name in shards:
        first, stop = index.shards[rows[name] : rows[name] + 2, 3].tolist()
        keys = wanted.get(name)
        if keys:
            key_of = {place: key for place, key in enumerate(index.keys(first, stop), start) if key in keys}
            positions += key_of
            for key in keys - {*key_of.values()}:
                _log.warning("exclude names sample %r of shard %r, which is not there", key, name)
        start += stop - first
    return np.array(positions, dtype=np.int64)
