"""One value per sample of a data set, in a file of its own beside the packed index.

A column knows what it belongs to: it carries the digest of the index it was made for, and the time of each shard's last
change. So a column that is older than its data is recognised (:meth:`ColumnFile.fits`), and, because it also knows each
shard by itself, the next measuring takes the values of unchanged shards from it.

The file is an array file (:mod:`energon_lite.storage.files.array_file`) with three arrays::

    values         one number for each sample of the index, in its order
    shards         int64 [shards, 6]: size, head checksum, time of change in ns, samples, 1 if its values are known
                   (else they are 0), crc32 of its values
    shard_names    bytes: relative to the data set, separated by NUL
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon_lite.storage.files.array_file import FileKind, writing
from energon_lite.storage.files.atomic_file import remove_leftovers
from energon_lite.storage.files.stored_array import open_arrays
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.tar.tar_scan import Int64

__all__ = ["ColumnFile", "shard_table", "write_column_file"]

_COLUMN_FILE = FileKind(b"ENRGLCOL", 3, "column of a data set", "remove the file, and measure again")

#: Columns of the table of shards: those by which a shard is recognised come first.
_IDENTITY, _KNOWN, _CHECKSUM, _WIDTH = 4, 4, 5, 6


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
        command: what the user has to run to make the column again.

    Raises:
        DataIndexError: it is damaged, or of a format that is not known here.
        FileNotFoundError: there is no such file.
    """

    def __init__(self, path: str):
        arrays, meta = open_arrays(path, _COLUMN_FILE)
        try:
            self.values, self.shards = arrays["values"], arrays["shards"][:]
            names = arrays["shard_names"][:].tobytes().decode("utf-8", "surrogateescape")
            self.name, self.digest, self.maker, self.code, self.command = (
                meta[name] for name in ("name", "digest", "maker", "code", "command")
            )
        except (KeyError, TypeError):
            raise _COLUMN_FILE.damaged(path, "its table is incomplete") from None
        self.path = path
        self.shard_names = tuple(names.split("\0")) if len(self.shards) else ()

    def fits(self, index: PackedIndex) -> bool:
        """Whether each value belongs to the sample of the same number in ``index``."""
        if self.digest != index.digest or len(self.values) != len(index):
            return False
        return bool(np.array_equal(self.shards[:, :_IDENTITY], shard_table(index)[:, :_IDENTITY]))

    def known(self, row: int) -> bool:
        """Whether the values of the ``row``-th shard were measured."""
        return bool(self.shards[row, _KNOWN])

    def fingerprint(self, rows: Sequence[int]) -> str:
        """Hash of the values of some shards."""
        text = " ".join(map(str, self.shards[rows, _CHECKSUM].tolist()))
        return hashlib.blake2b(f"{self.values.dtype.kind} {text}".encode(), digest_size=16).hexdigest()

    def unchanged(self, index: PackedIndex) -> dict[int, NDArray[Any]]:
        """The known values of shards that ``index`` has as well, by their row in ``index``."""
        identities = [tuple(row) for row in shard_table(index)[:, :_IDENTITY].tolist()]
        rows = {named: row for row, named in enumerate(zip(index.shard_names, identities, strict=True))}
        found: dict[int, NDArray[Any]] = {}
        stop = 0
        for name, shard in zip(self.shard_names, self.shards.tolist(), strict=True):
            start, stop = stop, stop + shard[3]
            row = rows.get((name, tuple(shard[:_IDENTITY])))
            # A shard of unknown time cannot be told from one that has changed.
            if row is not None and shard[_KNOWN] and shard[2]:
                found[row] = self.values[start:stop]
        return found


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
) -> None:
    """Write a column, atomically, one shard in memory at a time.

    Args:
        path: the file.
        name: of the column.
        index: what it belongs to.
        blocks: for each shard its values, or None: they are not known.
        dtype: such as ``"<i4"``; the values must fit.
        maker, code, command: see :class:`ColumnFile`.
    """
    table = shard_table(index)

    def raw() -> Iterator[memoryview]:
        for row, block in enumerate(blocks):
            values = np.zeros(table[row, 3], dtype=dtype) if block is None else np.ascontiguousarray(block, dtype=dtype)
            assert len(values) == table[row, 3]  # one value a sample, or all later ones belong to others
            data = values.view(np.uint8).data
            table[row, _KNOWN], table[row, _CHECKSUM] = block is not None, zlib.crc32(data)
            yield data

    meta = {"name": name, "digest": index.digest, "maker": dict(maker), "code": code, "command": command}
    remove_leftovers(os.path.dirname(path))
    with writing(path, _COLUMN_FILE, meta) as file:
        file.stream("values", dtype, (), raw())
        file.add("shards", table)
        names = "\0".join(index.shard_names).encode("utf-8", "surrogateescape")
        file.add("shard_names", np.frombuffer(names, dtype=np.uint8))
