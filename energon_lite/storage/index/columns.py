"""Columns of a data set, with one value per sample, such as its length in tokens: storage and reading.

Their files are ``.nv-meta/energon_lite.columns/<name>.col`` or, where that cannot be written, in the user's cache.
``energon-lite measure`` and ``energon-lite prepare --length-field`` write them; :func:`write_column` stores values that
are known already.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from glob import glob
from itertools import pairwise
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from energon_lite import entry_points
from energon_lite.errors import DataIndexError, UsageError, counted
from energon_lite.storage.index.column_file import ColumnFile, Ragged, RaggedFile, write_column_file
from energon_lite.storage.index.index_cache import first_writable, index_places, open_index
from energon_lite.storage.index.nv_meta import meta_path
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.tar.tar_scan import Int64

__all__ = [
    *("CHECKSUMS", "FAILED", "LENGTH", "SKIP", "SKIPPED", "Column", "RaggedColumn", "check_column_name"),
    *(
        "column_folders",
        "column_path",
        "find_column",
        "length_column",
        "stored_columns",
        "writable_folder",
        "write_column",
    ),
]

#: Folder of the columns in ``.nv-meta``.
COLUMNS_FOLDER = "energon_lite.columns"

#: The measured length of a sample in tokens (0 if it has none).
LENGTH = "length"
#: Other names of this column, in filters and weights.
_LENGTHS = ("tokens", "num_tokens")
#: The outcome of measuring a sample: 0, SKIPPED or FAILED.
SKIP = "skip"
#: Value of ``skip``: the task encoder skipped the sample.
SKIPPED = 1
#: Value of ``skip``: the sample could not be read, decoded or encoded.
FAILED = 2

#: The ragged column of the crc32 of each part, as int32. If it exists, parts are verified when they are read.
CHECKSUMS = "checksums"

F = TypeVar("F", bound=ColumnFile)

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\Z")
#: Values that are read at a time.
_CHUNK = 1 << 20


class Column:
    """The values of a column for the samples of a source; they are read from the file, and verified, on demand.

    Behaves like a read-only array of shape ``[len(source)]``: ``column[i]``, ``column[a:b]``, ``column[indices]`` give
    numpy values, ``numpy.asarray(column)`` reads all. Memory does not depend on the number of samples.

    Attributes:
        name: name of the column.
        dtype, shape: type and shape of the values, ``(samples,)``.
        fingerprint: 32 hexadecimal characters; equal for equal values of the source's shards, on every machine.
        maker: plain data that describes the maker of the values.

    Example:
        >>> lengths = source.column("length")
        >>> lengths[np.array([5, 0, 7])]
        array([812, 64, 130], dtype=int32)
    """

    def __init__(
        self,
        file: ColumnFile,
        length: int,
        positions: Callable[[Int64], Int64],
        *,
        start: int | None,
        fingerprint: str,
    ):
        self.name = file.name
        self.maker = file.maker
        self.fingerprint = fingerprint
        self.dtype = file.values.dtype
        self.shape = (length,)
        self._values = file.values
        self._length = length
        self._positions = positions
        self._start = start

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return self._slice(range(self._length)[key])
        index = np.asarray(key)
        if index.dtype == bool or not (np.issubdtype(index.dtype, np.integer) or not index.size):
            raise TypeError(f"a column is indexed by numbers, slices and arrays of integers, not {index.dtype}")
        index = index.astype(np.int64)
        if index.size and (index.min() < -self._length or index.max() >= self._length):
            raise IndexError(f"sample {key!r} of {self._length} in column {self.name!r}")
        places = self._positions(np.where(index < 0, index + self._length, index).reshape(-1))
        return self._values.take(places, 0).reshape(index.shape)[()]

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, self._length, _CHUNK):
            yield from self[start : start + _CHUNK]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        values = np.asarray(self[:], dtype=dtype)
        return values.copy() if copy else values

    def __repr__(self) -> str:
        return f"Column({self.name!r}, {counted(self._length, 'sample')}, {self.dtype})"

    def _slice(self, wanted: range) -> NDArray[Any]:
        if self._start is not None and wanted:  # neighbours in the file
            low, high = sorted((wanted[0], wanted[-1]))
            return self._values[self._start + low : self._start + high + 1][:: wanted.step]
        values = np.empty(len(wanted), dtype=self.dtype)
        for place in range(0, len(wanted), _CHUNK):
            part = wanted[place : place + _CHUNK]
            numbers = np.arange(part.start, part.stop, part.step, dtype=np.int64)
            values[place : place + len(part)] = self._values.take(self._positions(numbers), 0)
        return values


class RaggedColumn:
    """The values of a ragged column for the samples of a source, such as the sizes of images; read on demand.

    Attributes:
        name: name of the column.
        width: width of the values, ``[n, width]``.
        fingerprint, maker: as for a :class:`Column`.

    Example:
        >>> counts, sizes = source.ragged_column("image_sizes")[np.array([5, 0])]
        >>> counts, sizes  # sample 5 has two images, sample 0 has none
        (array([2, 0]), array([[480, 640], [224, 224]], dtype=int32))
    """

    def __init__(self, file: RaggedFile, length: int, positions: Callable[[Int64], Int64], *, fingerprint: str):
        self.name = file.name
        self.maker = file.maker
        self.fingerprint = fingerprint
        self.width = file.values.shape[1]
        self._file = file
        self._length = length
        self._positions = positions

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, key: Any) -> Ragged:
        """Return the values of samples, given an array of their numbers or a slice."""
        numbers = np.arange(*key.indices(self._length)) if isinstance(key, slice) else np.asarray(key, dtype=np.int64)
        if numbers.ndim != 1 or (numbers.size and not 0 <= numbers.min() <= numbers.max() < self._length):
            raise IndexError(f"samples {key!r} of {self._length} in column {self.name!r}")
        return self._file.take(self._positions(numbers))

    def __repr__(self) -> str:
        return f"RaggedColumn({self.name!r}, {counted(self._length, 'sample')})"


def length_column(name: str) -> str:
    """Return the column that a name stands for: ``tokens`` and ``num_tokens`` are aliases of the measured length."""
    return LENGTH if name in _LENGTHS else name


def check_column_name(name: str) -> str:
    """Return ``name`` if it is a valid name of a column.

    Raises:
        UsageError: it is not valid.
    """
    if not _NAME.match(name) or len(name) > 100:
        raise UsageError(
            f"a column cannot be called {name!r}", fix="use up to 100 letters, digits, '_', '.' and '-', such as length"
        )
    return name


def column_folders(root: str) -> tuple[str, str]:
    """The folders that may hold columns of a data set: one next to the data, one in the user's cache."""
    cached = os.path.splitext(index_places(root)[1])[0]
    return meta_path(root, COLUMNS_FOLDER), cached + ".columns"


