"""Files of pyarrow: Parquet, read by row groups, and Arrow in file or stream format (which Hugging Face's
``save_to_disk`` writes), read by batches.

Both formats of Arrow are sequences of messages, each with a header and a body. Headers are found without reading
bodies, so that any batch can be read by itself.
https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc
"""

from __future__ import annotations

import hashlib
import os
import struct
import threading
from abc import ABC, abstractmethod
from functools import partial
from typing import Any, ClassVar, NamedTuple

from energon_lite.documents.paths import is_url
from energon_lite.errors import EnergonLiteError
from energon_lite.extras.formats.held_files import damaged, replaced
from energon_lite.imports import optional_imports
from energon_lite.storage.files.byte_ranges import RangedFile, read_bytes, size_of

#: The first and last bytes of a file.
_MAGIC = b"PAR1"
#: Most bytes at the end of a file that are read first; they contain nearly all footers.
_PARQUET_TAIL = 1 << 16


class _GroupTable(ABC):
    """A file of groups of rows. It can be pickled, and used after a fork.

    Args:
        path: the file, or its URL.

    Attributes:
        group_rows: the number of rows of each group.
        names: names of the top-level columns.
        digest: digest of what describes the rows.
        column_bytes: decoded bytes of each top-level column.

    Raises:
        MissingShardError, ShardFormatError: the file does not exist, or is of another kind.
    """

    kind: ClassVar[str]
    group_rows: list[int]
    names: tuple[str, ...]
    digest: str
    column_bytes: dict[str, int]

    def __init__(self, path: str):
        self.path = path
        self.size = size_of(path)
        #: The process (and thread) that opened the file, and the open file.
        self._open: tuple[object, Any] | None = None

    @abstractmethod
    def _group(self, pa: Any, number: int, names: list[str] | None) -> Any:
        """Read a group as a table with these columns, perhaps with others."""

    def read_group(self, number: int, names: list[str] | None) -> Any:
        """Read a group as a table with these columns.

        Raises:
            ShardFormatError: the group is damaged.
            ShardChangedError: the file was replaced.
        """
        pa = import_arrow(self.path)
        try:
            table = self._group(pa, number, names)
            return table if names is None else table.select(names)
        except EnergonLiteError:
            raise
        except (pa.ArrowException, OSError, ValueError, EOFError) as error:
            raise damaged(self.path, error, f"{self.kind} {number}") from error

    def _stream(self, pa: Any) -> Any:
        """Return a stream of the file, which reads by ranges."""
        return pa.PythonFile(RangedFile(self.size, partial(read_bytes, self.path)), mode="r")

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_open": None}


class ParquetTable(_GroupTable):
    """A Parquet file; the digest is that of the footer, which has row counts, sizes, schema and statistics."""

    kind = "row group"

    def __init__(self, path: str):
        super().__init__(path)
        footer = self._footer()
        pa = import_arrow(path)
        try:
            whole = pa.BufferReader(_MAGIC + footer + len(footer).to_bytes(4, "little") + _MAGIC)
            self._parse(pa.parquet.read_metadata(whole))
        except (pa.ArrowException, OSError, ValueError) as error:
            raise damaged(path, error) from error
        self.digest = hashlib.sha256(footer).hexdigest()

    def _parse(self, found: Any) -> None:
        groups = [found.row_group(number) for number in range(found.num_row_groups)]
        self.group_rows = [group.num_rows for group in groups]
        if any(rows < 0 for rows in self.group_rows):
            raise ValueError("a row group has a negative number of rows")
        self.names = tuple(found.schema.to_arrow_schema().names)
        self.column_bytes = dict.fromkeys(self.names, 0)
        for group in groups:
            for number in range(group.num_columns):
                column = group.column(number)
                parts = column.path_in_schema.split(".")  # names may contain dots
                tops = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
                name = next((top for top in tops if top in self.column_bytes), None)
                if name is not None:
                    self.column_bytes[name] += column.total_uncompressed_size

    def _group(self, pa: Any, number: int, names: list[str] | None) -> Any:
        return self._opened(pa).read_row_group(number, columns=names).combine_chunks()

    def _opened(self, pa: Any) -> Any:
        owner = (os.getpid(), threading.get_ident())
        if self._open is None or self._open[0] != owner:
            if size_of(self.path) != self.size or hashlib.sha256(self._footer()).hexdigest() != self.digest:
                raise replaced(self.path)
            source = self._stream(pa) if is_url(self.path) else self.path
            file = pa.parquet.ParquetFile(source, pre_buffer=True, page_checksum_verification=True)
            self._open = owner, file
        return self._open[1]

    def _footer(self) -> bytes:
        tail = read_bytes(self.path, max(0, self.size - _PARQUET_TAIL), min(self.size, _PARQUET_TAIL))
        if len(tail) < 12 or tail[-4:] != _MAGIC:
            raise damaged(self.path, "it does not end as a Parquet file does (it may have been cut short)")
        length = int.from_bytes(tail[-8:-4], "little")
        if length + 12 > self.size:
            raise damaged(self.path, f"its footer would have {length} bytes")
        if length + 8 > len(tail):
            return read_bytes(self.path, self.size - 8 - length, length)
        return tail[-8 - length : -8]


def import_arrow(where: str) -> Any:
    """Import the package ``pyarrow``, with ``pyarrow.parquet`` and ``pyarrow.ipc``.

    Raises:
        UsageError: the package is not installed.
    """
    with optional_imports("parquet", "Parquet and Arrow files need the package pyarrow", where):
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    return pyarrow


_FILE_MAGIC = b"ARROW1\0\0"
#: Kind of a message: the schema.
_SCHEMA = 1
#: Kind of a message: a dictionary.
_DICTIONARY = 2
#: Kind of a message: a batch of records.
_BATCH = 3
#: Bytes of the mark at the end of a stream, at most.
_END = 8
#: Most bytes of a message that are read first; they contain nearly all headers.
_HEAD = 1 << 12


