"""Lance data sets (``data.lance``) as a source: a sample is a row. Needs the package ``pylance``."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from energon_lite.errors import DataIndexError, DatasetError, FatalSampleError, listed
from energon_lite.extras.formats.tables import lengths_of, values_of
from energon_lite.imports import optional_imports

#: The first process that used Lance, among this one and its ancestors by fork.
_used_by: int | None = None


def open_source(path: str, split_part: str) -> LanceSource:
    """Open the rows of the newest version of a Lance data set. It has no splits."""
    return LanceSource(path.removeprefix("lance://"))


class LanceSource:
    """The rows of a Lance data set.

    Args:
        path: its folder or URL.
        names: the columns that are read; None: all.
        version: version of the data set; None: the newest.

    Raises:
        UsageError: ``pylance`` is not installed.
        DatasetError: the data set cannot be opened.
    """

    portable = True

    def __init__(self, path: str, names: frozenset[str] | None = None, version: int | None = None):
        self.path = path if os.path.isdir(path) or "://" in path else os.path.abspath(path)
        self._opened: tuple[int, Any] | None = None
        self._version: int | None = version
        dataset = self._dataset()
        self._version = int(dataset.version)
        self._columns = [name for name in dataset.schema.names if names is None or name in names]
        self.part_names = frozenset(self._columns)
        self._length = int(dataset.count_rows())
        fragments = " ".join(str(fragment.metadata) for fragment in dataset.get_fragments())
        text = f"{self._length} {dataset.schema} {fragments}"
        self.identity = hashlib.sha256(text.encode()).hexdigest()
        self.shard_names = (self.path.rstrip("/").rpartition("/")[2],)

    def __len__(self) -> int:
        return self._length

    def select(self, names: frozenset[str]) -> LanceSource:
        """Return the same rows with these columns only."""
        return LanceSource(self.path, names, self._version)

    def read(self, index: int) -> Mapping[str, Any]:
        return {name: values[0] for name, values in self.read_many([index]).items()}

    def read_many(self, indices: Sequence[int]) -> dict[str, list[Any]]:
        """Read rows by columns: one request to Lance, which supports random access."""
        try:
            table = self._dataset().take(list(indices), columns=self._columns)
        except (OSError, ValueError, RuntimeError) as error:
            raise DatasetError(f"rows cannot be read: {error}", where=self.path, fix="see if it is whole") from error
        return {name: values_of(table.column(name)) for name in table.column_names}

    def column(self, name: str) -> Any:
        """Return the lengths in a column: its integers, or the lengths of its lists.

        Raises:
            DataIndexError: there is no such column.
            UsageError: the column has other values.
        """
        dataset = self._dataset()
        if name not in dataset.schema.names:
            fix = f"there are: {listed(dataset.schema.names)}"
            raise DataIndexError(f"the data set has no column {name!r}", where=self.path, fix=fix)
        return lengths_of(dataset.to_table(columns=[name]), name, self.path)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_opened": None}

    def _dataset(self) -> Any:
        global _used_by
        if self._opened is None or self._opened[0] != os.getpid():
            if _used_by not in (None, os.getpid()):
                raise FatalSampleError(
                    "Lance does not work in processes that are forked from one that uses it: its threads are gone",
                    where=self.path,
                    fix="get_savable_loader(dataset, start_method='spawn')",
                )
            _used_by = os.getpid()
            with optional_imports("lance", "Lance data sets need the package pylance", self.path):
                import lance
            try:
                opened = lance.dataset(self.path, version=self._version)
            except (OSError, ValueError, RuntimeError) as error:
                raise DatasetError(f"it cannot be opened: {error}", where=self.path, fix="check the path") from error
            self._opened = os.getpid(), opened
        return self._opened[1]
