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

import numpy as np
from numpy.typing import NDArray

from energon_lite.errors import DatasetError, MissingShardError, ShardChangedError, ShardFormatError
from energon_lite.storage.files.byte_ranges import open_file
from energon_lite.storage.files.retries import retry_on_exhaustion
from energon_lite.storage.files.shard_store import head_checksum
from energon_lite.storage.tar_headers import BLOCK, TarHeaders
from energon_lite.storage.tar_members import Bytes2D, Int64, MemberColumns

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
            fix="put it back, or `energon-lite prepare --force-overwrite`, with --exclude if it is a broken link",
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


# -- samples of a shard ----------------------------------------------------------------------------------------------
#
# The rule is WebDataset's as Energon applies it. A member's key is its path up to the first dot of the last component,
# the rest is the part name. Neighbours with equal keys are one sample. Members whose path begins with a ``__name__``
# component, and members without a part name, belong to no sample.


def split_member_name(name: str) -> tuple[str, str] | None:
    """Split the name of a tar member into (key, part name); None if it belongs to no sample.

    Example:
        >>> split_member_name("a.b/0001.seg.png")
        ('a.b/0001', 'seg.png')
        >>> split_member_name("__meta__/x.txt") is None
        True
    """
    top, (folder, slash, file) = name.partition("/")[0], name.rpartition("/")
    key, dot, part = file.partition(".")
    is_reserved = len(top) >= 4 and top.startswith("__") and top.endswith("__")
    # A hidden file: as in Energon, its key is the folder with the slash, unless the folder's name has a dot.
    is_lost = not key and (not slash or "." in folder.rpartition("/")[2])
    return None if not dot or is_reserved or is_lost else (folder + slash + key, part)


class SampleColumns:
    """Collector of the members of a shard, in order, into samples."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._last_key: bytes | None = None
        self._keys: list[bytes] = []
        nothing = np.zeros(0, dtype=np.int64)
        #: For each run: headers, first parts and key lengths of its samples, and its parts.
        self._runs = [(nothing, nothing, nothing, nothing.reshape(0, 3))]
        self._rows = 0

    def add(self, members: MemberColumns) -> None:
        """Add the next members of the shard."""
        dots = _dots(members)
        kept = np.flatnonzero(dots >= 0)
        if not len(kept):
            return
        names = members.names[kept]
        lengths = members.lengths[kept]
        dots = dots[kept]
        in_key = np.arange(names.shape[1]) < dots[:, None]
        keys = names * in_key
        words = keys.view(np.uint64)
        first = np.empty(len(kept), dtype=bool)
        first[0] = self._last_key != keys[0, : dots[0]].tobytes()
        first[1:] = (words[1:] != words[:-1]).any(1) | (dots[1:] != dots[:-1])
        self._last_key = keys[-1, : dots[-1]].tobytes()
        self._keys.append(names[first][in_key[first]].tobytes())
        numbers = self._part_numbers(names, dots + 1, lengths)
        parts = np.stack([members.offsets[kept], members.sizes[kept], numbers], 1)
        self._runs.append((members.headers[kept][first], np.flatnonzero(first) + self._rows, dots[first], parts))
        self._rows += len(kept)

    def _part_numbers(self, names: Bytes2D, starts: Int64, stops: Int64) -> list[int]:
        """Number of each name's bytes from start to stop, in the order of first appearance."""
        text = names.tobytes()
        numbers = self._numbers
        before = np.arange(len(names)) * names.shape[1]
        places = zip((before + starts).tolist(), (before + stops).tolist(), strict=True)
        return [numbers.setdefault(text[start:stop], len(numbers)) for start, stop in places]

    def fields(self) -> dict[str, Any]:
        """The samples as fields of :class:`~energon_lite.storage.tar_scan.ShardScan`."""
        headers, first_part, key_lengths, parts = map(np.concatenate, zip(*self._runs, strict=True))
        return {
            "headers": headers,
            "first_part": np.append(first_part, self._rows),
            "parts": parts,
            "part_names": tuple(text.decode("utf-8", "surrogateescape") for text in self._numbers),
            "key_offsets": np.append(0, np.cumsum(key_lengths)),
            "keys": b"".join(self._keys),
        }


def _dots(members: MemberColumns) -> Int64:
    """End of the key in each name, ``[n]``; -1 for members of no sample (:func:`split_member_name`)."""
    names = members.names
    dots, slashes = names == ord("."), names == ord("/")
    start: Int64 = np.zeros(len(names), dtype=np.int64)
    if slashes.any():
        start = np.where(slashes.any(1), names.shape[1] - slashes[:, ::-1].argmax(1), 0)
        dots &= np.arange(names.shape[1]) >= start[:, None]
    dot: NDArray[np.int64] = dots.argmax(1)
    has_part = dots[np.arange(len(dots)), dot]
    hidden, reserved = dot == start, (names[:, 0] == ord("_")) & (names[:, 1] == ord("_"))
    for row in np.flatnonzero(has_part & (hidden | reserved)).tolist():
        has_part[row] = split_member_name(members.name(row)) is not None
    return np.where(has_part, dot, -1)
