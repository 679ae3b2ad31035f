"""Places of samples from the ``index.sqlite`` of Megatron-Energon, which saves reading the headers of remote shards.

All of its contents are checked: a shard with impossible entries, or with entries that do not fit its size, its first
block or its number of samples, is left out, and its headers are read instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from energon_lite.storage.files.shard_store import head_checksum
from energon_lite.storage.index.sqlite_index import open_read_only
from energon_lite.storage.tar.sample_columns import split_member_name
from energon_lite.storage.tar.tar_headers import BLOCK
from energon_lite.storage.tar.tar_scan import ShardScan

if TYPE_CHECKING:
    import sqlite3

__all__ = ["RemoteShard", "energon_scans"]

#: Bytes behind the last sample, at most: the zeros that tar writers append, and members that are no samples.
_TRAILER = 1 << 20


class RemoteShard(NamedTuple):
    """Facts about a shard that are known before it is scanned.

    Attributes:
        size: bytes in it.
        block: its first 512 bytes.
        samples: number of its samples according to ``.info.json``.
    """

    size: int
    block: bytes
    samples: int


def energon_scans(path: str, shards: Mapping[str, RemoteShard]) -> Iterator[ShardScan]:
    """Make the scans of the shards that the database describes completely and plausibly, in order.

    Args:
        path: a local copy of ``index.sqlite``.
        shards: all shards of the data set by name, in the order of ``.info.json``.

    Example:
        >>> scans = {scan.name: scan for scan in energon_scans("index.sqlite", shards)}
    """
    import sqlite3

    try:
        with closing(open_read_only(path)) as connection:
            kinds = dict(connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'").fetchall())
            for name in ("samples", "sample_parts"):
                if not str(kinds.get(name, "")).upper().startswith("CREATE TABLE"):
                    return
            for number, (name, shard) in enumerate(shards.items()):
                scan = _scan(connection, number, name, shard)
                if scan is not None:
                    yield scan
    except (sqlite3.Error, UnicodeError):
        return


def _scan(connection: sqlite3.Connection, number: int, name: str, shard: RemoteShard) -> ShardScan | None:
    samples = connection.execute(
        "SELECT sample_key, sample_index, byte_offset, byte_size FROM samples WHERE tar_file_id = ? "
        "ORDER BY sample_index LIMIT ?",
        (number, shard.samples + 1),
    ).fetchall()
    parts = connection.execute(
        "SELECT sample_index, part_name, content_byte_offset, content_byte_size FROM sample_parts WHERE "
        "tar_file_id = ? ORDER BY sample_index, content_byte_offset",
        (number,),
    ).fetchall()
    if len(samples) != shard.samples or not samples or not parts:
        return None
    try:
        keys = [key.encode() for key, *_ in samples]
        table = np.array([row[1:] for row in samples], dtype=np.int64)
        numbers: dict[str, int] = {}
        rows = np.array(
            [(index, offset, size, numbers.setdefault(part, len(numbers))) for index, part, offset, size in parts],
            dtype=np.int64,
        )
    except (AttributeError, TypeError, ValueError, OverflowError):
        return None
    if not all(isinstance(part, str) and part for part in numbers):
        return None
    counts = np.bincount(np.clip(rows[:, 0], 0, len(samples)), minlength=len(samples))
    headers, stops = table[:, 1], table[:, 1] + table[:, 2]
    owner = np.clip(rows[:, 0], 0, len(samples) - 1)
    starts, ends = rows[:, 1], rows[:, 1] + rows[:, 2]
    end = int(stops[-1])
    is_sound = (
        np.array_equal(table[:, 0], np.arange(len(samples)))
        and rows[:, 0].min() >= 0
        and len(counts) == len(samples)
        and (counts > 0).all()
        and headers[0] >= 0
        and (headers % BLOCK == 0).all()
        and (headers[1:] >= stops[:-1]).all()
        and (rows[:, 2] >= 0).all()
        and (starts >= headers[owner] + BLOCK).all()
        and (starts % BLOCK == 0).all()
        and (ends <= stops[owner]).all()
        and end <= shard.size <= end + _TRAILER
        and _is_first(shard.block, (keys[0].decode(), parts[0][1]), int(headers[0]))
    )
    if not is_sound:
        return None
    return ShardScan(
        name=name,
        size=shard.size,
        head=head_checksum(shard.block),
        end=end,
        headers=headers.copy(),
        first_part=np.append(0, np.cumsum(counts)).astype(np.int64),
        parts=rows[:, 1:].copy(),
        part_names=tuple(numbers),
        key_offsets=np.append(0, np.cumsum([len(key) for key in keys])).astype(np.int64),
        keys=b"".join(keys),
    )


def _is_first(block: bytes, member: tuple[str, str], header: int) -> bool:
    """Return False if the first block of a shard contradicts its first member (key, part) at offset ``header``."""
    if header or len(block) < BLOCK or block[156:157] not in (b"0", b"\0") or block[345]:
        return len(block) == BLOCK
    name = block[:100].partition(b"\0")[0].decode("utf-8", "surrogateescape")
    return split_member_name(name) == member
