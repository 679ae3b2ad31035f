"""A source of any format as a data set."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import numpy as np

from energon_lite.documents.paths import is_url
from energon_lite.errors import (
    DataIndexError,
    DatasetError,
    EmptyDatasetError,
    ShardChangedError,
    counted,
)
from energon_lite.samples import SourceInfo
from energon_lite.storage.files.shard_store import COUNTS, Range, Shard, ShardStore
from energon_lite.storage.read.ranges import ReadAhead
from energon_lite.storage.read.sample_choice import DenseExclusion
from energon_lite.storage.read.source import OpenSource, SampleFilter, Source
from energon_lite.storage.read.webdataset import Columns, RawSample, SampleRange, WebdatasetSource

T = TypeVar("T")
#: By the name of a part: the column of the source that it is made of, and the function applied to a sample's value.
Renaming = Mapping[str, tuple[str, Callable[[Any], Any]]]


class AnySource(Protocol):
    """Source that a leaf reads from: tar shards, a JSONL file, a source of any format, or several that a guest joins.

    Attributes:
        members: the data sets of tar shards or JSONL files that its bytes come from.
        fingerprint, contents: the text that decides the order, and the one that identifies the data.
        skipped: number of samples that are left out, because they were skipped when they were measured.

    The other attributes are those of :class:`~energon_lite.storage.read.webdataset.WebdatasetSource`.
    """

    @property
    def path(self) -> str: ...

    @property
    def members(self) -> tuple[WebdatasetSource, ...]: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def contents(self) -> str: ...

    @property
    def skipped(self) -> int: ...

    @property
    def part_names(self) -> frozenset[str]: ...

    @property
    def mean_bytes(self) -> float: ...

    @property
    def shard_names(self) -> Sequence[str]: ...

    @property
    def read_ahead(self) -> ReadAhead | None: ...

    def __len__(self) -> int: ...

    def key(self, index: int) -> str:
        """The key of a sample."""

    def locate(self, index: int) -> tuple[int, int]:
        """Return (position of a sample's shard in ``shard_names``, number of the sample over all shards)."""

    def column(self, name: str) -> Any:
        """The measured column ``name``: one value for each sample."""


class OpenedSource:
    """A registered source of any format as a data set. It has the interface of
    :class:`~energon_lite.storage.read.webdataset.WebdatasetSource`, so the same code reads both. Each process opens the
    source for itself, unless the source is ``portable``: connections do not survive a fork.

    Args:
        path: the URL of the source.
        open: the function that opens it.
        split_part: the name of the split.
        subset: the part of the source that is read.
        filters: conditions on its columns; samples have to meet all of them.

    Raises:
        EmptyDatasetError: there is no sample.
        ConfigError: the subset does not fit.
        DataIndexError: the source lacks a column that a filter needs.
        UsageError: a filter is no condition on columns.
    """

    members: tuple[WebdatasetSource, ...] = ()
    read_ahead = runs = ahead = None
    skipped = 0
    contents = ""

    def __init__(
        self,
        path: str,
        open: OpenSource,
        split_part: str,
        subset: SampleRange | None = None,
        filters: Sequence[SampleFilter] = (),
    ):
        self.path = path
        self.split_part = split_part
        self._open = open
        self._parts: frozenset[str] | None = None
        self._renaming: Renaming | None = None
        self._opened: Source | None = None
        source = self._source()
        identity = getattr(source, "identity", None)
        if not (isinstance(identity, str) and identity):
            raise DatasetError(
                f"the identity of the source, a {type(source).__name__}, is {identity!r}",
                where=path,
                fix="return a text that changes with its samples: it decides the order, and guards saved states",
            )
        self._identity = identity
        self._start, self._stop = (0, len(source)) if subset is None else subset.bounds(len(source))
        self._kept = self._left(filters) if filters else None
        if not len(self):
            raise EmptyDatasetError(
                f"the source has no samples in {split_part!r}" + " that meet the filter" * (self._kept is not None),
                where=path,
                fix="leave it out, or give another split",
            )
        self.fingerprint = f"{identity} {self._start}:{self._stop}"
        if self._kept is not None:
            self.fingerprint += f" kept {self._kept.digest}"
        self.part_names = frozenset[str](getattr(source, "part_names", ()))
        self.mean_bytes = float(getattr(source, "mean_bytes", 0.0))
        self.shard_names: Sequence[str] = getattr(source, "shard_names", ("",))

    def selected(self, parts: frozenset[str] | None, renaming: Renaming | None = None) -> OpenedSource:
        """Return the same samples with other parts.

        Args:
            parts: names of the parts that are read; None: all.
            renaming: parts that are made of columns of the source; None: parts keep the names that the source gives
                them.
        """
        if parts is None and renaming is None:
            return self
        other: OpenedSource = object.__new__(type(self))
        vars(other).update(vars(self), _parts=parts, _renaming=renaming, _opened=None)
        source = self._source() if getattr(self._opened, "portable", False) and self._parts is None else None
        other._opened = other._select(source) if source is not None else None
        if renaming is not None:
            other.part_names = frozenset(renaming)
        return other

    def __getstate__(self) -> dict[str, Any]:
        keeps = getattr(self._opened, "portable", False)
        return vars(self) | {"_opened": self._opened if keeps else None}

    def __len__(self) -> int:
        return self._stop - self._start if self._kept is None else len(self._kept)

    def __str__(self) -> str:
        return f"{self.path} [{self.split_part}]: {counted(len(self), 'sample')}"

    def key(self, index: int) -> str:
        return str(self._place(index))

    def locate(self, index: int) -> tuple[int, int]:
        locate, place = getattr(self._source(), "locate", None), self._place(index)
        return (0, place) if locate is None else locate(place)

    def _place(self, index: int) -> int:
        """The number of a sample within the source."""
        return self._start + (index if self._kept is None else self._kept.place(index))

    def _left(self, filters: Sequence[SampleFilter]) -> DenseExclusion | None:
        """The samples that meet all filters; None if all of them do."""
        kept = np.ones(self._stop - self._start, dtype=bool)
        for sample_filter in filters:
            kept &= sample_filter.opened(self.path, None, self._whole_column)(0, len(kept))
        return None if kept.all() else DenseExclusion(len(kept), [kept])

    def sample(self, index: int) -> RawSample:
        """Read one sample.

        Raises:
            DatasetError: the source does not return parts.
        """
        counted = COUNTS.bytes_read
        stored = self._source().read(self._place(index))
        if not isinstance(stored, Mapping):
            raise DatasetError(
                f"read returned a {type(stored).__name__}", where=self.path, fix="return a dict of parts by name"
            )
        if COUNTS.bytes_read == counted:  # otherwise the source reads through our files, which count
            COUNTS.bytes_read += sum([len(value) for value in stored.values() if isinstance(value, bytes)])
        parts = {name: value if make is None else make(value) for name, value, make in self._chosen(stored)}
        key = self.key(index)
        names = tuple([f"{key}.{name}" for name in parts])
        shard = self.shard_names[self.locate(index)[0]]
        info = SourceInfo(dataset_path=self.path, index=index, shard_name=shard, file_names=names)
        return RawSample(key, parts, info)

    def read(self, indices: Sequence[int]) -> Columns | None:
        """Read many samples together, by columns; None: the source reads samples one by one only."""
        source = self._source()
        read_many = getattr(source, "read_many", None)
        if read_many is None:
            return None
        wanted, counted = [self._place(index) for index in indices], COUNTS.bytes_read
        stored = read_many(wanted)
        if COUNTS.bytes_read == counted:  # otherwise the source reads through our files, which count
            columns = (values for values in stored.values() if len(values) and isinstance(values[0], bytes))
            COUNTS.bytes_read += sum(len(value) for values in columns for value in values if isinstance(value, bytes))
        parts = {
            name: values if make is None else [make(value) for value in values]
            for name, values, make in self._chosen(stored)
        }
        if any(len(values) != len(wanted) for values in parts.values()):
            raise DatasetError("read_many returned columns of another length", where=self.path)
        names, locate = self.shard_names, getattr(source, "locate", None)
        if locate is None or len(names) == 1:
            shards = [names[0]] * len(wanted)
        else:
            shards = [names[locate(index)[0]] for index in wanted]
        return Columns(list(map(str, wanted)), shards, tuple(parts), parts)

    def column(self, name: str) -> Any:
        """The measured column ``name``: one value for each sample.

        Raises:
            DataIndexError: the source has no such column.
        """
        values = self._whole_column(name)
        return values if self._kept is None else np.asarray(values)[self._kept.places(np.arange(len(self)))]

    def _whole_column(self, name: str) -> Any:
        """A column for all samples of the subset, before filters."""
        column = getattr(self._source(), "column", None)
        if column is None:
            raise DataIndexError(
                f"the source has no column {name!r}", where=self.path, fix="give it a method column(name)"
            )
        values, count = np.asarray(column(name)), len(self._source())
        if values.shape != (count,):
            raise DataIndexError(
                f"column {name!r} of the source has the shape {list(values.shape)}, and the source {count} samples",
                where=self.path,
                fix="return a number for each sample",
            )
        return values[self._start : self._stop]

    def _source(self) -> Source:
        source = self._opened
        if source is None or (self._process != os.getpid() and not getattr(source, "portable", False)):
            source = self._open(self.path, self.split_part)
            if self._identity and source.identity != self._identity:
                raise ShardChangedError(
                    f"the source is {source.identity!r} now, and was {self._identity!r} when the data set was opened",
                    where=self.path,
                    fix="start the run again: the samples have changed",
                )
            source = self._opened = self._select(source)
            self._process = os.getpid()
        return source

    _process = 0
    _identity = ""

    def _select(self, source: Source) -> Source:
        """The source with the needed columns only, if it supports a selection of columns."""
        select = getattr(source, "select", None)
        if select is None or (self._parts is None and self._renaming is None):
            return source
        wanted = self._parts or frozenset()
        if self._renaming is not None:
            wanted = frozenset(column for name, (column, _) in self._renaming.items() if self._is_wanted(name))
        return select(wanted)

    def _chosen(self, stored: Mapping[str, T]) -> list[tuple[str, T, Callable[[Any], Any] | None]]:
        """The wanted parts: name, the stored value or column that it is made of, and the function applied to values."""
        if self._renaming is None:
            return [(name, value, None) for name, value in stored.items() if self._is_wanted(name)]
        renamed = self._renaming.items()
        return [(name, stored[column], make) for name, (column, make) in renamed if self._is_wanted(name)]

    def _is_wanted(self, part: str) -> bool:
        return self._parts is None or part in self._parts


#: A source of one data set, which has parts of its own; not a source that a guest makes of several.
SingleSource = WebdatasetSource | OpenedSource


# -- digests of data -------------------------------------------------------------------------------------------------

#: Evenly spread places in the data set that are read.
_PLACES = 4
#: Bytes that are read at each place.
_BYTES = 1 << 16
#: Shards that the bytes of a place may come from.
_SHARDS = 2
#: Most data sets in a store that are read at the same time.
_TOGETHER = 16


def data_digests(sources: Sequence[AnySource]) -> list[str]:
    """:func:`data_digest` of each source; those in a store are read at the same time."""
    if not any(is_url(source.path) for source in sources):
        return [data_digest(source) for source in sources]
    with ThreadPoolExecutor(_TOGETHER) as pool:
        return list(pool.map(data_digest, sources))


def data_digest(source: AnySource) -> str:
    """Return a digest of the samples that a source reads, independent of its folder's place: of its fingerprint and of
    some of their bytes (up to 256 KiB, in a few shards; all bytes of small data sets).

    Two data sets that were made in the same way, of records of one size, have equal fingerprints. Their samples differ
    nearly everywhere, so four reads are enough. Copies, and shards that were written again, have the same digest.

    Raises:
        MissingShardError, ShardChangedError, DatasetError: a shard cannot be read.
    """
    if not isinstance(source, WebdatasetSource):  # its fingerprint and its members distinguish it from others
        every = [source.fingerprint, *map(data_digest, source.members)]
        return hashlib.sha256("\n".join(every).encode()).hexdigest()
    choice, store = source.choice, ShardStore()  # a store of its own, which leaves no file open
    digest = hashlib.sha256(source.fingerprint.encode())
    firsts = sorted({len(source) * place // _PLACES for place in range(_PLACES)})
    for number, stop in pairwise([*firsts, len(source)]):
        left, shards = _BYTES, set[Shard]()
        while number < stop and left > 0:
            group: list[Range] = []
            while number < stop:  # samples that fit into one read
                *_, ranges = choice.wanted(number, None)
                if ranges:
                    shard, offset, _ = ranges[0]
                    if group and (shard != group[0][0] or not 0 <= offset - group[0][1] < left):
                        break
                    if len(shards | {shard}) > _SHARDS:
                        break
                    shards.add(shard)
                number, group = number + 1, group + ranges
            if not group:
                break
            start = min(offset for _, offset, _ in group)
            size = min(left, max(offset + size for _, offset, size in group) - start)
            [data] = store.fetch([(group[0][0], start, size)])
            for _, offset, length in group:
                digest.update(f"{length}\n".encode() + data[offset - start : offset - start + length])
            left -= max(size, 1)
    return digest.hexdigest()
