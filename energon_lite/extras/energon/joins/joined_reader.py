"""Reading of samples that are joined by their keys, with one read for each data set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from energon_lite.extras.energon.joins.joined_source import JoinedSource
from energon_lite.samples import SourceInfo
from energon_lite.storage.files.shard_store import ShardRange
from energon_lite.storage.read.range_cache import ReadAhead
from energon_lite.storage.read.sample_reader import Columns, SampleReader
from energon_lite.storage.read.webdataset import RawSample

__all__ = ["JoinedReader"]


class JoinedReader:
    """Reader of joined samples, with one read for each data set. The parts of a joined sample are the samples of the
    data sets, named by their number; a data set without a match gives None.

    Args:
        source: the joined data sets.
        readers: a reader for each of them.
    """

    def __init__(self, source: JoinedSource, readers: Sequence[SampleReader]):
        self.source = source
        self.readers = tuple(readers)

    def read(self, indices: Sequence[int]) -> Columns | None:
        """Read the samples ``indices`` (at least one) by columns; None: those of the first data set are not alike.

        Raises:
            MissingShardError, ShardChangedError, DatasetError: a shard changed after opening, or the storage failed.
        """
        rows = self.source.rows(indices)
        primary = self.readers[0].read(rows[:, 0].tolist())
        if primary is None:
            return None
        columns: list[list[RawSample | None]] = [[*_samples(self.readers[0], rows[:, 0].tolist(), primary)]]
        for reader, numbers in zip(self.readers[1:], rows.T[1:], strict=True):
            there = np.flatnonzero(numbers >= 0).tolist()
            matches: list[RawSample | None] = [None] * len(indices)
            mine = numbers[there].tolist()
            samples = _samples(reader, mine, reader.read(mine)) if mine else ()
            for place, sample in zip(there, samples, strict=True):
                matches[place] = sample
            columns.append(matches)
        names = {str(number): column for number, column in enumerate(columns)}
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
    def ahead(self) -> JoinedReader | None:
        """This reader if any of the data sets is fetched ahead, otherwise None."""
        return None if self.source.read_ahead is None else self

    @property
    def settings(self) -> ReadAhead:
        """The settings of the read-ahead."""
        settings = self.source.read_ahead
        assert settings is not None
        return settings

    def ranges(self, indices: Sequence[int]) -> list[ShardRange]:
        """The ranges that these samples request from slow storage."""
        columns = zip(self.readers, self.source.rows(indices).T, strict=True)
        return [span for reader, numbers in columns for span in reader.ranges(numbers[numbers >= 0].tolist())]


def _samples(reader: SampleReader, indices: Sequence[int], found: Columns | None) -> Iterator[RawSample]:
    """The samples of ``indices``; with None for ``found`` they are read one by one."""
    if found is None:
        yield from map(reader.sample, indices)
        return
    path = reader.source.path
    names = found.names
    columns = [*found.parts.values()]
    for index, key, shard, *parts in zip(indices, found.keys, found.shards, *columns, strict=True):
        files = tuple([f"{key}.{name}" for name in names])
        info = SourceInfo(dataset_path=path, index=index, shard_name=shard, file_names=files)
        yield RawSample(key, dict(zip(found.parts, parts, strict=True)), info)
