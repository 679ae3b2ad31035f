"""Data sets behind a URL of any kind that fsspec reads: ``s3://bucket/coco``, ``gs://...``, ``memory://...``.

The small files of ``.nv-meta`` (the packed index is the largest) are copied once into the user's cache, and again when
they change. Shards are never copied as a whole: only ranges of them are read. For a data set that Megatron-Energon
prepared, the packed index is made on this machine (:mod:`energon_lite.storage.read.remote_index`). Requests are those
of :mod:`energon_lite.storage.files.remote_files`.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

from energon_lite.errors import NotPreparedError
from energon_lite.storage.files.atomic_file import replacing, write_bytes
from energon_lite.storage.files.file_lock import only_one
from energon_lite.storage.files.remote_files import Listing, copy_file, is_remote, list_files, version_of
from energon_lite.storage.index.index_cache import cache_folder
from energon_lite.storage.index.jsonl import is_jsonl
from energon_lite.storage.index.nv_meta import META_FOLDER

__all__ = ["local_meta", "shard_sizes"]

#: Endings of files in ``.nv-meta`` that are not read, and so not copied.
_UNUSED = (".sqlite", ".sqlite-journal", ".sqlite-shm", ".sqlite-wal", ".lock", ".tmp")


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
    there = {name: info for name, info in list_files(path, META_FOLDER).items() if _is_used(name)}
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
    return {name: None if info.get("size") is None else int(info["size"]) for name, info in there.items()}


def _is_used(name: str) -> bool:
    return "/" not in name and not name.endswith(_UNUSED)
