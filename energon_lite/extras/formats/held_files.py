"""Files of other formats in a process: as shards of its shared store, opened on demand and identified by size, first
block and version, so that replaced files are detected; and a cache of their decoded pieces."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

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

#: Most requests to a store at the same time.
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


#: Most bytes of decoded pieces in a process (but at least one piece); set by ``ENERGON_LITE_HELD_BYTES``.
HELD_BYTES = 1 << 29


class HeldTables:
    """Cache of the most recently used pieces.

    Args:
        limit: bytes at most; the last piece is kept whatever its size.

    Attributes:
        size: bytes that are kept.
        made: number of pieces that were made up to now.

    Example:
        >>> held = HeldTables(1 << 20)
        >>> table = held.get(("a.parquet", 3), lambda: read_row_group(3))
    """

    def __init__(self, limit: int):
        self.limit = limit
        self.size = 0
        self.made = 0
        self._kept: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the piece of a key, made if necessary. The error of a damaged piece is kept, and raised again."""
        with self._lock:
            if (piece := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
        if piece is None:
            try:
                made = make()
            except ShardFormatError as error:
                made = error.with_traceback(None)  # otherwise each sample of a damaged piece would read it all again
            piece = (made, int(getattr(made, "nbytes", 0)))
            self._keep(key, piece)
        if isinstance(piece[0], Exception):
            raise piece[0]
        return piece[0]

    def _keep(self, key: Hashable, piece: tuple[Any, int]) -> None:
        with self._lock:
            self.made += 1
            if key not in self._kept:
                self._kept[key] = piece
                self.size += piece[1]
            while len(self._kept) > 1 and self.size > self.limit:
                self.size -= self._kept.popitem(last=False)[1][1]


@lru_cache(1)
def _of_process(process: int) -> HeldTables:
    return HeldTables(int(os.environ.get("ENERGON_LITE_HELD_BYTES", HELD_BYTES)))


def held_tables() -> HeldTables:
    """Return the cache of this process. A forked child starts with an empty one: the parent's would count twice."""
    return _of_process(os.getpid())