def column_path(folder: str, name: str, suffix: str = ColumnFile.suffix) -> str:
    """Path of the file of a column."""
    return os.path.join(folder, check_column_name(name) + suffix)


def writable_folder(root: str) -> str:
    """Return the first of :func:`column_folders` that can be written, and make it if necessary.

    Raises:
        DataIndexError: neither can be written.
    """

    def made(folder: str) -> str:
        os.makedirs(folder, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "no permission")
        return folder

    return first_writable(root, "columns", column_folders(root), "measure", made)


@overload
def stored_columns(root: str, name: str) -> list[ColumnFile]: ...
@overload
def stored_columns(root: str, name: str, kind: type[F]) -> list[F]: ...
def stored_columns(root: str, name: str, kind: type[Any] = ColumnFile) -> list[Any]:
    """Open the readable files of a column, the one next to the data first; they may be older than the data."""
    files = []
    for folder in column_folders(root):
        try:
            files.append(kind(column_path(folder, name, kind.suffix)))
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            continue
    return files


@overload
def find_column(
    root: str, index: PackedIndex, name: str, rows: Sequence[int], *, asked: Sequence[str] = ()
) -> ColumnFile: ...
@overload
def find_column(
    root: str, index: PackedIndex, name: str, rows: Sequence[int], kind: type[F], *, asked: Sequence[str] = ()
) -> F: ...
def find_column(
    root: str,
    index: PackedIndex,
    name: str,
    rows: Sequence[int],
    kind: type[Any] = ColumnFile,
    *,
    asked: Sequence[str] = (),
) -> ColumnFile:
    """Find the column that belongs to ``index`` and has values for the shards in these rows of it.

    Args:
        asked: the data that is read, as arguments of ``energon-lite measure``, for messages; empty: all of ``root``.

    Raises:
        DataIndexError: the column does not exist, is older than the data, or lacks values for some shards.
    """
    stored: list[ColumnFile] = stored_columns(root, name, kind)
    for file in stored:
        if file.fits(index):
            missing = [index.shard_names[row] for row in rows if not file.known(row)]
            if not missing:
                return file
            raise DataIndexError(
                f"the column {name!r} has no values for {len(missing)} of {counted(len(rows), 'shard')}, "
                f"such as {missing[0]!r}",
                where=file.path,
                fix=f"measure these as well: {_again(file.command, root, asked)}",
            )
    if stored:
        raise DataIndexError(
            f"the column {name!r} is older than the data set: shards have changed, come or gone since it was made",
            where=stored[0].path,
            fix=f"make it again, only changed shards are read: {_again(stored[0].command, root, asked)}",
        )
    folders, suffix = column_folders(root), kind.suffix
    names = {path.removesuffix(suffix) for folder in folders for path in glob("*" + suffix, root_dir=folder)}
    there = f"; it has {', '.join(sorted(names))}" if names else ""
    what = "ragged column" if kind is RaggedFile else "column"
    raise DataIndexError(f"the data set has no {what} {name!r}{there}", where=root, fix=_cure(root, name))


