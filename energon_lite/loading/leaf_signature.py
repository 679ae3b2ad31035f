"""Signature of a leaf's files, to detect changes without opening the leaf."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from energon_lite.config.leaf_spec import LeafSpec
from energon_lite.storage.index.columns import column_folders
from energon_lite.storage.index.jsonl import is_jsonl
from energon_lite.storage.index.nv_meta import meta_path
from energon_lite.storage.read.webdataset import WebdatasetSource

__all__ = ["HASHING", "NEVER", "files_of", "signature"]

#: Value that is never a signature: files are missing, or may still change.
NEVER = 0
#: Signatures are Python's hashes of integers, which are the same in all processes with the same values of these.
HASHING = [sys.implementation.name, sys.hash_info.width, sys.hash_info.modulus, *sys.version_info[:2]]
#: Number of shards of a data set that are checked. Changes of others are detected when they are read.
_SHARDS = 4


def files_of(spec: LeafSpec, source: WebdatasetSource) -> tuple[str, ...]:
    """Return the files that show whether a leaf has changed, relative to its path, or absolute: the index, the
    documents, some shards, and, if shares depend on them, the folders of measured columns."""
    shards = [path for path, _ in source.choice.shards]
    files = [source.index_path, *(shards[len(shards) * n // _SHARDS] for n in range(_SHARDS))]
    if not is_jsonl(spec.path):
        files += [meta_path(spec.path, name) for name in (spec.dataset_config, spec.split_config)]
    if spec.units:
        files += [folder for folder in column_folders(spec.path) if os.path.isdir(folder)]
    below = spec.path + "/"
    return tuple(dict.fromkeys(file.removeprefix(below) for file in files))


def signature(path: str, files: Sequence[str], before: int | None = None) -> int:
    """Return a 64-bit hash of size, modification time and inode number of each file of a leaf; :data:`NEVER` if a file
    is missing.

    Args:
        path: path of the leaf.
        files: see :func:`files_of`.
        before: a time in ns; a file that was changed after it might change again within the same time stamp, so the
            result is :data:`NEVER`.
    """
    numbers: list[int] = []
    try:
        for file in files:
            status = os.stat(os.path.join(path, file))
            if before is not None and status.st_mtime_ns >= before:
                return NEVER
            numbers += (status.st_size, status.st_mtime_ns, status.st_ino)
    except OSError:
        return NEVER
    return hash(tuple(numbers)) or 1
