"""What a scan found in one shard, as a file of its own, so that no shard is scanned twice.

A piece is written as soon as its shard is done, into ``.nv-meta/energon_lite.shards``. A ``prepare`` that was killed
finds the pieces when it runs again; and ranks hand their results to rank 0 this way. When the packed index is there it
holds everything that the pieces hold, so they are removed, and the next ``prepare`` takes unchanged shards from the
packed index.

A piece is used only if its version, its checksum, and the shard's name, size, time of change and first block fit. So a
piece needs no flush to the disk: one that a power cut has damaged is a piece that is not there.

Format: magic ``"ENRGLPCE"``, u32 version (2), u32 crc32 of all that follows, u64 length of the table, table (JSON),
arrays.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress

import numpy as np

from energon_lite.errors import DataIndexError
from energon_lite.storage.files.atomic_file import remove_if_there, replacing, write_bytes
from energon_lite.storage.files.open_file import open_file
from energon_lite.storage.files.shard_store import head_checksum
from energon_lite.storage.index.nv_meta import META_FOLDER, PACKED_INDEX, meta_path
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.tar.tar_headers import BLOCK
from energon_lite.storage.tar.tar_scan import SCAN_RULES, ShardScan

__all__ = [
    "PIECES_FOLDER",
    "has_failed",
    "indexed_scans",
    "is_current",
    "is_unfinished",
    "make_pieces_folder",
    "mark_unfinished",
    "piece_path",
    "read_piece",
    "remove_pieces",
    "stored_scans",
    "write_failure",
    "write_piece",
]

PIECES_FOLDER = "energon_lite.shards"

_HEADER, _LENGTH = struct.Struct("<8sII"), struct.Struct("<Q")
_MAGIC = b"ENRGLPCE"
_VERSION = 2
_UNFINISHED = "unfinished"


def piece_path(root: str, shard: str) -> str:
    """Where the piece of a shard is kept: a readable beginning, and a hash that tells equal names in folders apart."""
    digest = hashlib.sha256(shard.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return os.path.join(root, META_FOLDER, PIECES_FOLDER, f"{os.path.basename(shard)[:60]}-{digest}.scan")


def make_pieces_folder(root: str) -> str:
    """Have the folder of the pieces; returns its path."""
    folder = _without_link(root)
    os.makedirs(folder, exist_ok=True)
    return folder


def _without_link(root: str) -> str:
    """The folder of the pieces. What is in it is written and removed, so a link that came with the data, to a folder of
    somebody else's, must not stand there."""
    folder = meta_path(root, PIECES_FOLDER)
    if os.path.islink(folder):
        os.unlink(folder)
    return folder


def write_piece(root: str, scan: ShardScan) -> str:
    """Write the piece of a shard, atomically; returns its path."""
    path = piece_path(root, scan.name)
    table = {
        "rules": SCAN_RULES,
        "name": scan.name,
        "size": scan.size,
        "mtime_ns": scan.mtime_ns,
        "head": scan.head,
        "end": scan.end,
        "samples": scan.samples,
        "parts": len(scan.parts),
        "part_names": scan.part_names,
        "notes": scan.notes,
    }
    text = json.dumps(table).encode()
    arrays = (scan.headers, scan.first_part, scan.parts, scan.key_offsets)
    body = b"".join([_LENGTH.pack(len(text)), text, *(array.astype("<i8").tobytes() for array in arrays), scan.keys])
    make_pieces_folder(root)
    with replacing(path) as temporary, open(temporary, "xb") as file:
        file.write(_HEADER.pack(_MAGIC, _VERSION, zlib.crc32(body)))
        file.write(body)
    return path


