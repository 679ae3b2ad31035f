"""The samples of a data set that are read: those of the chosen shards without excluded, skipped and filtered ones."""

from __future__ import annotations

import hashlib
import logging
import os
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon_lite.errors import DatasetError
from energon_lite.storage.files.byte_ranges import uncompared
from energon_lite.storage.files.shard_store import Range, Shard, ShardIdentity
from energon_lite.storage.index.column_file import ColumnFile, RaggedFile
from energon_lite.storage.index.columns import CHECKSUMS, SKIPPED, Column, RaggedColumn
from energon_lite.storage.index.nv_meta import folder_of_shards
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.read.source import SampleFilter
from energon_lite.storage.tar_members import Int64

_log = logging.getLogger(__name__)


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
        self._shards = [index.shard_rows[name] for name in shard_names]
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
        without_skips = SparseExclusion(stop - self._start, excluded - self._start)
        self.filtered = 0
        left = None if skips is None and not filters else self._left(skips, stop, excluded)
        kept = without_skips if left is None else left
        self._kept = kept if len(excluded) or left is not None else None
        self._length = len(kept)
        self.skipped = len(without_skips) - self._length - self.filtered
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
        in_order = len(set(self._arrays[1].tolist())) <= 1
        start = self._first[0] + self._start if in_order and self._kept is None else None
        return Column(self._file(name), self._length, lambda n: self.locate_many(n)[1], self._shards, start)

    def ragged_column(self, name: str) -> RaggedColumn:
        """The values of a ragged column, such as ``"image_sizes"``, for these samples.

        Raises:
            DataIndexError: as :meth:`column`.
        """
        file = RaggedFile.find(self.path, self.index, name, self._shards, asked=self._asked)
        return RaggedColumn(file, self._length, lambda n: self.locate_many(n)[1], self._shards)

    def _file(self, name: str) -> ColumnFile:
        return ColumnFile.find(self.path, self.index, name, self._shards, asked=self._asked)

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
    for shard in wanted.keys() - index.shard_rows.keys():
        _log.warning("exclude names samples of shard %r, which the data set does not have", shard)
    positions: list[int] = []
    start = 0
    for name in shards:
        row = index.shard_rows[name]
        first, stop = index.shards[row : row + 2, 3].tolist()
        keys = wanted.get(name)
        if keys:
            key_of = {place: key for place, key in enumerate(index.keys(first, stop), start) if key in keys}
            positions += key_of
            for key in keys - {*key_of.values()}:
                _log.warning("exclude names sample %r of shard %r, which is not there", key, name)
        start += stop - first
    return np.array(positions, dtype=np.int64)


# -- the samples that are left after an exclusion -------------------------------------------------------------------
#
# The place of the n-th kept sample, without a list of all of them, in two forms with the same answers. The few samples
# that ``split.yaml`` excludes are stored as sorted positions. Many excluded samples, such as those that a task encoder
# skipped, are stored as a bit for each sample and a count for each 512 of them: 0.14 bytes for a sample, whatever the
# number of exclusions. Both are plain arrays, so forked processes share their memory.

#: Samples of one block, which has a count.
_BLOCK = 512
#: Most places that are looked up at once: as many blocks are unpacked.
_ROWS = 4096


class SparseExclusion:
    """The samples of a range without a few excluded ones.

    Args:
        samples: length of the range.
        left_out: ``[n]``, ascending places in the range.

    Example:
        >>> kept = SparseExclusion(10, np.array([0, 4]))
        >>> [kept.place(number) for number in range(len(kept))]
        [1, 2, 3, 5, 6, 7, 8, 9]
    """

    def __init__(self, samples: int, left_out: Int64):
        self._length = samples - len(left_out)
        # The number of excluded samples before the i-th kept one is the count of shifted places up to i.
        self._shifted = left_out.astype(np.int64) - np.arange(len(left_out), dtype=np.int64)
        self._view = memoryview(self._shifted)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return self._length

    def place(self, number: int) -> int:
        """The place within the range of the kept sample ``number``."""
        return number + bisect_right(self._view, number)

    def places(self, numbers: Int64) -> Int64:
        """:meth:`place` of many samples, ``[n]``."""
        return numbers + np.searchsorted(self._shifted, numbers, side="right")


class DenseExclusion:
    """The samples of a range whose bit is set, for exclusions of many samples.

    Args:
        samples: length of the range.
        kept: boolean arrays that together make up the range, in order.

    Attributes:
        digest: 32 hexadecimal characters that identify the exclusion.

    Example:
        >>> kept = DenseExclusion(4, [np.array([False, True]), np.array([True, False])])
        >>> len(kept), kept.place(1)
        (2, 2)
    """

    def __init__(self, samples: int, kept: Iterable[NDArray[np.bool_]]):
        blocks = -(-samples // _BLOCK)
        self._bits = np.zeros((blocks, _BLOCK // 8), dtype=np.uint8)
        flat, filled = self._bits.reshape(-1), 0
        rest: NDArray[np.bool_] = np.zeros(0, dtype=bool)  # samples that do not fill a byte yet
        for part in kept:
            part = np.concatenate([rest, part]) if len(rest) else part
            whole = len(part) // 8
            flat[filled : filled + whole] = np.packbits(part[: 8 * whole])
            filled, rest = filled + whole, part[8 * whole :]
        if len(rest):
            flat[filled] = np.packbits(rest)[0]
        assert 8 * filled + len(rest) == samples
        counts = np.empty(blocks, dtype=np.int64)
        for start in range(0, blocks, _ROWS):
            counts[start : start + _ROWS] = _ONES[self._bits[start : start + _ROWS]].sum(axis=1, dtype=np.int64)
        #: Kept samples before each block; the last entry counts all of them.
        self._before = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])
        self.digest = hashlib.blake2b(flat.data, digest_size=16).hexdigest()

    def __len__(self) -> int:
        return int(self._before[-1])

    def place(self, number: int) -> int:
        """The place within the range of the kept sample ``number``."""
        block = int(self._before.searchsorted(number, "right")) - 1
        ones = np.flatnonzero(np.unpackbits(self._bits[block]))
        return block * _BLOCK + int(ones[number - self._before[block]])

    def places(self, numbers: Int64) -> Int64:
        """:meth:`place` of many samples, ``[n]``."""
        places = np.empty(len(numbers), dtype=np.int64)
        for start in range(0, len(numbers), _ROWS):
            part = numbers[start : start + _ROWS]
            rows = np.arange(len(part))
            block = np.searchsorted(self._before, part, side="right") - 1
            bits, rank = self._bits[block], part - self._before[block]
            ones = np.cumsum(_ONES[bits], axis=1, dtype=np.int16)
            byte = (ones <= rank[:, None]).sum(axis=1)
            here = bits[rows, byte]
            rank -= ones[rows, byte] - _ONES[here]  # kept samples of the block before this byte
            places[start : start + len(part)] = block * _BLOCK + 8 * byte + _SELECT[here, rank]
        return places


_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)
#: Number of ones in each byte.
_ONES = _BITS.sum(axis=1, dtype=np.uint8)
#: Position of the n-th one in each byte.
_SELECT = np.argsort(1 - _BITS.astype(np.int8), axis=1, kind="stable")
