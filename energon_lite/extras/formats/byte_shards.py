"""Files as shards of the store that all data sets of a process share: opened when needed, known again, never mixed
up."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from energon_lite.storage.files.byte_ranges import found_at, read_bytes, size_of
from energon_lite.storage.files.remote_files import is_remote
from energon_lite.storage.files.shard_store import (
    Range,
    Shard,
    ShardIdentity,
    file_version,
    head_checksum,
    shared_store,
)

__all__ = ["fetch", "shard_of"]

#: Requests to a store at the same time.
_TOGETHER = 16


def shard_of(path: str) -> Shard:
    """A file as it is now.

    Raises:
        MissingShardError: there is none.
    """
    found = found_at(path)
    size = size_of(path, found)
    return path, ShardIdentity(size, head_checksum(read_bytes(path, 0, min(size, 512))), file_version(found))


def fetch(ranges: Sequence[Range]) -> list[bytes]:
    """The bytes of ranges, in order; of files behind URLs many are requested at the same time.

    Raises:
        MissingShardError, ShardChangedError, DatasetError: as :meth:`ShardStore.read`.
    """
    store = shared_store()
    if len(ranges) < 2 or not is_remote(ranges[0][0][0]):
        return store.fetch(ranges)
    with ThreadPoolExecutor(min(_TOGETHER, len(ranges))) as pool:
        return [data for [data] in pool.map(lambda one: store.fetch([one]), ranges)]
