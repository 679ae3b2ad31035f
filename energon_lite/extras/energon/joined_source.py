"""Data sets whose samples are joined by their keys: read as one data set, and made by a joiner."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from energon_lite.config.leaf_spec import LeafSpec, Nonmatch
from energon_lite.errors import DataIndexError, EmptyDatasetError, SampleError, UsageError, counted, field_of
from energon_lite.extras.energon.joins import JoinTable, join_table, joiner, read_join
from energon_lite.hooks import TaskEncoder
from energon_lite.loading.leaves import open_source, sample_loader
from energon_lite.loading.makers.outcomes import set_restore_key
from energon_lite.loading.metadataset_keys import JoinGuest
from energon_lite.samples import Sample
from energon_lite.samples.sample import SourceList
from energon_lite.storage.files.shard_store import ShardRange
from energon_lite.storage.files.stored_array import Numbers
from energon_lite.storage.read.opened_source import AnySource
from energon_lite.storage.read.ranges import ReadAhead
from energon_lite.storage.read.runs import Ahead
from energon_lite.storage.read.sample_reader import SampleReader
from energon_lite.storage.read.webdataset import Columns, RawSample, SampleRange, WebdatasetSource
from energon_lite.storage.samples.field_map import SampleLoader


class JoinedSource:
    """The samples of a first data set, each with the samples of the same key in other data sets. It has the interface
    of :class:`~energon_lite.storage.read.webdataset.WebdatasetSource`. Key, shard and number of a sample are those of
    the first data set.

    Args:
        members: the data sets, the first one first.
        nonmatch: for each of them the treatment of samples that have no match in it; ignored for the first.
        subset: the part of the joined samples that is read.

    Attributes:
        members: the data sets.
        fingerprint, contents: the text that decides the order, and the one that identifies the data.
        skipped: always 0; samples that are left out for want of a match are not counted here.

    Raises:
        DatasetError: as :func:`~energon_lite.extras.energon.joins.join_table`.
        EmptyDatasetError: there is no sample.
        ConfigError: the subset does not fit.
    """

    skipped = 0

    def __init__(
        self, members: Sequence[WebdatasetSource], nonmatch: Sequence[Nonmatch], subset: SampleRange | None = None
    ):
        self.members = tuple(members)
        first = self.members[0]
        table = join_table(self.members, nonmatch)
        self._table_path = table.path
        self._digest = table.digest
        self._start, self._stop = (0, len(table.rows)) if subset is None else subset.bounds(len(table.rows))
        self.path = first.path
        self.split_part = first.split_part
        if self._start >= self._stop:
            raise EmptyDatasetError(
                "the join has no samples: " + (f"{table.left_out} have no match" if table.left_out else "empty"),
                where=" + ".join(map(str, self.members)),
                fix="check that the data sets have the same keys, or make the subset wider",
            )
        self.part_names = frozenset[str]().union(*(member.part_names for member in self.members))
        self.mean_bytes = sum(member.mean_bytes for member in self.members)
        read = [member.fingerprint for member in self.members]
        read.append(f"joined {table.digest} {self._start} {self._stop}")
        self.fingerprint = hashlib.sha256("\n".join(read).encode()).hexdigest()
        every = [self.fingerprint, *(member.contents for member in self.members)]
        self.contents = hashlib.sha256("\n".join(every).encode()).hexdigest()

    def __len__(self) -> int:
        return self._stop - self._start

    def __str__(self) -> str:
        return f"{' + '.join(map(str, self.members))}: {counted(len(self), 'sample')} joined"

    def __copy__(self) -> JoinedSource:
        """A copy with members of its own, whose way of reading may be changed."""
        own = object.__new__(type(self))
        vars(own).update(vars(self), members=tuple(copy.copy(member) for member in self.members))
        return own

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_rows"}

    @property
    def read_ahead(self) -> ReadAhead | None:
        """The read-ahead settings of the first data set that has any; None: no data set is fetched ahead."""
        return next((member.read_ahead for member in self.members if member.read_ahead is not None), None)

    @property
    def shard_names(self) -> tuple[str, ...]:
        """The names of the shards of the first data set."""
        return self.members[0].shard_names

    @cached_property
    def _rows(self) -> Numbers:
        """The rows of the table; the file is opened again where this object was unpickled.

        Raises:
            DataIndexError: it is not the one that this object was made with.
        """
        try:
            table = JoinTable.open(self._table_path)
        except FileNotFoundError:
            table = None
        if table is None or table.digest != self._digest:
            what = "the table of the join was removed, or made again, while it was in use"
            raise DataIndexError(what, where=self._table_path, fix="start the run again")
        return table.rows

    def rows(self, indices: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The numbers of samples in the data sets, ``[n, data sets]``; -1: no match."""
        return self._rows.take(np.asarray(indices) + self._start, 0)

    def _row(self, index: int) -> list[int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)} in {self.path}")
        return self.rows([index])[0].tolist()

    def locate(self, index: int) -> tuple[int, int]:
        """Return (position among the shards of the first data set, number of the sample over all of its shards)."""
        return self.members[0].locate(self._row(index)[0])

    def key(self, index: int) -> str:
        """The key of a sample; reads the index only."""
        return self.members[0].key(self._row(index)[0])

    def column(self, name: str) -> Any:
        """Raise an error: a joined sample is none of the samples that were measured.

        Raises:
            DataIndexError: always.
        """
        raise DataIndexError(
            f"joined data sets have no column {name!r}: their samples are not those that were measured",
            where=str(self),
            fix="give length_column=None, so that lengths are counted when samples are encoded",
        )