class _Message(NamedTuple):
    """A message: its kind, the rows of a batch, its offset, and its size in bytes."""

    kind: int
    rows: int
    offset: int
    size: int


class ArrowTable(_GroupTable):
    """A file of record batches; the digest is that of the headers of its messages. Local files are mapped, not read."""

    kind = "batch"

    def __init__(self, path: str):
        super().__init__(path)
        pa = import_arrow(path)
        digest = hashlib.sha256()
        is_file = read_bytes(path, 0, min(self.size, len(_FILE_MAGIC))) == _FILE_MAGIC
        messages, end = self._messages(len(_FILE_MAGIC) if is_file else 0, digest)
        if not messages or messages[0].kind != _SCHEMA:
            raise damaged(path, "it does not begin as an Arrow file does")
        self._batches = [message for message in messages if message.kind == _BATCH]
        if is_file:
            self._check_footer(pa)
        elif self.size - end > _END:
            raise damaged(path, f"its messages end at byte {end} of {self.size}")
        # A batch needs the schema and all dictionaries before it. They are few.
        self._before = [message for message in messages if message.kind in (_SCHEMA, _DICTIONARY)]
        self.group_rows = [batch.rows for batch in self._batches]
        try:
            self._schema = pa.ipc.read_schema(pa.py_buffer(read_bytes(path, *self._before[0][2:])))
            self.names = tuple(self._schema.names)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise damaged(path, error) from error
        self.digest = digest.hexdigest()
        size = sum(batch.size for batch in self._batches)
        self.column_bytes = dict.fromkeys(self.names, size // max(1, len(self.names)))

    def _group(self, pa: Any, number: int, names: list[str] | None) -> Any:
        batch = self._batches[number]
        before = [message for message in self._before if message.offset < batch.offset]
        if len(before) == 1:
            records = pa.ipc.read_record_batch(self._bytes(pa, batch), self._schema)
        else:
            stream = b"".join(bytes(self._bytes(pa, message)) for message in (*before, batch))
            records = pa.ipc.open_stream(stream).read_next_batch()
        records.validate(full=True)  # offsets that a flipped bit has changed would point outside of the memory
        return pa.Table.from_batches([records])

    def _bytes(self, pa: Any, message: _Message) -> Any:
        if is_url(self.path):
            return pa.py_buffer(read_bytes(self.path, message.offset, message.size))
        if self._open is None or self._open[0] != os.getpid():
            if size_of(self.path) != self.size:
                raise replaced(self.path)
            self._open = os.getpid(), pa.memory_map(self.path)
        return self._open[1].read_at(message.size, message.offset)

    def _messages(self, at: int, digest: Any) -> tuple[list[_Message], int]:
        """All messages from byte ``at`` on, and the place of the mark at their end."""
        messages = []
        while at + 8 <= self.size:
            head = read_bytes(self.path, at, min(_HEAD, self.size - at))
            mark, length = struct.unpack_from("<Ii", head)
            if mark != 0xFFFFFFFF and (mark or not at):
                raise damaged(self.path, f"there is no message at byte {at}")
            if not (mark and length):
                break
            if length < 0 or at + 8 + length > self.size:
                raise damaged(self.path, f"it ends in the message at byte {at}")
            if 8 + length > len(head):
                head = read_bytes(self.path, at, 8 + length)
            kind, rows, body = _parse(head[8 : 8 + length], self.path)
            size = 8 + length + body
            if body < 0 or at + size > self.size:
                raise damaged(self.path, f"it ends in the message at byte {at}")
            messages.append(_Message(kind, rows, at, size))
            digest.update(head[: 8 + length])
            at += size
        return messages, at

    def _check_footer(self, pa: Any) -> None:
        """Refuse a file whose messages end early.

        Raises:
            ShardFormatError: there is no footer, or it has more batches.
        """
        try:
            known = pa.ipc.open_file(self._stream(pa)).num_record_batches
        except (pa.ArrowException, OSError, ValueError) as error:
            what = f"it does not end as an Arrow file does (it may have been cut short): {error}"
            raise damaged(self.path, what) from error
        if known != len(self._batches):
            raise damaged(self.path, f"its footer knows {known} batches, and {len(self._batches)} are there")


def _parse(header: bytes, path: str) -> tuple[int, int, int]:
    """Kind, rows, and bytes of the body of a message, from its flatbuffer (``Message.fbs`` of Arrow)."""
    try:
        (table,) = struct.unpack_from("<I", header)
        kind = _field(header, table, 1, "<B") or 0
        place = _slot(header, table, 2)
        body = _field(header, table, 3, "<q") or 0
        rows = 0
        if kind == _BATCH and place is not None:
            rows = _field(header, place + struct.unpack_from("<I", header, place)[0], 0, "<q") or 0
        if rows < 0:
            raise ValueError(rows)
    except (struct.error, ValueError) as error:
        raise damaged(path, error, "a message") from None
    return kind, rows, body


def _slot(data: bytes, table: int, number: int) -> int | None:
    """Offset of field ``number`` in a flatbuffer's table; None: the field has its default."""
    lookup = table - struct.unpack_from("<i", data, table)[0]
    if lookup < 0 or 4 + 2 * number >= struct.unpack_from("<H", data, lookup)[0]:
        return None
    offset: int = struct.unpack_from("<H", data, lookup + 4 + 2 * number)[0]
    return table + offset if offset else None


def _field(data: bytes, table: int, number: int, form: str) -> int | None:
    place = _slot(data, table, number)
    return None if place is None else int(struct.unpack_from(form, data, place)[0])
