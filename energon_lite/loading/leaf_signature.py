"""What tells, without opening it, that the files of a leaf are those that they were."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from energon_lite.config.metadataset import LeafSpec
from energon_lite.storage.index.columns import column_folders
from energon_lite.storage.index.jsonl import is_jsonl
from energon_lite.storage.index.nv_meta import meta_path
from energon_lite.storage.read.webdataset import WebdatasetSource

__all__ = ["HASHING", "NEVER", "files_of", "signature"]

#: A signature that no files have.
NEVER = 0
#: Signatures are Python's hashes of integers, the same in each process where this is the same.
HASHING = [sys.implementation.name, sys.hash_info.width, sys.hash_info.modulus, *sys.version_info[:2]]
#: Shards of a data set that are looked at. Others are found to have changed when they are read.
_SHARDS = 4


def files_of(spec: LeafSpec, source: WebdatasetSource) -> tuple[str, ...]:
    """The files that tell whether a leaf has changed, below its path, or absolute ones: the index, the documents, some
    shards, and where measured columns are if shares depend on them."""
    shards = [path for path, _ in source.choice.shards]
    files = [source.index_path, *(shards[len(shards) * n // _SHARDS] for n in range(_SHARDS))]
    if not is_jsonl(spec.path):
        files += [meta_path(spec.path, name) for name in (spec.dataset_config, spec.split_config)]
    if spec.units:
        files += [folder for folder in column_folders(spec.path) if os.path.isdir(folder)]
    below = spec.path + "/"
    return tuple(dict.fromkeys(file.removeprefix(below) for file in files))


def signature(path: str, files: Sequence[str], before: int | None = None) -> int:
    """64 bits of size, time of the last change and number of each file of a leaf; :data:`NEVER`: one is missing.

    Args:
        path: of the leaf.
        files: see :func:`files_of`.
        before: a time in ns; a file that was changed after it may change again, and have the same time.
    """
    found: list[int] = []
    try:
        for file in files:
            one = os.stat(os.path.join(path, file))
            if before is not None and one.st_mtime_ns >= before:
                return NEVER
            found += (one.st_size, one.st_mtime_ns, one.st_ino)
    except OSError:
        return NEVER
    return hash(tuple(found)) or 1
