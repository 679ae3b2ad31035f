"""Data sets whose samples are joined by their keys, read as one data set."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from energon_lite.config.leaf_spec import Nonmatch
from energon_lite.errors import DataIndexError, EmptyDatasetError, counted
from energon_lite.extras.energon.joins.join_table import JoinTable, join_table
from energon_lite.storage.files.stored_array import Numbers
from energon_lite.storage.read.range_cache import ReadAhead
from energon_lite.storage.read.webdataset import SampleRange, WebdatasetSource

__all__ = ["JoinedSource"]


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
        DatasetError: as :func:`~energon_lite.extras.energon.joins.join_table.join_table`.
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
                "no sample is left of the join: " + (f"{table.left_out} have no match" if table.left_out else "empty"),
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
            what = "the table of the join was removed, or made anew, while it was in use"
            raise DataIndexError(what, where=self._table_path, fix="start the run again")
        return table.rows

    def rows(self, indices: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The numbers of samples in the data sets, ``[n, data sets]``; -1: no match."""
        rows: np.ndarray[Any, np.dtype[np.int64]] = self._rows.take(np.asarray(indices) + self._start, 0)
        return rows

    def _row(self, index: int) -> list[int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)} in {self.path}")
        row: list[int] = self.rows([index])[0].tolist()
        return row

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
