"""What a measuring has found so far, in files that only grow, so that nothing is measured twice after a kill.

Each process that measures appends to a journal of its own, one record for each chunk of neighbouring samples of one
shard. Readers take whole records with a right checksum and stop at the first other one, which is where a writer was
killed or is about to write. So ranks share nothing but a folder.

A record says which shard it is about, with its size, first block and time of change: it is used only for that shard.

Format: magic ``"ENRGLJRN"``, then records: u32 crc32 and u32 length of what follows, u32 length of the table, table
(JSON), int64 [n] lengths, uint8 [n] flags. The first record has no samples: its table says by what was measured.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon_lite.errors import DataIndexError
from energon_lite.storage.files.open_file import open_file
from energon_lite.storage.index.column_file import shard_table
from energon_lite.storage.index.columns import FAILED
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.tar.tar_scan import Int64

__all__ = ["CHUNK", "Chunk", "Chunks", "JournalReader", "JournalWriter", "Measured", "remove_journals"]

#: Samples in a chunk: what is lost at most, for each worker, when a run is killed.
CHUNK = 256

_MAGIC = b"ENRGLJRN"
_RECORD = struct.Struct("<II")
_TABLE = struct.Struct("<I")


@dataclass(frozen=True)
class Chunk:
    """Some neighbouring samples of a shard: ``start`` to ``stop``, counted over the whole data set."""

    row: int
    start: int
    stop: int


class Chunks:
    """The numbering of all chunks of an index. No chunk goes over the end of a shard.

    Example:
        >>> chunks = Chunks(index)            # of two shards with 300 and 10 samples
        >>> len(chunks), chunks[2]
        (3, Chunk(row=1, start=300, stop=310))
    """

    def __init__(self, index: PackedIndex):
        self.index = index
        self.identities = shard_table(index)[:, :4]
        samples = np.diff(index.shards[:, 3])
        #: The number of each shard's first chunk, and of all chunks.
        self.first: Int64 = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(-(-samples // CHUNK))])
        #: Samples of each chunk: all are full but the last one of a shard.
        self.sizes = np.full(len(self), CHUNK, dtype=np.int64)
        last = self.first[1:][samples > 0] - 1
        self.sizes[last] = (samples[samples > 0] - 1) % CHUNK + 1

    def __len__(self) -> int:
        return int(self.first[-1])

    def __getitem__(self, number: int) -> Chunk:
        row = int(np.searchsorted(self.first, number, side="right")) - 1
        begin, end = self.index.shards[row : row + 2, 3].tolist()
        start = begin + (number - int(self.first[row])) * CHUNK
        return Chunk(row, start, min(start + CHUNK, end))

    def number(self, table: Mapping[str, Any], rows: Mapping[str, int]) -> int | None:
        """The number of the chunk that a record is about; None if there is no such chunk any more."""
        row = rows.get(table["shard"])
        if row is None or not np.array_equal(table["identity"], self.identities[row]):
            return None
        return int(self.first[row]) + table["start"] // CHUNK


@dataclass
class Measured:
    """What was found out about a chunk.

    Args:
        lengths: ``[n]``, 0 where there is none.
        flags: ``[n]``, see :mod:`energon_lite.storage.index.columns`.
        reasons: ``[stage, reason, skipped, key]`` of each sample that was skipped or failed.
    """

    lengths: NDArray[np.int64]
    flags: NDArray[np.uint8]
    reasons: list[list[Any]] = field(default_factory=list)


class JournalWriter:
    """Appends chunks to a new file, which is made with the first of them.

    Args:
        folder: of the journals.
        rank: goes into the file's name.
        maker: plain data that says by what is measured.
    """

    def __init__(self, folder: str, rank: int, maker: Mapping[str, Any]):
        self._path = os.path.join(folder, f"{rank}-{os.getpid()}-{secrets.token_hex(4)}.journal")
        self._maker, self._fd = maker, -1

    def append(self, chunks: Chunks, chunk: Chunk, measured: Measured) -> None:
        """Write the record of a chunk; after this a kill of the process does not lose it."""
        if self._fd < 0:
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)
            self._write(_MAGIC + _record({"maker": self._maker}))
        table = {
            "shard": chunks.index.shard_names[chunk.row],
            "identity": chunks.identities[chunk.row].tolist(),
            "start": chunk.start - int(chunks.index.shards[chunk.row, 3]),
            "samples": len(measured.lengths),
            "reasons": measured.reasons,
        }
        self._write(_record(table, measured.lengths.astype("<i8").tobytes(), measured.flags.tobytes()))

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._fd, data) :]


def _record(table: Mapping[str, Any], *arrays: bytes) -> bytes:
    text = json.dumps(table).encode()
    body = b"".join([_TABLE.pack(len(text)), text, *arrays])
    return _RECORD.pack(zlib.crc32(body), len(body)) + body


class JournalReader:
    """Finds the records of all journals in a folder that were made by the same maker, again and again.

    Args:
        folder: of the journals.
        chunks: of the data set.
        same_maker: whether a maker is the present one.
    """

    def __init__(self, folder: str, chunks: Chunks, same_maker: Callable[[Mapping[str, Any]], bool]):
        self._folder, self._chunks, self._same_maker = folder, chunks, same_maker
        self._rows = {name: row for row, name in enumerate(chunks.index.shard_names)}
        self._paths: list[str] = []
        #: Where to go on in each file; -1: never, it is of another maker.
        self._ends: dict[str, int] = {}
        # For each chunk the file and the place of its record.
        self._file = np.full(len(chunks), -1, dtype=np.int32)
        self._place = np.zeros(len(chunks), dtype=np.int64)
        #: How many samples of the chunk failed.
        self.failed = np.zeros(len(chunks), dtype=np.int32)

    @property
    def known(self) -> NDArray[np.bool_]:
        """``[chunks]``: which of them have a record."""
        found: NDArray[np.bool_] = self._file >= 0
        return found

    def look(self) -> int:
        """Read what is new; returns the number of samples in it."""
        try:
            names = sorted(name for name in os.listdir(self._folder) if name.endswith(".journal"))
        except (FileNotFoundError, NotADirectoryError):
            return 0
        samples = 0
        for name in names:
            path = os.path.join(self._folder, name)
            if self._ends.get(path, 0) >= 0:
                with suppress(FileNotFoundError):  # it is no file, or another rank 0 is done, and has removed it
                    samples += self._read(path)
        return samples

    def read(self, number: int) -> Measured:
        """The record of a chunk.

        Raises:
            DataIndexError: it was damaged since it was found.
        """
        path = self._paths[self._file[number]]
        with open(path, "rb") as file:
            file.seek(int(self._place[number]))
            body = _next_record(file)
        if body is None:  # it was whole before, and files only grow
            raise DataIndexError(
                "a journal of the measuring was damaged while it was read",
                where=path,
                fix="remove it, and measure again",
            )
        table, rest = body
        count = table["samples"]
        return Measured(
            np.frombuffer(rest, dtype="<i8", count=count),
            np.frombuffer(rest, dtype=np.uint8, count=count, offset=8 * count),
            table["reasons"],
        )

    def _read(self, path: str) -> int:
        samples = 0
        with open(path, "rb", opener=open_file) as file:
            if path not in self._ends:
                if file.read(len(_MAGIC)) != _MAGIC:
                    return 0
                head = _next_record(file)
                if head is None:
                    return 0
                if not self._same_maker(head[0]["maker"]):
                    self._ends[path] = -1
                    return 0
                self._paths.append(path)
                self._ends[path] = file.tell()
            file.seek(self._ends[path])
            for place, table, rest in _records(file):
                number = self._chunks.number(table, self._rows)
                if number is not None:
                    samples += self._take(number, path, place, table, rest)
                self._ends[path] = file.tell()
        return samples

    def _take(self, number: int, path: str, place: int, table: Mapping[str, Any], rest: bytes) -> int:
        new, count = self._file[number] < 0, int(table["samples"])
        failed = int((np.frombuffer(rest, dtype=np.uint8, count=count, offset=8 * count) == FAILED).sum())
        if new or failed < self.failed[number]:  # failed samples are tried again: the best of all attempts counts
            self._file[number], self._place[number] = self._paths.index(path), place
            self.failed[number] = failed
        return count if new else 0


def _records(file: Any) -> Iterator[tuple[int, dict[str, Any], bytes]]:
    while True:
        place = file.tell()
        found = _next_record(file)
        if found is None:
            return
        yield place, *found


def _next_record(file: Any) -> tuple[dict[str, Any], bytes] | None:
    head = file.read(_RECORD.size)
    if len(head) < _RECORD.size:
        return None
    checksum, length = _RECORD.unpack(head)
    # The length is not verified yet: it must not make room for more than there is.
    if not _TABLE.size <= length <= os.fstat(file.fileno()).st_size - file.tell():
        return None
    body = file.read(length)
    if len(body) < length or zlib.crc32(body) != checksum:
        return None
    (size,) = _TABLE.unpack_from(body)
    return json.loads(body[_TABLE.size : _TABLE.size + size]), body[_TABLE.size + size :]


def remove_journals(folder: str) -> None:
    """Remove all journals of a folder."""
    shutil.rmtree(folder, ignore_errors=True)
