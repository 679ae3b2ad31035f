"""JSONL files behind a URL: the places of their lines, from the ``.idx`` next to the file, or from one pass over it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from energon_lite.errors import NotPreparedError, ShardChangedError
from energon_lite.storage.files.remote_files import file_info, read_file, read_range, version_of
from energon_lite.storage.files.shard_store import head_checksum
from energon_lite.storage.index.jsonl import BOM, PART, folder_and_name, line_keys, scan_lines
from energon_lite.storage.tar.tar_headers import BLOCK
from energon_lite.storage.tar.tar_scan import Int64, ShardScan

__all__ = ["remote_version", "scan_remote_jsonl"]

_log = logging.getLogger(__name__)


def remote_version(url: str) -> str:
    """Return the version of a file as one text, from the store's record of it.

    Raises:
        NotPreparedError: there is no such file.
        DatasetError: the store does not answer.
    """
    return " ".join(version_of(_info(url)))


def scan_remote_jsonl(url: str) -> ShardScan:
    """Scan the lines of a file by its ``.idx``, which either library writes; if there is none that fits, the file is
    read once from beginning to end.

    Raises:
        NotPreparedError: there is no such file.
        ShardChangedError: it was written to during the scan.
        DatasetError: the store failed.
    """
    info = _info(url)
    size = int(info.get("size") or 0)
    head = read_range(url, 0, min(size, BLOCK)) if size else b""
    identity = {"size": size, "head": head_checksum(head), "mtime_ns": 0}
    name = folder_and_name(url)[1]
    starts = _starts(url, size)
    if starts is None:
        _log.warning("%s has no .idx that fits: reading all of its %.0f MiB, once", url, size / 2**20)
        scan = scan_lines(_Stream(url, size), name, identity)
    else:
        scan = _indexed(url, name, starts, head, identity)
    if _info(url) != info:
        raise ShardChangedError(
            "the file was written to while it was read", where=url, fix="run again when its writer has finished"
        )
    return scan


def _info(url: str) -> Mapping[str, Any]:
    try:
        return file_info(url)
    except FileNotFoundError:
        raise NotPreparedError("there is no such JSONL file", where=url, fix="check the path") from None


def _starts(url: str, size: int) -> Int64 | None:
    """Start of each line, and the end of the file; None: there is no ``.idx``, or it belongs to another file."""
    try:
        data = read_file(f"{url}.idx")
    except FileNotFoundError:
        return None
    starts = np.frombuffer(data[: len(data) // 8 * 8], dtype="<u8").astype(np.int64)
    if len(data) % 8 or not len(starts) or starts[-1] != size or starts[0] < 0 or (np.diff(starts) <= 0).any():
        _log.warning("%s.idx does not belong to the file as it is", url)
        return None
    return starts


def _indexed(url: str, name: str, starts: Int64, head: bytes, found: Mapping[str, Any]) -> ShardScan:
    """Make the scan from an ``.idx``. A line ends with a line feed; the last one may lack it."""
    size = int(found["size"])
    texts, sizes = starts[:-1].copy(), np.diff(starts) - 1
    if len(texts):
        sizes[-1] += read_range(url, size - 1, 1) != b"\n"
        if head[starts[0] :].startswith(BOM):
            texts[0] += len(BOM)
            sizes[0] -= len(BOM)
    rows = np.stack([texts, np.maximum(sizes, 0), np.zeros_like(sizes)], axis=1)
    key_offsets, keys = line_keys(len(rows))
    return ShardScan(
        name=name,
        end=size,
        headers=starts[:-1],
        first_part=np.arange(len(rows) + 1, dtype=np.int64),
        parts=rows,
        part_names=(PART,),
        key_offsets=key_offsets,
        keys=keys,
        notes=(),
        **found,
    )


class _Stream:
    """A remote file that is read sequentially."""

    def __init__(self, url: str, size: int):
        self._url = url
        self._size = size
        self._place = 0

    def read(self, size: int, /) -> bytes:
        size = min(size, self._size - self._place)
        data = read_range(self._url, self._place, size) if size > 0 else b""
        self._place += len(data)
        return data
