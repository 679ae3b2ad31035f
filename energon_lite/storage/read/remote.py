"""Data sets behind a URL of any kind that fsspec reads: ``s3://bucket/coco``, ``gs://...``, ``memory://...``.

The small files of ``.nv-meta`` (the packed index is the largest) are copied once into the user's cache, and again when
they change. Shards are never copied as a whole: only ranges of them are read. For a data set that Megatron-Energon
prepared, the packed index is made on this machine (:func:`remote_index`). Requests are those of
:mod:`energon_lite.storage.files.remote_files`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from energon_lite.errors import MissingShardError, NotPreparedError
from energon_lite.storage.files.atomic_file import (
    remove_if_there,
    remove_leftovers,
    replacing,
    temporary_path,
    write_bytes,
)
from energon_lite.storage.files.file_lock import only_one
from energon_lite.storage.files.file_versions import version_of
from energon_lite.storage.files.remote_files import (
    Listing,
    copy_file,
    file_size,
    is_remote,
    list_files,
    read_range,
)
from energon_lite.storage.files.stored_array import whole_or_none
from energon_lite.storage.index.index_cache import cache_folder, check_count, find_index, made_once
from energon_lite.storage.index.jsonl import is_jsonl
from energon_lite.storage.index.nv_meta import (
    META_FOLDER,
    SQLITE_INDEX,
    KeyDatabase,
    RemoteShard,
    key_database,
    read_uuid,
)
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.tar.tar_headers import BLOCK
from energon_lite.storage.tar.tar_scan import ShardScan, scan_remote_shard

__all__ = ["local_meta", "remote_index", "shard_sizes"]

_log = logging.getLogger(__name__)

T = TypeVar("T")
U = TypeVar("U")

#: Endings of files in ``.nv-meta`` that are not read, and so not copied.
_UNUSED = (".sqlite", ".sqlite-journal", ".sqlite-shm", ".sqlite-wal", ".lock", ".tmp")
#: Requests at the same time, and shards whose headers are read at the same time.
_TOGETHER = 32
#: Seconds after which an index of an earlier version is removed; until then a run may still use it.
_OLD = 7 * 86400.0


def local_meta(path: str) -> str:
    """Return the folder whose ``.nv-meta`` has the small files of a data set: ``path`` itself, or a copy in the cache.

    Raises:
        NotPreparedError: there is no prepared data set behind the URL.
        DatasetError: the store does not answer, or its package is not installed.
    """
    if not is_remote(path) or is_jsonl(path):  # a JSONL file has no such folder
        return path
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
            copy_file(path, f"{META_FOLDER}/{name}", temporary, there[name].get("size"))
    for name in set(os.listdir(folder)) - set(versions):
        os.unlink(os.path.join(folder, name))
    if have != versions:
        write_bytes(record, json.dumps(versions).encode())


def shard_sizes(there: Listing) -> dict[str, int | None]:
    """Size of every file of a remote data set, by its path relative to the root; None where the listing has no size.

    Args:
        there: all its files, from :func:`~energon_lite.storage.files.remote_files.list_files`: one listing instead of
            a request for each shard.
    """
    return {name: _size(info) for name, info in there.items()}


def _size(info: Mapping[str, Any]) -> int | None:
    size = info.get("size")
    return None if size is None else int(size)


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


def _scans(root: str, folder: str, counts: Mapping[str, int], there: Listing) -> list[ShardScan]:
    _log.warning("%s has no packed index: making one from the files next to its %d shards", root, len(counts))
    with ThreadPoolExecutor(_TOGETHER, "energon-lite-index") as pool:

        def each(work: Callable[[U], T], units: Iterable[U]) -> list[T]:
            try:
                return list(pool.map(work, units))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

        def size_of(name: str) -> int:
            listed = _size(there[name])
            return file_size(f"{root}/{name}") if listed is None else listed

        sizes = dict(zip(counts, each(size_of, counts), strict=True))
        scans: dict[str, ShardScan] = {}
        database = key_database()
        if database is not None and f"{META_FOLDER}/{SQLITE_INDEX}" in there:
            blocks = each(lambda name: read_range(f"{root}/{name}", 0, min(BLOCK, sizes[name])), counts)
            shards = {
                name: RemoteShard(sizes[name], block, counts[name]) for name, block in zip(counts, blocks, strict=True)
            }
            scans = _from_database(database, root, folder, shards, there)
        left = [name for name in counts if name not in scans]
        if left:
            _log.warning("%s: reading the headers of %d shards", root, len(left))
        scans |= {scan.name: scan for scan in each(lambda name: scan_remote_shard(root, name, sizes[name]), left)}
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
        copy_file(root, name, temporary, _size(there[name]))
        return {scan.name: scan for scan in database.scans(temporary, shards)}
    finally:
        remove_if_there(temporary)