def read_piece(root: str, shard: str) -> ShardScan | None:
    """The piece of a shard; None if there is none that is whole and of this version.

    Whether the shard is still the one that was scanned is for :func:`is_current` to say.
    """
    try:
        with open(piece_path(root, shard), "rb", opener=open_file) as file:
            data = file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None
    body = memoryview(data)[_HEADER.size :]
    if len(body) < _LENGTH.size or data[: _HEADER.size] != _HEADER.pack(_MAGIC, _VERSION, zlib.crc32(body)):
        return None
    (length,) = _LENGTH.unpack_from(body)
    body = body[_LENGTH.size :]
    table = json.loads(bytes(body[:length]))
    if (table["rules"], table["name"]) != (SCAN_RULES, shard):
        return None
    samples, parts = table["samples"], table["parts"]
    counts = (samples, samples + 1, 3 * parts, samples + 1)
    numbers = np.frombuffer(body, dtype="<i8", count=sum(counts), offset=length).astype(np.int64)
    headers, first_part, rows, key_offsets = np.split(numbers, np.cumsum(counts)[:-1])
    return ShardScan(
        name=shard,
        size=table["size"],
        head=table["head"],
        end=table["end"],
        headers=headers,
        first_part=first_part,
        parts=rows.reshape(-1, 3),
        part_names=tuple(table["part_names"]),
        key_offsets=key_offsets,
        keys=bytes(body[length + 8 * sum(counts) :]),
        notes=tuple(table["notes"]),
        mtime_ns=table["mtime_ns"],
    )


def is_current(root: str, scan: ShardScan) -> bool:
    """Whether the shard is, by size, time of change and first block, the one that was scanned."""
    try:
        with open(os.path.join(root, scan.name), "rb", buffering=0, opener=open_file) as file:
            now = os.fstat(file.fileno())
            if not scan.mtime_ns or (now.st_size, now.st_mtime_ns) != (scan.size, scan.mtime_ns):
                return False
            return head_checksum(file.read(BLOCK)) == scan.head
    except OSError:
        return False


def stored_scans(root: str, shards: Iterable[str]) -> dict[str, ShardScan]:
    """The scans of those shards that have a piece which may be used."""
    try:
        there = set(os.listdir(meta_path(root, PIECES_FOLDER)))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    found: dict[str, ShardScan] = {}
    for shard in shards:
        if os.path.basename(piece_path(root, shard)) in there:
            scan = read_piece(root, shard)
            if scan is not None and is_current(root, scan):
                found[shard] = scan
    return found


def indexed_scans(root: str, shards: Sequence[str]) -> dict[str, ShardScan]:
    """The scans of those shards that stand in the packed index of an earlier preparation and have not changed."""
    try:
        index = PackedIndex.open(meta_path(root, PACKED_INDEX))
        if index.rules != SCAN_RULES:
            return {}
        rows = {name: row for row, name in enumerate(index.shard_names)}
        scans = [index.scan(rows[shard]) for shard in shards if shard in rows]
    except (OSError, DataIndexError):
        return {}
    return {scan.name: scan for scan in scans if is_current(root, scan)}


def write_failure(root: str, shard: str) -> None:
    """Let other ranks know that this shard cannot be scanned as it is now."""
    path = _failure_path(root, shard)
    make_pieces_folder(root)
    with replacing(path) as temporary, open(temporary, "x", encoding="utf-8") as file:
        json.dump(_state(root, shard), file)


def has_failed(root: str, shard: str) -> bool:
    """Whether a rank has said that the shard, as it is now, cannot be scanned."""
    try:
        with open(_failure_path(root, shard), encoding="utf-8", opener=open_file) as file:
            return bool(json.load(file) == _state(root, shard))
    except (FileNotFoundError, ValueError):
        return False


def _failure_path(root: str, shard: str) -> str:
    return piece_path(root, shard).removesuffix(".scan") + ".failed"


def _state(root: str, shard: str) -> list[int]:
    try:
        found = os.stat(os.path.join(root, shard))
    except OSError:
        return [-1, -1]
    return [found.st_size, found.st_mtime_ns]


def mark_unfinished(root: str) -> None:
    """Say that the preparation is not at its end, although ``.info.json`` may be there already."""
    write_bytes(os.path.join(make_pieces_folder(root), _UNFINISHED), flush=False)


def is_unfinished(root: str) -> bool:
    """Whether a preparation was interrupted in its last steps."""
    return os.path.exists(os.path.join(meta_path(root, PIECES_FOLDER), _UNFINISHED))


def remove_pieces(root: str) -> None:
    """Remove all pieces of a data set, and after them the mark of :func:`mark_unfinished`."""
    folder = _without_link(root)
    with suppress(FileNotFoundError):
        for name in os.listdir(folder):
            if name != _UNFINISHED:
                remove_if_there(os.path.join(folder, name))
    shutil.rmtree(folder, ignore_errors=True)
