"""A prepared folder of tar shards, seen as a numbered list of samples."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Container, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np

from energon_lite.errors import (
    EmptyDatasetError,
    NotPreparedError,
    ShardChangedError,
)
from energon_lite.samples import SourceInfo
from energon_lite.storage.files.remote_files import is_remote
from energon_lite.storage.files.shard_store import RangeReader, ShardIdentity, ShardStore, shared_store
from energon_lite.storage.index.columns import Column, find_column, fingerprint_of, unknown_shards
from energon_lite.storage.index.index_cache import find_index, open_index, shard_counts
from energon_lite.storage.index.jsonl import folder_of_shards, is_jsonl
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.read.kept_samples import DenseExclusion, KeptSamples, SparseExclusion
from energon_lite.storage.read.remote import local_meta
from energon_lite.storage.read.run_buffer import Runs
from energon_lite.storage.read.run_reader import RunReader
from energon_lite.storage.read.sample_choice import (
    choice_fingerprint,
    contents_fingerprint,
    excluded_positions,
    without_skips,
)
from energon_lite.storage.read.shard_checks import check_files, check_known, split_words
from energon_lite.storage.tar.tar_scan import Int64

__all__ = ["RawSample", "SampleRange", "WebdatasetSource"]

#: Bytes between two wanted parts that are rather read than skipped: about what a disk streams during one seek.
_GAP = 1 << 20


class RawSample(NamedTuple):
    """A sample as it is in its shard.

    Attributes:
        key: the sample's key.
        parts: bytes by part name, in the order of the tar.
        source: where they were read.
    """

    key: str
    parts: dict[str, bytes]
    source: SourceInfo


class SampleRange(Protocol):
    """Which run of consecutive samples of a data set is meant."""

    @property
    def origin(self) -> str:
        """Where that is written, for messages."""

    def bounds(self, samples: int) -> tuple[int, int]:
        """Start and stop in a data set of so many samples; 0 <= start <= stop <= samples."""


class WebdatasetSource:
    """The samples of some shards of a prepared folder, by number. Make one with :meth:`open`.

    The object can be pickled (small: no samples, no file handles) and used after a fork; copies share the memory of
    the index and, in one process, the open files.

    Attributes:
        path: the folder, absolute, or its URL; or the JSONL file.
        run_reader: how samples are fetched from slow storage; None: one positioned read for each, when it is wanted.
        runs: how micro-batches read neighbours together, else; None: one by one.
        index: the packed index.
        span: first and last + 1 of the samples of the chosen shards that are read, excluded ones among them.
        split_part: the name of the split, for messages.
        fingerprint: identifies shards (name, size, number of samples, in order), the part of them that is read, and
            what is left out of it, wherever the folder is. The order of the samples comes from it.
        contents: identifies the data, too: data sets of the same names and sizes that hold other samples.
        shard_names: the chosen shards, in order.
        skipped: samples left out because a column says that they were skipped.

    Example:
        >>> source = WebdatasetSource.open("data/coco", shards=["s000.tar", "s001.tar"])
        >>> sample = source.read(len(source) - 1, parts={"jpg", "txt"})
        >>> sample.key, sample.parts["txt"]
        ('000412', b'a red bicycle')
    """

    def __init__(
        self,
        index: PackedIndex,
        *,
        path: str,
        index_path: str,
        shards: Sequence[str],
        excluded: Int64,
        split_part: str,
        span: tuple[int, int] | None = None,
        skips: str | None = None,
        store: ShardStore | None = None,
    ):
        self.path, self.split_part, self.shard_names = path, split_part, tuple(shards)
        self.index, self._index_path, self._store = index, index_path, shared_store() if store is None else store
        self.run_reader: RunReader | None = None
        self.runs: Runs | None = None
        numbers = {name: number for number, name in enumerate(index.shard_names)}
        self._shards = [numbers[name] for name in shards]
        table = index.shards.tolist()
        self._first = [table[number][3] for number in self._shards]
        self._paths = [os.path.join(folder_of_shards(path), name) for name in shards]
        self._identities = [ShardIdentity(table[number][0], table[number][1]) for number in self._shards]
        counts = [table[number + 1][3] - table[number][3] for number in self._shards]
        self._starts = [0]
        for count in counts:
            self._starts.append(self._starts[-1] + count)
        self.span = span or (0, self._starts[-1])
        start, stop = self.span
        self._excluded = excluded[(excluded >= start) & (excluded < stop)]
        self._kept: KeptSamples | None = None
        if len(self._excluded):
            self._kept = SparseExclusion(stop - start, self._excluded - start)
        without_skips = stop - start - len(self._excluded)
        self._skips, many = skips, None if skips is None else self._without_skips(skips)
        self._kept = self._kept if many is None else many  # not `or`: it may have kept nothing
        self._length = without_skips if many is None else len(many)
        self.skipped = without_skips - self._length
        self.fingerprint = choice_fingerprint(
            self.shard_names,
            self._identities,
            counts,
            self._excluded,
            self.span,
            many.digest if many is not None else "",
        )
        self.contents = contents_fingerprint(self.fingerprint, self._identities)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        shards: Sequence[str] | None = None,
        excluded_samples: Sequence[tuple[str, str]] = (),
        split_part: str = "",
        subset: SampleRange | None = None,
        skips: str | None = None,
        store: ShardStore | None = None,
    ) -> WebdatasetSource:
        """Open a prepared folder or a JSONL file; every shard is checked to be there with the size it was indexed with.

        Of more than 1,000 shards, sizes of 1,000 are checked now, and those of the others when they are first read.

        Args:
            path: the folder that holds ``.nv-meta``, or a URL that fsspec knows; or a local JSONL file.
            shards: names of the wanted shards relative to the folder, in the wanted order; None for all.
            excluded_samples: (shard, key) of samples to leave out.
            split_part: the name of the split, for messages.
            subset: the part to read. Its positions count all samples of ``shards``; the excluded ones among them are
                left out afterwards, as in Energon, so an exclusion does not move the bounds of a subset.
            skips: name of a column, such as ``"skip"``: samples that were skipped when it was measured are left out, in
                the same way. Nothing else of the order or of the other samples' places depends on it.
            store: the store to read with; None for the one that all data sets of this process share.

        Raises:
            NotPreparedError: the folder does not exist or was not prepared.
            MissingShardError, ShardChangedError: a shard is gone, or not the one that was indexed.
            ShardFormatError: the index had to be made, and a shard cannot be parsed.
            EmptyDatasetError: nothing is left to read.
            ConfigError: the subset does not fit the data set.
            DataIndexError: there is no column ``skips``, it is older than the data, or does not know these shards.
        """
        root = _plain_path(path)
        meta = local_meta(root)
        counts = shard_counts(meta)
        chosen = list(counts if shards is None else shards)
        check_known(root, chosen, counts, split_part)
        index, index_path = _remote_index(root, meta, counts) if is_remote(root) else open_index(root, counts)
        check_files(folder_of_shards(root), chosen, index)
        excluded = excluded_positions(index, chosen, excluded_samples)
        source = cls(
            index,
            path=root,
            index_path=index_path,
            shards=chosen,
            excluded=excluded,
            split_part=split_part,
            span=None if subset is None else subset.bounds(_count(index, chosen)),
            skips=skips,
            store=store,
        )
        if not len(source) and source.skipped:
            raise EmptyDatasetError(
                f"all {source.skipped} samples in {split_words(split_part)} were skipped when they were measured",
                where=root,
                fix="see what the task encoder skips, or read the data set without use_measured_skips",
            )
        if not len(source) and subset is not None:
            raise EmptyDatasetError(
                f"the subset ({subset}) of the {_count(index, chosen)} samples in {split_words(split_part)} is empty",
                where=f"{root}, subset at {subset.origin}" if subset.origin else root,
                fix="make its range wider, or leave the data set out",
            )
        if not len(source):
            raise EmptyDatasetError(
                f"there are no samples in {split_words('' if is_jsonl(root) else split_part)}",
                where=root,
                fix="a line of the file is a sample; there is none"
                if is_jsonl(root)
                else "check split_parts and exclude in .nv-meta/split.yaml",
            )
        return source

    def __len__(self) -> int:
        return self._length

    def __str__(self) -> str:
        split = f" [{self.split_part}]" if self.split_part else ""
        return f"{self.path}{split}: {self._length} samples in {len(self._shards)} shards"

    @property
    def part_names(self) -> frozenset[str]:
        """The names of all parts that any sample of the folder has."""
        return frozenset(self.index.part_names)

    def locate(self, index: int) -> tuple[int, int]:
        """(position among the chosen shards, number of the sample over all shards of the folder)."""
        if not 0 <= index < self._length:
            raise IndexError(f"sample {index} of {self._length} in {self.path}")
        if self._kept is not None:
            index = self._kept.place(index)
        index += self.span[0]
        place = bisect_right(self._starts, index) - 1
        return place, self._first[place] + index - self._starts[place]

    def locate_many(self, indices: Int64) -> tuple[Int64, Int64]:
        """:meth:`locate` for many, which have to be there."""
        if self._kept is not None:
            indices = self._kept.places(indices)
        if self.span[0]:
            indices = indices + self.span[0]
        starts, shift = self._shard_arrays
        place = starts.searchsorted(indices, "right") - 1
        return place, indices + shift[place]

    @cached_property
    def _shard_arrays(self) -> tuple[Int64, Int64]:
        """Where the chosen shards start, and how far in the folder's numbering each stands behind that."""
        starts = np.array(self._starts, dtype=np.int64)
        return starts, np.array(self._first, dtype=np.int64) - starts[:-1]

    def key(self, index: int) -> str:
        """The key of a sample, without reading it."""
        return self.index.key(self.locate(index)[1])

    def read(self, index: int, parts: Container[str] | None = None) -> RawSample:
        """Read one sample, with one positioned read (several if unwanted bytes of more than 1 MiB lie between).

        Args:
            index: 0 .. len - 1.
            parts: names of the wanted parts; None for all. Names that the sample does not have are ignored.

        Raises:
            MissingShardError, ShardChangedError, DatasetError: the shard changed after opening, or the storage failed.
        """
        place, key, wanted = self.wanted(index, parts)
        found: dict[str, bytes] = {}
        if self.run_reader is not None:
            for offset, size, name in wanted:
                found[name] = self.run_reader.read(self, index, parts, offset, size)
        elif len(wanted) == 1:
            offset, size, name = wanted[0]
            found[name] = self._store.read(self._paths[place], self._identities[place], offset, size)
        elif wanted:
            for run in _runs(wanted):
                start = run[0][0]
                span = run[-1][0] + run[-1][1] - start
                data = self._store.read(self._paths[place], self._identities[place], start, span)
                for offset, size, name in run:
                    found[name] = data[offset - start : offset - start + size]
        source = SourceInfo(
            dataset_path=self.path,
            index=index,
            shard_name=self.shard_names[place],
            file_names=tuple([f"{key}.{name}" for _, _, name in wanted]),
        )
        return RawSample(key, found, source)

    def peek(self, index: int, part: str, size: int) -> bytes | None:
        """At most the first ``size`` bytes of a part of a sample; None if the sample has no such part."""
        place, _, parts = self.wanted(index, {part})
        if not parts:
            return None
        offset, length, _ = parts[-1]  # of two parts with one name the last counts, as in read
        return self._store.read(self._paths[place], self._identities[place], offset, min(size, length))

    def wanted(self, index: int, parts: Container[str] | None) -> tuple[int, str, list[tuple[int, int, str]]]:
        """Where a sample is, without reading it: the position of its shard among the chosen ones, its key, and offset,
        size and name of each of the ``parts`` that it has."""
        place, sample = self.locate(index)
        (key, rows), names = self.index.key_and_part_rows(sample), self.index.part_names
        wanted = [
            (rows[row], rows[row + 1], names[rows[row + 2]])
            for row in range(0, len(rows), 3)
            if parts is None or names[rows[row + 2]] in parts
        ]
        return place, key, wanted

    def shard(self, place: int) -> tuple[str, ShardIdentity]:
        """Path and identity of the shard at a position among the chosen ones."""
        return self._paths[place], self._identities[place]

    def read_each(self, wanted: Iterable[tuple[tuple[str, ShardIdentity], int, int]]) -> list[bytes]:
        """Bytes of shards, which :meth:`shard` names; see :meth:`ShardStore.read_each`."""
        return self._store.read_each(wanted)

    def open_shard(self, place: int) -> RangeReader:
        """The shard at a position among the chosen ones, open; see :meth:`ShardStore.open`."""
        return self._store.open(self._paths[place], self._identities[place])

    @property
    def mean_bytes(self) -> float:
        """Bytes of shard per sample, headers and padding included."""
        return float(self.index.shards[:-1, 2].sum()) / max(1, len(self.index))

    def column(self, name: str) -> Column:
        """Values of a column, such as ``"length"`` or ``"skip"``, for these samples, as an array that stays on disk.

        Raises:
            DataIndexError: there is no such column, it is older than the data, or it has no values for some shards.
        """
        file = find_column(self.path, self.index, name)
        error = unknown_shards(file, self.shard_names, self._shards)
        if error is not None:
            raise error
        in_order = all(
            first + stop - start == following
            for first, start, stop, following in zip(
                self._first, self._starts, self._starts[1:], self._first[1:], strict=False
            )
        )
        start = self._first[0] + self.span[0] if in_order and self._kept is None else None
        fingerprint = fingerprint_of(file, self._shards)

        def numbers(indices: Int64) -> Int64:
            return self.locate_many(indices)[1]

        return Column(file, self._length, numbers, start=start, fingerprint=fingerprint)

    def _without_skips(self, name: str) -> DenseExclusion | None:
        file = find_column(self.path, self.index, name)
        error = unknown_shards(file, self.shard_names, self._shards)
        if error is not None:
            raise error
        return without_skips(file, self._first, self._starts, self.span, self._excluded)

    def __getstate__(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "index_path": self._index_path,
            "digest": self.index.digest,
            "shards": None if self.shard_names == self.index.shard_names else self.shard_names,
            "excluded": self._excluded,
            "split_part": self.split_part,
            "span": self.span,
            "skips": self._skips,
            "fingerprint": self.fingerprint,
            **({} if self.run_reader is self.runs is None else {"reading": (self.run_reader, self.runs)}),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        index, fingerprint = PackedIndex.open(state["index_path"]), state.pop("fingerprint")
        if index.digest != state.pop("digest"):
            raise ShardChangedError(
                "the data set was prepared anew while it was in use", where=state["path"], fix="start the run again"
            )
        shards = state.pop("shards")
        reading = state.pop("reading", (None, None))
        self.__init__(index, shards=index.shard_names if shards is None else shards, **state)  # type: ignore[misc]
        if self.fingerprint != fingerprint:
            raise ShardChangedError(
                "the data set was measured anew while it was in use", where=state["path"], fix="start the run again"
            )
        self.run_reader, self.runs = reading


def _plain_path(path: str | os.PathLike[str]) -> str:
    text = os.fspath(path)
    if is_remote(text):
        return text.rstrip("/")
    return os.path.abspath(os.path.expanduser(text.removeprefix("file://")))


def _remote_index(root: str, meta: str, counts: dict[str, int]) -> tuple[PackedIndex, str]:
    found = find_index(meta, counts)
    if found is None:
        raise NotPreparedError(
            "the data set has no packed index, or one that is older than its list of shards",
            where=root,
            fix="run `energon-lite prepare` on a local copy, and upload all of .nv-meta with the shards",
        )
    return found


def _count(index: PackedIndex, shards: Sequence[str]) -> int:
    """Samples of ``shards``, excluded ones too."""
    counts = {name: int(index.shards[i + 1, 3] - index.shards[i, 3]) for i, name in enumerate(index.shard_names)}
    return sum(counts[name] for name in shards)


def _runs(wanted: list[tuple[int, int, str]]) -> Iterator[list[tuple[int, int, str]]]:
    """Neighbouring parts that are read together."""
    run = wanted[:1]
    for part in wanted[1:]:
        if part[0] - (run[-1][0] + run[-1][1]) > _GAP:
            yield run
            run = []
        run.append(part)
    yield run
