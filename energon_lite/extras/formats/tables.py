"""Tables in Parquet and Arrow files as a source: a sample is a row, its parts are the columns.

Row groups (of Parquet) and batches (of Arrow) are the unit of reading. A process keeps the most recently used decoded
ones (:mod:`.held_files`), and the rows of a batch of samples that lie in one are taken out of it together. So with
``max_samples_per_sequence`` and ``shuffle_buffer_size`` files are read about once, one row group after the other;
without them, in a full permutation, each row costs the reading of its row group.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from glob import escape, glob, has_magic
from itertools import pairwise
from typing import Any

import numpy as np

from energon_lite.documents.paths import is_url, missing_file_fix, static_folder
from energon_lite.errors import (
    DataIndexError,
    DatasetError,
    EmptyDatasetError,
    NotPreparedError,
    UsageError,
    did_you_mean,
    listed,
)
from energon_lite.extras.formats.arrow_files import ArrowTable, ParquetTable
from energon_lite.extras.formats.held_files import damaged, held_tables
from energon_lite.storage.files.byte_ranges import url_files

#: Words for splits in names of files and folders, as used by Hugging Face.
_SPLITS = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "dev": "val",
    "test": "test",
    "testing": "test",
}


def find_files(path: str, extensions: tuple[str, ...], split_part: str) -> list[str]:
    """Return the files of a split, sorted, among those that a path matches: a file, a pattern (``data/*.parquet``, with
    ``**`` for any folders), or a folder with everything in it.

    A file belongs to a split if the name of the file, or of one of its folders (below the fixed part of the path),
    contains the split's name: ``train-00000-of-00010.parquet``, ``val/0.parquet``; ``validation`` and ``dev`` are
    ``val``. Files without such a name belong to all splits. A single file, or a pattern whose files are all of one
    split, is read for any split. An empty name of a split stands for all files.

    Raises:
        NotPreparedError: no file matches.
        EmptyDatasetError: no file belongs to the split.
    """
    base, files = _matching(path, extensions)
    if not files:
        fix = f"files named {listed([f'*{extension}' for extension in extensions])} are read"
        if not is_url(path) and not has_magic(path):
            fix = missing_file_fix(path, fix)
        raise NotPreparedError("there are no files of this data set", where=path, fix=fix)
    splits = {file: _split_of(file[len(base) :]) for file in files}
    known = {split for split in splits.values() if split}
    if not split_part or len(files) == 1 or not known or (len(known) == 1 and has_magic(path)):
        return files
    wanted = _SPLITS.get(split_part, split_part)
    matching = [file for file, split in splits.items() if split in (wanted, None)]
    if not matching:
        raise EmptyDatasetError(
            f"no file belongs to split {split_part!r}",
            where=path,
            fix=f"there are files of {listed(sorted(known))}: set split_part, or write a pattern for those you mean",
        )
    return matching


def _matching(path: str, extensions: tuple[str, ...]) -> tuple[str, list[str]]:
    """A folder, and all files below it that a path matches."""
    base = static_folder(path)
    if is_url(path):
        if not has_magic(path):
            if path.endswith(extensions):
                return base, [path]
            base = path.rstrip("/")
        names = url_files(base).list_files(base, "")
        patterns = path[len(base) + 1 :].split("/") if has_magic(path) else ["**"]
        fitting = [name for name in names if name.endswith(extensions) and _fits(name.split("/"), patterns)]
        return base, sorted(f"{base}/{name}" for name in fitting)
    if has_magic(path) and not os.path.exists(path):
        paths = glob(path, recursive=True)
    elif os.path.isdir(path):
        paths = glob(os.path.join(escape(path), "**", "*"), recursive=True)
    else:
        paths = [path]
    return base, sorted(file for file in paths if file.endswith(extensions) and os.path.isfile(file))


def _fits(names: Sequence[str], patterns: Sequence[str]) -> bool:
    """Return True if the parts of a path match those of a pattern; ``**`` matches any number of parts. As in ``glob``,
    a part that begins with a dot is matched only by a pattern that does."""
    if not patterns or not names:
        return not names and all(pattern == "**" for pattern in patterns)
    if names[0].startswith(".") and not patterns[0].startswith("."):
        return patterns[0] == "**" and _fits(names, patterns[1:])
    if patterns[0] == "**":
        return _fits(names, patterns[1:]) or _fits(names[1:], patterns)
    return fnmatchcase(names[0], patterns[0]) and _fits(names[1:], patterns[1:])


def _split_of(name: str) -> str | None:
    """The split that a relative name contains; the last such word counts."""
    for part in reversed(name.split("/")):
        for word in re.split(r"[-_.\s]", part.lower()):
            if word in _SPLITS:
                return _SPLITS[word]
    return None


#: Extensions of the files.
EXTENSIONS = (".parquet", ".arrow", ".feather")
#: Mark in the metadata of a text column whose values become bytes, to be decoded by the name of the part (as JSON).
BYTES_MARK = b"energon_lite.bytes"
#: Most footers that are read at the same time.
_TOGETHER = 16


def open_source(path: str, split_part: str) -> TableSource:
    """Open the rows of a file, of the files of a pattern, or of a folder."""
    path = path.partition("://")[2] if path.startswith(("parquet://", "arrow://")) else path
    files = find_files(path, EXTENSIONS, split_part)
    with ThreadPoolExecutor(_TOGETHER) as pool:
        return TableSource(list(pool.map(_table, files)))


def _table(path: str) -> ParquetTable | ArrowTable:
    return ParquetTable(path) if path.endswith(".parquet") else ArrowTable(path)


class TableSource:
    """The rows of some files, one file after the other.

    Args:
        files: the files; all have the same columns.
        names: the columns that are read; None: all.

    Raises:
        DatasetError: the columns of the files differ.

    Example:
        >>> source = open_source("data/train-*.parquet", "train")
        >>> source.read(7)["caption"]
        'a red bicycle'
    """

    portable = True

    def __init__(self, files: Sequence[ParquetTable | ArrowTable], names: frozenset[str] | None = None):
        self.files = tuple(files)
        first = self.files[0]
        for file in self.files:
            if set(file.names) != set(first.names):
                others = sorted(set(file.names) ^ set(first.names))
                raise DatasetError(
                    f"the files do not have the same columns: {listed(others)} are in one only",
                    where=file.path,
                    fix=f"make it like {first.path}, or read it as a data set of its own",
                )
        self._columns = None if names is None else [name for name in first.names if name in names]
        self._names = first.names if self._columns is None else self._columns
        self.part_names = frozenset(self._names)
        rows = [count for file in self.files for count in file.group_rows]
        self._starts = np.concatenate([[0], np.cumsum(rows, dtype=np.int64)])
        self._groups = [
            (place, group) for place, file in enumerate(self.files) for group in range(len(file.group_rows))
        ]
        self.identity = hashlib.sha256(" ".join(file.digest for file in self.files).encode()).hexdigest()
        decoded = sum(file.column_bytes[name] for file in self.files for name in self.part_names)
        self.mean_bytes = decoded / max(1, len(self))
        self.shard_names = tuple(file.path.rpartition("/")[2] for file in self.files)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def select(self, names: frozenset[str]) -> TableSource:
        """Return the same rows with these columns only."""
        return TableSource(self.files, names)

    def locate(self, index: int) -> tuple[int, int]:
        """Return the number of a row's file, and of its row group in that file."""
        return self._groups[int(np.searchsorted(self._starts, index, side="right")) - 1]

    def read(self, index: int) -> Mapping[str, Any]:
        return {name: values[0] for name, values in self.read_many([index]).items()}

    def read_many(self, indices: Sequence[int]) -> dict[str, list[Any]]:
        """Read rows by columns; the rows of one row group are taken out of it at once."""
        wanted = np.asarray(indices, np.int64)
        groups = np.searchsorted(self._starts, wanted, side="right") - 1
        columns: dict[str, list[Any]] = {name: [None] * len(wanted) for name in self._names}
        for group in np.unique(groups).tolist():
            mine = np.flatnonzero(groups == group)
            for name, values in self._take(group, wanted[mine]).items():
                for place, value in zip(mine.tolist(), values, strict=True):
                    columns[name][place] = value
        return columns

    def column(self, name: str) -> Any:
        """Return the lengths in a column: its integers, or the lengths of its lists.

        Raises:
            DataIndexError: there is no such column.
            UsageError: the column has other values.
        """
        names = self.files[0].names
        if name not in names:
            known = f"there are: {listed(names)}; name one that has lengths (length_column=...)"
            raise DataIndexError(
                f"the files have no column {name!r}",
                where=self.files[0].path,
                fix=did_you_mean(name, names, known, always=True),
            )
        blocks = []
        for file in self.files:
            for group in range(len(file.group_rows)):
                blocks.append(lengths_of(file.read_group(group, [name]), name, file.path))
        return np.concatenate(blocks) if blocks else np.zeros(0, np.int64)

    def _take(self, group: int, wanted: Any) -> dict[str, list[Any]]:
        rows = wanted - self._starts[group]
        place, number = self._groups[group]
        file = self.files[place]
        key = (file, number, None if self._columns is None else tuple(self._columns))
        table = held_tables().get(key, lambda: file.read_group(number, self._columns))
        taken = _rows(table, rows)
        try:
            columns = {name: values_of(taken.column(name)) for name in table.column_names}
        except ValueError as error:  # also an Arrow error, or text that is not UTF-8
            raise damaged(file.path, error, f"row group {number}") from error
        for name in columns:
            if BYTES_MARK in (table.field(name).metadata or ()):
                columns[name] = [value.encode() if isinstance(value, str) else value for value in columns[name]]
        return columns


def _rows(table: Any, rows: Any) -> Any:
    """Take rows out of a table."""
    import pyarrow as pa

    if (np.diff(rows) == 1).all():
        return table.slice(int(rows[0]), len(rows))
    try:
        return table.take(rows)
    except pa.ArrowNotImplementedError:  # of views of text or bytes, which Polars writes
        return pa.concat_tables([table.slice(row, 1) for row in rows.tolist()])


# -- conversion of Arrow columns -------------------------------------------------------------------------------------
#
# Numbers, texts, bytes and times become Python objects, structs become dicts, lists become lists. Lists of numbers,
# such as tokens, become numpy arrays (writable, with their own memory), which is a hundred times faster.


def values_of(column: Any) -> list[Any]:
    """Return the values of a ``ChunkedArray`` or ``Array``.

    Example:
        >>> values_of(pyarrow.array([[1, 2], [3]]))
        [array([1, 2]), array([3])]
    """
    chunks = getattr(column, "chunks", None)
    if chunks is not None:
        return [value for chunk in chunks for value in values_of(chunk)]
    column = _plain(column)
    arrays = _number_lists(column)
    return column.to_pylist() if arrays is None else arrays


def lengths_of(table: Any, name: str, path: str) -> Any:
    """Return the lengths in a column of a table as int64: its integers, or the lengths of its lists.

    Raises:
        UsageError: it has neither, or some are missing.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    column = table.column(name)
    kind = column.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        column = pc.list_value_length(column)
    if not pa.types.is_integer(column.type) or column.null_count:
        raise UsageError(
            f"column {name!r} has no lengths: it is neither of integers nor of lists, or some are missing",
            where=path,
            fix="name another one (length_column=...)",
        )
    return np.asarray(column.to_numpy(), np.int64)


def _plain(column: Any) -> Any:
    """The values of a column inside Arrow's extension types and dictionaries."""
    import pyarrow as pa

    if isinstance(column, pa.ExtensionArray):
        return _plain(column.storage)
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def _number_lists(column: Any) -> list[Any] | None:
    """The rows of a column of lists of numbers, those without missing ones as arrays; None: it has another type."""
    import pyarrow as pa

    kind = column.type
    is_fixed = pa.types.is_fixed_size_list(kind)
    if not (is_fixed or pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return None
    if not (pa.types.is_integer(kind.value_type) or pa.types.is_floating(kind.value_type)):
        return None
    numbers = column.flatten()
    if column.null_count or numbers.null_count:
        if len(column) == 1:
            return list(column.to_pylist())
        return [value for row in range(len(column)) for value in values_of(column.slice(row, 1))]  # each by itself
    values = numbers.to_numpy(zero_copy_only=False).copy()
    if is_fixed:
        return list(values.reshape(len(column), kind.list_size))
    offsets = column.offsets.to_numpy()
    bounds = (offsets - offsets[0]).tolist()
    return [values[start:stop] for start, stop in pairwise(bounds)]
