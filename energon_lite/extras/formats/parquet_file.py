"""A Parquet file: the contents of its footer, and its row groups, read one at a time."""

from __future__ import annotations

import hashlib
import os
import threading
from functools import partial
from typing import Any

from energon_lite.errors import EnergonLiteError, ShardChangedError, ShardFormatError
from energon_lite.extras.formats.arrow_package import import_arrow
from energon_lite.storage.files.byte_ranges import RangedFile, read_bytes, size_of
from energon_lite.storage.files.remote_files import is_remote

__all__ = ["ParquetTable", "damaged"]

#: The first and last bytes of a file.
_MAGIC = b"PAR1"
#: Bytes at the end of a file that are read first; they contain most footers.
_TAIL = 1 << 16


class ParquetTable:
    """A Parquet file. It can be pickled, and used after a fork.

    Args:
        path: the file, or its URL.

    Attributes:
        group_rows: the number of rows of each row group.
        names: names of the top-level columns.
        digest: digest of the footer, which has row counts, sizes, schema and statistics.
        column_bytes: decoded bytes of each top-level column.

    Raises:
        MissingShardError, ShardFormatError: the file does not exist, or is no Parquet file.
    """

    def __init__(self, path: str):
        self.path = path
        self.size = size_of(path)
        footer = self._footer()
        pa = import_arrow(path)
        try:
            whole = pa.BufferReader(_MAGIC + footer + len(footer).to_bytes(4, "little") + _MAGIC)
            self._parse(pa.parquet.read_metadata(whole))
        except (pa.ArrowException, OSError, ValueError) as error:
            raise damaged(path, error) from error
        self.digest = hashlib.sha256(footer).hexdigest()
        self._open: tuple[tuple[int, int], Any] | None = None

    def _parse(self, found: Any) -> None:
        groups = [found.row_group(number) for number in range(found.num_row_groups)]
        self.group_rows = [group.num_rows for group in groups]
        if any(rows < 0 for rows in self.group_rows):
            raise ValueError("a row group has fewer than no rows")
        self.names: tuple[str, ...] = tuple(found.schema.to_arrow_schema().names)
        self.column_bytes = dict.fromkeys(self.names, 0)
        for group in groups:
            for number in range(group.num_columns):
                column = group.column(number)
                name = next((top for top in self._tops(column.path_in_schema) if top in self.column_bytes), None)
                if name is not None:
                    self.column_bytes[name] += column.total_uncompressed_size

    def read_group(self, number: int, names: list[str] | None) -> Any:
        """Read a row group as a table with these columns.

        Raises:
            ShardFormatError: the row group is damaged.
            ShardChangedError: the file was replaced.
        """
        pa = import_arrow(self.path)
        try:
            table = self._opened(pa).read_row_group(number, columns=names)
            if names is not None:
                table = table.select(names)
            return table.combine_chunks()
        except EnergonLiteError:
            raise
        except (pa.ArrowException, OSError, ValueError) as error:
            raise damaged(self.path, error, f"row group {number}") from error

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_open": None}

    def _opened(self, pa: Any) -> Any:
        owner = (os.getpid(), threading.get_ident())
        if self._open is None or self._open[0] != owner:
            if size_of(self.path) != self.size or hashlib.sha256(self._footer()).hexdigest() != self.digest:
                raise ShardChangedError(
                    "the file was replaced since the data set was opened", where=self.path, fix="start the run again"
                )
            source = self.path
            if is_remote(self.path):
                source = pa.PythonFile(RangedFile(self.size, partial(read_bytes, self.path)), mode="r")
            file = pa.parquet.ParquetFile(source, pre_buffer=True, page_checksum_verification=True)
            self._open = owner, file
        return self._open[1]

    def _footer(self) -> bytes:
        tail = read_bytes(self.path, max(0, self.size - _TAIL), min(self.size, _TAIL))
        if len(tail) < 12 or tail[-4:] != _MAGIC:
            raise damaged(self.path, "it does not end as a Parquet file does (it may have been cut short)")
        length = int.from_bytes(tail[-8:-4], "little")
        if length + 12 > self.size:
            raise damaged(self.path, f"its footer would have {length} bytes")
        if length + 8 > len(tail):
            return read_bytes(self.path, self.size - 8 - length, length)
        return tail[-8 - length : -8]

    @staticmethod
    def _tops(path: str) -> list[str]:
        """Possible names of the top-level column of a path; names may contain dots."""
        parts = path.split(".")
        return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def damaged(path: str, error: object, what: str = "the file") -> ShardFormatError:
    """Return the error for a file that cannot be read."""
    reason = " ".join(str(error).split())[:300]
    return ShardFormatError(f"{what} cannot be read: {reason}", where=path, fix="restore or download it again")