@dataclass(frozen=True)
class JoinedReader:
    """Reader of joined samples, with one read for each data set. The parts of a joined sample are the samples of the
    data sets, named by their number; a data set without a match gives None.

    Args:
        source: the joined data sets.
        readers: a reader for each of them.
    """

    source: JoinedSource
    readers: Sequence[SampleReader]

    def read(self, indices: Sequence[int]) -> Columns | None:
        """Read the samples ``indices`` (at least one) by columns; None: those of the first data set are not alike.

        Raises:
            MissingShardError, ShardChangedError, DatasetError: a shard changed after opening, or the storage failed.
        """
        rows = self.source.rows(indices)
        primary = self.readers[0].read(rows[:, 0].tolist())
        if primary is None:
            return None
        names: dict[str, list[RawSample | None]] = {"0": [*_samples(self.readers[0], rows[:, 0].tolist(), primary)]}
        for number, reader in enumerate(self.readers[1:], 1):
            mine = [index for index in rows[:, number].tolist() if index >= 0]
            samples = iter(_samples(reader, mine, reader.read(mine)) if mine else ())
            names[str(number)] = [None if index < 0 else next(samples) for index in rows[:, number].tolist()]
        return Columns(primary.keys, primary.shards, primary.names, names)

    def sample(self, index: int) -> RawSample:
        """Read one sample.

        Raises:
            IndexError: there is no such sample.
            MissingShardError, ShardChangedError, DatasetError: as :meth:`read`.
        """
        row = self.source.rows([index])[0].tolist()
        samples = [None if at < 0 else reader.sample(at) for reader, at in zip(self.readers, row, strict=True)]
        assert samples[0] is not None
        parts = {str(number): sample for number, sample in enumerate(samples)}
        return RawSample(samples[0].key, parts, samples[0].source)

    @property
    def ahead(self) -> Ahead | None:
        """The reader-ahead of the first data set that has any, whose settings apply; None: none is fetched ahead."""
        return next((reader.ahead for reader in self.readers if reader.ahead is not None), None)

    def ranges(self, indices: Sequence[int]) -> list[ShardRange]:
        """The ranges that these samples request from slow storage."""
        columns = zip(self.readers, self.source.rows(indices).T, strict=True)
        return [span for reader, numbers in columns for span in reader.ranges(numbers[numbers >= 0].tolist())]


