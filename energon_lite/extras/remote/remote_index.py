"""Data sets behind a URL of any kind that fsspec reads: ``s3://bucket/coco``, ``gs://...``, ``memory://...``.

The small files of ``.nv-meta`` (the packed index is the largest) are copied once into the user's cache, and again when
they change. Shards are never copied as a whole: only ranges of them are read. For a data set that Megatron-Energon
prepared, the packed index is made on this machine (:func:`remote_index`). Requests are those of
:mod:`energon_lite.extras.remote.remote_files`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from energon_lite.errors import MissingShardError, NotPreparedError
from energon_lite.extras.remote.file_versions import numbers_of, version_in, version_of
from energon_lite.extras.remote.remote_files import copy_file, file_info, file_size, list_files, read_range, size_in
from energon_lite.storage.files.atomic_file import (
    only_one,
    remove_if_there,
    remove_leftovers,
    replacing,
    temporary_path,
    write_bytes,
)
from energon_lite.storage.files.byte_ranges import Listing
from energon_lite.storage.files.shard_store import changed_shard, head_checksum
from energon_lite.storage.files.stored_array import whole_or_none
from energon_lite.storage.index.index_cache import UrlDatasets, cache_folder, check_count, find_index, made_once
from energon_lite.storage.index.nv_meta import (
    META_FOLDER,
    SQLITE_INDEX,
    KeyDatabase,
    RemoteShard,
    key_database,
    read_uuid,
)
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.read.webdataset import missing_shard
from energon_lite.storage.tar_headers import BLOCK, TarHeaders
from energon_lite.storage.tar_scan import SampleColumns, ShardScan

_log = logging.getLogger(__name__)

T = TypeVar("T")

#: Endings of files in ``.nv-meta`` that are not read, and so not copied.
_UNUSED = (".sqlite", ".sqlite-journal", ".sqlite-shm", ".sqlite-wal", ".lock", ".tmp")
#: Most files that are worked on at the same time.
_TOGETHER = 32
#: Seconds after which an index of an earlier version is removed; until then a run may still use it.
_OLD = 7 * 86400.0
#: Bytes of the first request. A request takes about as long as the transfer of a MiB.
_FIRST_REQUEST = 1 << 16
#: Smallest request, in bytes.
_SMALLEST_REQUEST = 1 << 13
#: Largest request, in bytes.
_LARGEST_REQUEST = 8 << 20
#: Bytes between two reads that count as near each other.
_NEAR = 1 << 20
#: Most shards whose records are requested because the listing has no version of them.
_RECORDS = 1000


def local_meta(path: str) -> str:
    """Return the local folder with a copy of the data set's ``.nv-meta``, in the cache.

    Raises:
        NotPreparedError: there is no prepared data set behind the URL.
        DatasetError: the store does not answer, or its package is not installed.
    """
    name = hashlib.sha256(path.rstrip("/").encode()).hexdigest()[:16]
    root = os.path.join(cache_folder(), "remote", f"{os.path.basename(path.rstrip('/'))}-{name}")
    folder = os.path.join(root, META_FOLDER)
    os.makedirs(folder, exist_ok=True)
    listed = list_files(path, META_FOLDER).items()
    there = {name: info for name, info in listed if "/" not in name and not name.endswith(_UNUSED)}
    if not there:
        raise NotPreparedError(
            f"there is no prepared data set (no {META_FOLDER} folder)",
            where=path,
            fix=f"run `energon-lite prepare {path}`, or prepare a local copy and upload .nv-meta with the shards",
        )
    with only_one(os.path.join(root, "copy")):
        _copy_changed(path, there, root, folder)
    return root


def _copy_changed(path: str, there: dict[str, dict[str, Any]], root: str, folder: str) -> None:
    record = os.path.join(root, "versions.json")
    try:
        with open(record, encoding="utf-8") as file:
            read = json.load(file)
    except (FileNotFoundError, ValueError, RecursionError):
        read = None
    have = read if isinstance(read, dict) else {}
    versions = {name: version_of(info) for name, info in there.items()}
    for name in versions:
        local = os.path.join(folder, name)
        if any(versions[name]) and have.get(name) == versions[name] and os.path.exists(local):
            continue
        with replacing(local) as temporary:
            copy_file(path, f"{META_FOLDER}/{name}", temporary, size_in(there[name]))
    remove_leftovers(folder)
    for name in set(os.listdir(folder)) - set(versions):
        if not name.endswith(".tmp"):  # without locks, other processes may be copying
            remove_if_there(os.path.join(folder, name))
    if have != versions:
        write_bytes(record, json.dumps(versions).encode())


# -- index of a data set that has none ------------------------------------------------------------------------------
#
# Made from the files that Megatron-Energon wrote. ``index.sqlite`` has the places of all samples. For shards that it
# lacks, or for which it is wrong, or if no guest reads it, headers are read by ranges, many shards at the same time.
# The index is kept in the user's cache, under a name that contains the versions of all shards: when the data set is
# uploaded again, its index has another name. One process makes it, the others wait.


def remote_index(root: str, meta: str, counts: Mapping[str, int], there: Listing) -> tuple[PackedIndex, str]:
    """Return the packed index of a remote data set, and the local file that holds it.

    Args:
        root: the URL of the data set.
        meta: the folder with the copy of its ``.nv-meta``.
        counts: number of samples by shard.
        there: the store's listing of all its files.

    Raises:
        MissingShardError, ShardChangedError, ShardFormatError: a shard is missing or damaged, and the index had to be
            made.
        DatasetError: the store failed.
        OSError: the cache cannot be written.
    """
    existing = find_index(meta, counts)
    if existing is not None:
        return existing
    missing = next((name for name in counts if name not in there), None)
    if missing is not None:
        raise MissingShardError(
            "a shard of the data set does not exist", where=f"{root}/{missing}", fix="upload it, or prepare again"
        )
    path = _place(root, meta, counts, there)

    def make() -> None:
        _remove_older(path)
        index = PackedIndex.from_scans(_scans(root, os.path.dirname(path), counts, there), uuid=read_uuid(meta))
        index.write(path)

    return made_once(path, partial(whole_or_none, PackedIndex.open), make), path


def _place(root: str, meta: str, counts: Mapping[str, int], there: Listing) -> str:
    versions = [[name, count, version_of(there[name])] for name, count in counts.items()]
    digest = hashlib.sha256(json.dumps([read_uuid(meta), versions]).encode()).hexdigest()[:16]
    place = hashlib.sha256(root.encode()).hexdigest()[:16]
    return os.path.join(cache_folder(), "index", f"{os.path.basename(root)}-{place}-{digest}.idx")


def _remove_older(path: str) -> None:
    """Remove indexes of earlier versions of the data set that are a week old, and files that killed processes left."""
    folder, name = os.path.split(path)
    remove_leftovers(folder)
    prefix = name.rpartition("-")[0] + "-"
    for other in os.listdir(folder):
        old = os.path.join(folder, other)
        with suppress(OSError):
            if other.startswith(prefix) and other.endswith(".idx") and time.time() - os.stat(old).st_mtime > _OLD:
                os.unlink(old)


def in_threads(work: Callable[[str], T], names: Collection[str]) -> Generator[tuple[str, T], None, None]:
    """Do work on files, many at the same time; yield the name of each with the result, in order."""
    with ThreadPoolExecutor(_TOGETHER, "energon-lite-remote") as pool:
        try:
            yield from zip(names, pool.map(work, names), strict=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _scans(root: str, folder: str, counts: Mapping[str, int], there: Listing) -> list[ShardScan]:
    _log.warning("%s has no packed index: making one from the files next to its %d shards", root, len(counts))

    sizes = dict(in_threads(lambda name: file_size(f"{root}/{name}", there[name]), counts))
    scans: dict[str, ShardScan] = {}
    database = key_database()
    if database is not None and f"{META_FOLDER}/{SQLITE_INDEX}" in there:
        blocks = in_threads(lambda name: read_range(f"{root}/{name}", 0, min(BLOCK, sizes[name])), counts)
        shards = {name: RemoteShard(sizes[name], block, counts[name]) for name, block in blocks}
        scans = _from_database(database, root, folder, shards, there)
    left = [name for name in counts if name not in scans]
    if left:
        _log.warning("%s: reading the headers of %d shards", root, len(left))
    scans |= dict(in_threads(lambda name: scan_remote_shard(root, name, sizes[name]), left))
    for name, count in counts.items():
        check_count(root, name, scans[name].samples, count)
    return [scans[name] for name in counts]


def _from_database(
    database: KeyDatabase, root: str, folder: str, shards: Mapping[str, RemoteShard], there: Listing
) -> dict[str, ShardScan]:
    name = f"{META_FOLDER}/{SQLITE_INDEX}"
    # A temporary file that is used only here; if the process is killed, the next one removes it.
    temporary = temporary_path(os.path.join(folder, "energon.sqlite"))
    try:
        copy_file(root, name, temporary, size_in(there[name]))
        return {scan.name: scan for scan in database.scans(temporary, shards)}
    finally:
        remove_if_there(temporary)


class RangeFile:
    """Buffered reader of a file behind a URL that is read sequentially, with gaps: few requests, which grow while reads
    are near each other.

    Args:
        url: the file.
        length: bytes in it.

    Raises:
        DatasetError, FileNotFoundError: (while reading) as :func:`~energon_lite.extras.remote.remote_files.read_range`.
    """

    def __init__(self, url: str, length: int):
        self.url = url
        self.length = length
        self._data = b""
        self._base = 0
        self._block = _FIRST_REQUEST

    def read(self, size: int, offset: int) -> bytes:
        """Return ``size`` bytes at ``offset``, fewer at the end of the file."""
        size = max(0, min(size, self.length - offset))
        start = offset - self._base
        if start < 0 or start + size > len(self._data):
            gap = offset - self._base - len(self._data)
            near = bool(self._data) and -len(self._data) <= gap <= _NEAR
            if self._data:
                self._block = (
                    min(4 * self._block, _LARGEST_REQUEST) if near else max(self._block // 4, _SMALLEST_REQUEST)
                )
            wanted = min(max(size, self._block), self.length - offset)
            self._data = read_range(self.url, offset, wanted)
            self._base = offset
            start = 0
        return self._data[start : start + size]

    def read_into(self, memory: memoryview, offset: int) -> int:
        """Fill ``memory`` with the bytes from ``offset`` on; return the number of bytes that were read."""
        data = self.read(len(memory), offset)
        memory[: len(data)] = data
        return len(data)


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


# -- opening --------------------------------------------------------------------------------------------------------


def _opened(
    root: str, meta: str, counts: Mapping[str, int], shards: Sequence[str]
) -> tuple[PackedIndex, str, tuple[int, ...]]:
    """Open the index, and check the shards; see :class:`UrlDatasets`."""
    listed = list_files(root)
    index, path = remote_index(root, meta, counts, listed)
    expected = dict(zip(index.shard_names, index.shards[:-1, 0].tolist(), strict=True))
    there = _with_records(root, shards, listed)
    for name in shards:
        if name not in there:
            raise missing_shard(root, name)
        size = size_in(there[name])
        if size is not None and size != expected[name]:
            raise changed_shard(f"{root}/{name}", expected[name], size)
    return index, path, tuple(version_in(there[name]) for name in shards)


def _with_records(root: str, shards: Sequence[str], there: Listing) -> Listing:
    """A listing with the records of shards of which it names no version, as listings of web servers; of many shards,
    those of some."""

    def record(name: str) -> Mapping[str, Any]:
        with suppress(FileNotFoundError):  # such as a server that answers to reads only
            return file_info(f"{root}/{name}")
        return there[name]

    bare = [name for name in shards if name in there and not numbers_of(there[name])]
    bare = bare[:: max(1, -(-len(bare) // _RECORDS))]
    if not bare:
        return there
    return {**there, **dict(in_threads(record, bare))}


DATASETS = UrlDatasets(local_meta, _opened)
