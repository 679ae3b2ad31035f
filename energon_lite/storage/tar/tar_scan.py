"""Scan of one shard: the headers of a tar file, read into arrays.

A pure function of one file, so shards can be scanned in any order, on any number of processes or machines.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from energon_lite.errors import DatasetError, MissingShardError, ShardChangedError, ShardFormatError
from energon_lite.storage.files.byte_ranges import RangeFile
from energon_lite.storage.files.open_file import open_file
from energon_lite.storage.files.retries import retry_on_exhaustion
from energon_lite.storage.files.shard_store import head_checksum
from energon_lite.storage.tar.members import Int64
from energon_lite.storage.tar.sample_columns import SampleColumns
from energon_lite.storage.tar.tar_headers import BLOCK, TarHeaders

__all__ = ["SCAN_RULES", "Int64", "ShardScan", "check_is_file", "scan_remote_shard", "scan_shard", "unchanged_file"]

#: Version of the rules by which samples are found; increased when the same file would give another scan than before.
SCAN_RULES = 2


@dataclass(frozen=True)
class ShardScan:
    """The contents of one shard.

    Attributes:
        name: the shard's path relative to the data set, with forward slashes.
        size: bytes in the file.
        head: checksum of the first block (see :func:`head_checksum`).
        end: byte after the last member.
        headers: ``[samples]``, byte at which each sample's first header starts.
        first_part: ``[samples + 1]``, row of each sample's first part in ``parts``.
        parts: ``[parts, 3]``: payload offset, payload size, number of the part's name.
        part_names: the names of the parts, by number.
        key_offsets: ``[samples + 1]``, offset of each key in ``keys``.
        keys: all keys in UTF-8, without separator.
        notes: remarks on oddities.
        mtime_ns: time of the file's last change, 0 if unknown.
    """

    name: str
    size: int
    head: int
    end: int
    headers: Int64
    first_part: Int64
    parts: Int64
    part_names: tuple[str, ...]
    key_offsets: Int64
    keys: bytes
    notes: tuple[str, ...] = ()
    mtime_ns: int = 0

    @property
    def samples(self) -> int:
        """Number of samples."""
        return len(self.headers)

    def all_keys(self) -> list[str]:
        """Decode the keys of all samples, in order."""
        keys, places = self.keys, pairwise(self.key_offsets.tolist())
        return [keys[start:stop].decode("utf-8", "surrogateescape") for start, stop in places]


def check_is_file(path: str) -> None:
    """Refuse a pipe, a socket or a device, which would block or never end.

    Raises:
        ShardFormatError: the path is one. A missing file is not an error here.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise ShardFormatError(
            "the shard is not a file, but a pipe, a device or the like",
            where=path,
            fix="remove it, or leave it out with --exclude",
        )


def scan_shard(root: str, name: str) -> ShardScan:
    """Scan the shard ``name`` in the folder ``root``.

    Raises:
        ShardFormatError: the file is truncated, damaged, compressed or sparse.
        MissingShardError: there is no such file.
        ShardChangedError: it was written to during the scan.
    """
    path = os.path.join(root, name)
    check_is_file(path)
    try:
        fd = retry_on_exhaustion(lambda: open_file(path, os.O_RDONLY), path)
    except FileNotFoundError:
        raise MissingShardError(
            "the shard does not exist",
            where=path,
            fix="put it back, or leave it out with `energon-lite prepare --force-overwrite`",
        ) from None
    except OSError as error:
        raise DatasetError(
            f"the shard cannot be opened: {error.strerror or error}", where=path, fix="check permissions and storage"
        ) from error
    with open(fd, "rb", buffering=0), unchanged_file(fd, path) as identity:
        headers, samples = TarHeaders(fd, identity["size"], path), SampleColumns()
        for members in headers.columns():
            samples.add(members)
    return ShardScan(name=name, end=headers.end, notes=tuple(headers.notes), **identity, **samples.fields())


def scan_remote_shard(root: str, name: str, size: int) -> ShardScan:
    """Scan the shard ``name`` of ``size`` bytes below the URL ``root``, by requests for ranges of it.

    Raises:
        ShardFormatError, MissingShardError: as :func:`scan_shard`.
        DatasetError: the store failed.
    """
    path = f"{root}/{name}"
    file = RangeFile(path, size)
    try:
        head = head_checksum(file.read(BLOCK, 0))
        headers, samples = TarHeaders(file, size, path), SampleColumns()
        for members in headers.columns():
            samples.add(members)
    except FileNotFoundError:
        raise MissingShardError("the shard does not exist", where=path, fix="put it back") from None
    return ShardScan(name=name, size=size, head=head, end=headers.end, notes=tuple(headers.notes), **samples.fields())


@contextmanager
def unchanged_file(fd: int, path: str) -> Iterator[dict[str, Any]]:
    """The identity of an open file, as fields of :class:`ShardScan`: size, head and time of its last change.

    Raises:
        ShardChangedError: (at the end of the block) it was written to during the block.
    """
    before = os.fstat(fd)
    yield {"size": before.st_size, "head": head_checksum(os.pread(fd, BLOCK, 0)), "mtime_ns": before.st_mtime_ns}
    after = os.fstat(fd)
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise ShardChangedError(
            "the file was written to while it was read", where=path, fix="run again when its writer has finished"
        )
