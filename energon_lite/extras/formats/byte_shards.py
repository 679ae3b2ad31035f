"""Files as shards of the process's shared store: they are opened on demand, and identified by size, first block and
version, so that replaced files are detected."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from energon_lite.documents.paths import is_url
from energon_lite.errors import ShardChangedError, ShardFormatError
from energon_lite.storage.files.byte_ranges import file_version, found_at, read_bytes, size_of
from energon_lite.storage.files.shard_store import (
    Range,
    Shard,
    ShardIdentity,
    head_checksum,
    shared_store,
)

#: Requests to a store at the same time.
_TOGETHER = 16


def shard_of(path: str) -> Shard:
    """Return a file as a shard, with its current identity.

    Raises:
        MissingShardError: the file does not exist.
    """
    status = found_at(path)
    size = size_of(path, status)
    return path, ShardIdentity(size, head_checksum(read_bytes(path, 0, min(size, 512))), file_version(status))


def damaged(path: str, error: object, what: str = "the file") -> ShardFormatError:
    """Return the error for a file that cannot be read."""
    reason = " ".join(str(error).split())[:300]
    return ShardFormatError(f"{what} cannot be read: {reason}", where=path, fix="restore or download it again")


def replaced(path: str) -> ShardChangedError:
    """Return the error for a file that is another one than when the data set was opened."""
    what = "the file was replaced since the data set was opened"
    return ShardChangedError(what, where=path, fix="start the run again")


def fetch(ranges: Sequence[Range]) -> list[bytes]:
    """Read ranges in order; for files behind URLs many requests are sent at the same time.

    Raises:
        MissingShardError, ShardChangedError, DatasetError: as :meth:`ShardStore.read`.
    """
    store = shared_store()
    if len(ranges) < 2 or not is_url(ranges[0][0][0]):
        return store.fetch(ranges)
    with ThreadPoolExecutor(min(_TOGETHER, len(ranges))) as pool:
        return [data for [data] in pool.map(lambda span: store.fetch([span]), ranges)]