def _samples(reader: SampleReader, indices: Sequence[int], found: Columns | None) -> Iterator[RawSample]:
    """The samples of ``indices``; with None for ``found`` they are read one by one."""
    if found is None:
        yield from map(reader.sample, indices)
        return
    sources = SourceList(reader.source.path, indices, found.shards, found.keys, found.names)
    for key, source, *parts in zip(found.keys, sources, *found.parts.values(), strict=True):
        yield RawSample(key, dict(zip(found.parts, parts, strict=True)), source)


@dataclass(frozen=True)
class JoinedLoader:
    """Maker of joined samples; a :class:`~energon_lite.storage.samples.field_map.Loader`.

    Args:
        members: the loader of each data set.
        joiner: a class derived from Sample, whose ``from_joined`` is called, or a function; it gets the samples in
            order, or by name.
        names: names of the data sets; None: they have none.
        subflavors: labels of the join as a whole; each sample has those of its data set.
    """

    members: Sequence[SampleLoader]
    joiner: type[Sample] | Callable[..., Any]
    names: Sequence[str] | None = None
    subflavors: Mapping[str, Any] = field(default_factory=dict)

    #: All parts are read; the loaders of the members choose theirs.
    parts: ClassVar[frozenset[str] | None] = None

    @property
    def sample_type(self) -> type[Sample] | None:
        """The class of the samples; None: the joiner is a function."""
        return self.joiner if isinstance(self.joiner, type) and issubclass(self.joiner, Sample) else None

    def reader(self, source: AnySource) -> JoinedReader:
        """Return the reader of the parts that samples are made of."""
        assert isinstance(source, JoinedSource)
        both = zip(source.members, self.members, strict=True)
        return JoinedReader(source, [loader.reader(member) for member, loader in both])

    def load(self, raw: RawSample, restore_key: tuple[Any, ...]) -> Any:
        """Make one sample.

        Args:
            raw: the joined sample; its parts are the samples of the data sets, or None.
            restore_key: becomes ``__restore_key__``.

        Raises:
            SampleError: one of the samples failed; or the joiner returned no sample.
        """
        parts: Mapping[str, Any] = raw.parts
        samples = [
            None if part is None else loader.load(part, restore_key)
            for loader, part in zip(self.members, parts.values(), strict=True)
        ]
        kind = self.sample_type
        join: Callable[..., Any] = self.joiner if kind is None else kind.from_joined
        if self.names is None:
            joined = join(*samples)
        else:
            joined = join(**dict(zip(self.names, samples, strict=True)))
        set_restore_key(joined, restore_key)
        if field_of(joined, "__restore_key__") != restore_key:
            raise SampleError(
                f"the joiner returned a {type(joined).__name__}",
                where=raw.key,
                fix="return a Sample, such as Kind.derive_from(first, ...), or a dict with the entries of the first",
            )
        return joined


def _source(spec: LeafSpec) -> JoinedSource:
    assert spec.join is not None
    return JoinedSource([_member(member) for member in spec.join.members], spec.join.nonmatch, spec.subset)


def _member(spec: LeafSpec) -> WebdatasetSource:
    source = open_source(spec)
    if not isinstance(source, WebdatasetSource):
        what = "a source of your own cannot be joined: its keys are unknown"
        raise UsageError(what, where=spec.path, fix="join data sets of tar or JSONL files")
    return source


def _loader(spec: LeafSpec, source: AnySource, encoder: TaskEncoder, trust_code: bool) -> JoinedLoader:
    join = spec.join
    assert join is not None
    pairs = zip(join.members, source.members, strict=True)
    members = [sample_loader(member, its_source, encoder, trust_code)[1] for member, its_source in pairs]
    return JoinedLoader(members, joiner(join.node, trust_code=trust_code), join.names, dict(spec.subflavors))


JOIN = JoinGuest(read_join, _source, _loader)
