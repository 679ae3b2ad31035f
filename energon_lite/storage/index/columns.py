"""Columns of a data set, with one value per sample, such as its length in tokens: storage and reading.

Their files are ``.nv-meta/energon_lite.columns/<name>.col`` or, where that cannot be written, in the user's cache.
``energon-lite measure`` and ``energon-lite prepare --length-field`` write them; :func:`write_column` stores values that
are known already.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon_lite.errors import UsageError, counted
from energon_lite.storage.index.column_file import (
    LENGTH,
    ColumnFile,
    Ragged,
    RaggedFile,
    column_path,
    writable_folder,
    write_column_file,
)
from energon_lite.storage.index.index_cache import open_index
from energon_lite.storage.tar_members import Int64

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

#: Values that are read at a time.
_CHUNK = 1 << 20


class Column:
    """The values of a column for the samples of a source; they are read from the file, and verified, on demand.

    Behaves like a read-only array of shape ``[len(source)]``: ``column[i]``, ``column[a:b]``, ``column[indices]`` give
    numpy values, ``numpy.asarray(column)`` reads all. Memory does not depend on the number of samples.

    Args:
        file: the file of the column.
        length: number of samples.
        positions: returns the places of samples in the file by their numbers.
        shards: rows of the source's shards in the file.
        start: place of the first sample, if all others follow it; None: they need not.

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
        shards: Sequence[int],
        start: int | None = None,
    ):
        self.name = file.name
        self.maker = file.maker
        self.fingerprint = file.fingerprint(shards)
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
        return f"{type(self).__name__}({self.name!r}, {counted(self._length, 'sample')}, {self.dtype})"

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


class RaggedColumn(Column):
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

    def __init__(self, file: RaggedFile, length: int, positions: Callable[[Int64], Int64], shards: Sequence[int]):
        super().__init__(file, length, positions, shards)
        self.width = file.values.shape[1]
        self._take = file.take

    def __getitem__(self, key: Any) -> Ragged:
        """Return the values of samples, given an array of their numbers or a slice."""
        numbers = np.arange(*key.indices(self._length)) if isinstance(key, slice) else np.asarray(key, dtype=np.int64)
        if numbers.ndim != 1 or (numbers.size and not 0 <= numbers.min() <= numbers.max() < self._length):
            raise IndexError(f"samples {key!r} of {self._length} in column {self.name!r}")
        return self._take(self._positions(numbers))


def length_column(name: str) -> str:
    """Return the column that a name stands for: ``tokens`` and ``num_tokens`` are aliases of the measured length."""
    return LENGTH if name in _LENGTHS else name


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
    blocks = [values[start:stop] for start, stop in pairwise(bounds)]
    path = column_path(writable_folder(folder), name)
    dtype = values.dtype.newbyteorder("<").str
    write_column_file(path, name, index, lambda: blocks, dtype=dtype, maker=maker or {"by": "write_column"})
    return path
