"""JSONL files as data sets: each line that is not blank is a sample with one part, ``json``.

Such a file is a data set of one shard, itself, and its lines have what samples of a tar have: a key (their number, from
0), an offset and a size. So all code that reads shards works for it unchanged; only its index is made by a guest. Files
about it are kept next to it, with its name as prefix: ``chats.jsonl.energon_lite.idx``, and ``chats.jsonl.idx``, which
Megatron-Energon reads.
"""

from __future__ import annotations

import os
from typing import Protocol

from energon_lite.entry_points import load, storage_guests
from energon_lite.errors import UsageError
from energon_lite.storage.index.packed_index import PackedIndex

__all__ = ["BOM", "PART", "FileIndex", "folder_and_name", "folder_of_shards", "index_of_file", "is_jsonl"]

#: The name of the only part of each sample.
PART = "json"
#: The byte order mark of UTF-8.
BOM = b"\xef\xbb\xbf"


class FileIndex(Protocol):
    """Maker of the index of a JSONL file: ``(path) -> FileIndex`` is the entry ``jsonl`` of ``STORAGE_GUESTS``."""

    def fits(self, index: PackedIndex) -> bool:
        """Return True if an index belongs to the file in its current state."""

    def make(self) -> PackedIndex:
        """Make the index.

        Raises:
            DatasetError: the file cannot be read.
            ShardChangedError: it was written to during the scan.
        """


def index_of_file(path: str) -> FileIndex:
    """Return the maker of the index of a file, local or behind a URL.

    Raises:
        NotPreparedError: there is no such file.
        UsageError: the guest is not installed.
    """
    target = storage_guests().get("jsonl")
    if target is None:
        raise UsageError(
            "JSONL files are indexed by the extra 'formats', which is not installed",
            where=path,
            fix="install energon_lite with energon_lite/extras/formats",
        )
    made: FileIndex = load(target)(path)
    return made


def is_jsonl(path: str) -> bool:
    """Return True for the path of a JSONL file."""
    return path.endswith(".jsonl")


def folder_of_shards(root: str) -> str:
    """The folder that names of shards are relative to: the data set's own, or the folder of a JSONL file."""
    return folder_and_name(root)[0] if is_jsonl(root) else root


def folder_and_name(path: str) -> tuple[str, str]:
    """Split a path or URL into folder and name, which :func:`os.path.join` joins to the same path again.

    Example:
        >>> folder_and_name("s3://bucket/chats.jsonl"), folder_and_name("memory://chats.jsonl")
        (('s3://bucket', 'chats.jsonl'), ('memory://', 'chats.jsonl'))
    """
    folder, name = os.path.split(path)
    return (f"{folder}//" if folder.endswith(":") else folder), name
