"""One value per sample of a data set, in a file of its own beside the packed index.

A column knows what it belongs to: it carries the digest of the index it was made for, and the time of each shard's last
change. So a column that is older than its data is recognised (:meth:`ColumnFile.fits`), and, because it also knows each
shard by itself, the next measuring takes the values of unchanged shards from it.

The file is an array file (:mod:`energon_lite.storage.files.array_file`) with three arrays::

    values         one number for each sample of the index, in its order
    shards         int64 [shards, 6]: size, head checksum, time of change in ns, samples, number of the maker of its
                   values (0: they are not known, and 0), crc32 of its values
    shard_names    bytes: relative to the data set, separated by NUL

A ragged column has any number of values for each sample, such as the sizes of its images. In its file, ``values`` are
those of all samples one after the other, with a width, ``[values, width]``, and there is a fourth array::

    ends           int64: where the values of each sample end in ``values``
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from energon_lite.storage.files.array_file import ArrayWriter, FileKind, writing
from energon_lite.storage.files.atomic_file import remove_leftovers
from energon_lite.storage.files.stored_array import open_arrays
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.tar.tar_scan import Int64

__all__ = ["ColumnFile", "Made", "Ragged", "RaggedFile", "shard_table", "write_column_file", "write_ragged_file"]

_CURE = "remove the file, and measure again"
_COLUMN_FILE = FileKind(b"ENRGLCOL", 3, "column of a data set", _CURE)
_RAGGED_FILE = FileKind(b"ENRGLRAG", 1, "ragged column of a data set", _CURE)

#: Columns of the table of shards: those by which a shard is recognised come first.
_IDENTITY, _KNOWN, _CHECKSUM, _WIDTH = 4, 4, 5, 6

#: By what values are made: plain data, and the hash of code.
Made = tuple[Mapping[str, Any], str]


class Ragged(NamedTuple):
    """Any number of values for each of some samples.

    Attributes:
        counts: int64 ``[samples]``, how many values each sample has.
        values: ``[sum of counts, width]``, those of the first sample first.
    """

    counts: Int64
    values: NDArray[Any]


class ColumnFile:
    """A column on disk. Values that are damaged are found out, and raised, when they are asked for.

    Args:
        path: the file.

    Attributes:
        path: the file.
        name: of the column.
        digest: of the index that its values belong to.
        values: ``[samples]``, over all shards of the data set; they are read as they are asked for.
        shards: ``[shards, 6]``, see the module's text.
        shard_names: in the order of the values.
        maker: plain data that says by what the values were made; equal makers give equal values.
        code: hash of the maker's code, empty if there is none.
        makers: that maker, with its code, and those of shards that it has not measured: of another split, say.
        command: what the user has to run to make the column again.

    Raises:
        DataIndexError: it is damaged, or of a format that is not known here.
        FileNotFoundError: there is no such file.
    """

    kind: ClassVar[FileKind] = _COLUMN_FILE
    suffix: ClassVar[str] = ".col"

    def __init__(self, path: str):
        arrays, meta = open_arrays(path, self.kind)
        try:
            self.values, self.shards = arrays["values"], arrays["shards"][:]
            #: One row for each sample.
            self.rows = arrays.get("ends", self.values)
            names = arrays["shard_names"][:].tobytes().decode("utf-8", "surrogateescape")
            self.name, self.digest, self.maker, self.code, self.command = (
                meta[name] for name in ("name", "digest", "maker", "code", "command")
            )
            self.makers: list[Made] = [
                (self.maker, self.code),
                *((made, code) for made, code in meta.get("others", ())),
            ]
            if (self.shards[:, _KNOWN] > len(self.makers)).any():
                raise KeyError("others")
        except (KeyError, TypeError, ValueError):
            raise self.kind.damaged(path, "its table is incomplete") from None
        self.path = path
        self.shard_names = tuple(names.split("\0")) if len(self.shards) else ()

    def fits(self, index: PackedIndex) -> bool:
        """Whether each value belongs to the sample of the same number in ``index``."""
        if self.digest != index.digest or len(self.rows) != len(index):
            return False
        return bool(np.array_equal(self.shards[:, :_IDENTITY], shard_table(index)[:, :_IDENTITY]))

    def known(self, row: int) -> bool:
        """Whether the values of the ``row``-th shard were measured."""
        return bool(self.shards[row, _KNOWN])

    def fingerprint(self, rows: Sequence[int]) -> str:
        """Hash of the values of some shards."""
        text = " ".join(map(str, self.shards[rows, _CHECKSUM].tolist()))
        return hashlib.blake2b(f"{self.values.dtype.kind} {text}".encode(), digest_size=16).hexdigest()

    def unchanged(self, index: PackedIndex) -> dict[int, tuple[Any, Made]]:
        """The known values of shards that ``index`` has as well, and by what they were made, by their row in
        ``index``."""
        return {row: (self.block(start, stop), made) for row, (start, stop, made) in self._unchanged(index).items()}

    def block(self, start: int, stop: int) -> Any:
        """The values of neighbouring samples."""
        return self.values[start:stop]

    def _unchanged(self, index: PackedIndex) -> dict[int, tuple[int, int, Made]]:
        """First sample and the one behind the last of these shards, and by what they were measured."""
        identities = [tuple(row) for row in shard_table(index)[:, :_IDENTITY].tolist()]
        rows = {named: row for row, named in enumerate(zip(index.shard_names, identities, strict=True))}
        found: dict[int, tuple[int, int, Made]] = {}
        stop = 0
        for name, shard in zip(self.shard_names, self.shards.tolist(), strict=True):
            start, stop = stop, stop + shard[3]
            row = rows.get((name, tuple(shard[:_IDENTITY])))
            # A shard of unknown time cannot be told from one that has changed.
            if row is not None and shard[_KNOWN] and shard[2]:
                found[row] = start, stop, self.makers[shard[_KNOWN] - 1]
        return found


class RaggedFile(ColumnFile):
    """A ragged column on disk: :class:`ColumnFile` for any number of values of each sample.

    Attributes:
        values: ``[values, width]``, those of all samples one after the other.
    """

    kind = _RAGGED_FILE
    suffix = ".ragged"

    def block(self, start: int, stop: int) -> Ragged:
        """The values of neighbouring samples."""
        ends = self.rows[max(0, start - 1) : stop]
        ends = ends if start else np.concatenate([[0], ends])
        counts, first = np.diff(ends), int(ends[0])
        return Ragged(counts, self.values[first : int(ends[-1])])

    def take(self, samples: Int64) -> Ragged:
        """The values of these samples."""
        starts = np.where(samples > 0, self.rows.take(np.maximum(samples - 1, 0), 0), 0)
        counts = self.rows.take(samples, 0) - starts
        before = np.cumsum(counts) - counts
        places = np.repeat(starts - before, counts) + np.arange(int(counts.sum()))
        return Ragged(counts, self.values.take(places, 0))


def shard_table(index: PackedIndex) -> Int64:
    """The table of shards of a column for ``index``, in which nothing is known yet."""
    table = np.zeros((len(index.shard_names), _WIDTH), dtype=np.int64)
    table[:, :2] = index.shards[:-1, :2]
    table[:, 2] = index.shard_times
    table[:, 3] = np.diff(index.shards[:, 3])
    return table


def write_column_file(
    path: str,
    name: str,
    index: PackedIndex,
    blocks: Iterable[NDArray[Any] | None],
    *,
    dtype: str,
    maker: Mapping[str, Any],
    code: str = "",
    command: str = "",
    others: Mapping[int, Made] = MappingProxyType({}),
) -> None:
    """Write a column, atomically, one shard in memory at a time.

    Args:
        path: the file.
        name: of the column.
        index: what it belongs to.
        blocks: for each shard its values, or None: they are not known.
        dtype: such as ``"<i4"``; the values must fit.
        maker, code, command: see :class:`ColumnFile`.
        others: by row, of shards whose values were made by something else.
    """
    table, makers = shard_table(index), _Makers(others)

    def raw() -> Iterator[memoryview]:
        for row, block in enumerate(blocks):
            values = np.zeros(table[row, 3], dtype=dtype) if block is None else np.ascontiguousarray(block, dtype=dtype)
            assert len(values) == table[row, 3]  # one value a sample, or all later ones belong to others
            data = values.view(np.uint8).data
            table[row, _KNOWN], table[row, _CHECKSUM] = makers.number(row, block is not None), zlib.crc32(data)
            yield data

    meta = {"name": name, "digest": index.digest, "maker": dict(maker), "code": code, "command": command, **makers.meta}
    remove_leftovers(os.path.dirname(path))
    with writing(path, _COLUMN_FILE, meta) as file:
        file.stream("values", dtype, (), raw())
        _finish(file, index, table)


def write_ragged_file(
    path: str,
    name: str,
    index: PackedIndex,
    blocks: Callable[[], Iterable[Ragged | None]],
    *,
    width: int,
    dtype: str,
    maker: Mapping[str, Any],
    code: str = "",
    command: str = "",
    others: Mapping[int, Made] = MappingProxyType({}),
) -> None:
    """Write a ragged column, as :func:`write_column_file` does another one.

    Args:
        path, name, index, dtype, maker, code, command, others: see there.
        blocks: gives for each shard its values, or None: they are not known. It is called twice.
        width: values ``[n, width]``.
    """
    table, makers = shard_table(index), _Makers(others)

    def raw() -> Iterator[memoryview]:
        for row, block in enumerate(blocks()):
            if block is not None:
                data = np.ascontiguousarray(block.values, dtype=dtype).reshape(-1).view(np.uint8).data
                assert len(data) == int(block.counts.sum()) * width * np.dtype(dtype).itemsize
                table[row, _KNOWN], table[row, _CHECKSUM] = makers.number(row, True), zlib.crc32(data)
                yield data

    def ends() -> Iterator[memoryview]:
        end = 0
        for row, block in enumerate(blocks()):
            counts = np.zeros(table[row, 3], dtype=np.int64) if block is None else block.counts
            assert len(counts) == table[row, 3]
            if block is not None:  # the same values may be those of other samples
                table[row, _CHECKSUM] = zlib.crc32(counts.astype("<i8").data, int(table[row, _CHECKSUM]))
            found = end + np.cumsum(counts, dtype="<i8")
            end = int(found[-1]) if len(found) else end
            yield found.view(np.uint8).data

    meta = {"name": name, "digest": index.digest, "maker": dict(maker), "code": code, "command": command, **makers.meta}
    remove_leftovers(os.path.dirname(path))
    with writing(path, _RAGGED_FILE, meta) as file:
        file.stream("values", dtype, (width,), raw())
        file.stream("ends", "<i8", (), ends())
        _finish(file, index, table)


class _Makers:
    """The other makers of a column that is written, by number; the first one is its own."""

    def __init__(self, others: Mapping[int, Made]):
        plain = {row: [dict(settings), code] for row, (settings, code) in others.items()}
        makers = [one for number, one in enumerate(plain.values()) if one not in list(plain.values())[:number]]
        self._numbers = {row: 2 + makers.index(one) for row, one in plain.items()}
        self.meta = {"others": makers} if makers else {}

    def number(self, row: int, is_known: bool) -> int:
        return self._numbers.get(row, 1) if is_known else 0


def _finish(file: ArrayWriter, index: PackedIndex, table: Int64) -> None:
    """Write what both kinds of columns end with."""
    file.add("shards", table)
    names = "\0".join(index.shard_names).encode("utf-8", "surrogateescape")
    file.add("shard_names", np.frombuffer(names, dtype=np.uint8))