def _again(command: str, root: str, asked: Sequence[str]) -> str:
    """The command that made a column, changed to the data that is read now (perhaps another split, or a blend)."""
    program, words = shlex.split(command)[:2], shlex.split(command)[3:]  # between them is the data that was measured
    if program != ["energon-lite", "measure"]:
        return command or "see energon-lite measure -h"
    if not asked or "--task-encoder" not in words:  # without an encoder, a whole folder is measured
        asked, replaced = [root], ["--split-parts"]
    else:
        replaced = ["--split-parts", "--dataset-config", "--split-config", "--subflavors"]
    kept = [word for at, word in enumerate(words) if word not in replaced and (not at or words[at - 1] not in replaced)]
    return shlex.join([*program, *asked, *kept])


def _cure(root: str, name: str) -> str:
    """The command that makes a column of that name."""
    for guest in entry_points.columns().values():
        if name in guest.names:
            options = (f"--{option} {form.metavar}".strip() for option, form in guest.options.items())
            return f"run `energon-lite measure {root}` with {' or '.join(options)}"
    if name == LENGTH or name.endswith(f".{LENGTH}"):
        return (
            f"run `energon-lite measure {root} --task-encoder module:Class`, or, for lengths that need no encoder, "
            f"`energon-lite prepare --force-overwrite --length-field PART {root}`"
        )
    return (
        f"run `energon-lite measure {root} --task-encoder module:Class` with an encoder whose sample_costs returns it, "
        f"or, if it is in a part, `energon-lite measure {root} --column {name}=PART`"
    )


def write_column(
    root: str | os.PathLike[str], name: str, values: NDArray[Any], *, maker: Mapping[str, Any] | None = None
) -> str:
    """Store known values as a column of a prepared data set; return the path of its file.

    Args:
        root: the prepared folder.
        name: name of the column, such as ``"length"``.
        values: ``[samples]``, one number for each sample of the folder, over all shards in the order of
            ``.nv-meta/.info.json``, whatever the splits are.
        maker: plain data that describes the origin of the values.

    Raises:
        UsageError: the values are no numbers, or not one for each sample.

    Example:
        >>> write_column("data/coco", "length", np.load("lengths.npy"))
        'data/coco/.nv-meta/energon_lite.columns/length.col'
    """
    folder = os.path.abspath(os.fspath(root))
    index, _ = open_index(folder)
    values = np.asarray(values)
    if values.shape != (len(index),) or values.dtype.kind not in "iufb":
        raise UsageError(
            f"{values.dtype} values of shape {list(values.shape)} for {counted(len(index), 'sample')}",
            where=folder,
            fix=f"give one number for each sample of the folder: shape [{len(index)}]",
        )
    bounds = index.shards[:, 3].tolist()
    blocks = (values[start:stop] for start, stop in pairwise(bounds))
    path = column_path(writable_folder(folder), name)
    dtype = values.dtype.newbyteorder("<").str
    write_column_file(path, name, index, blocks, dtype=dtype, maker=maker or {"by": "write_column"})
    return path
