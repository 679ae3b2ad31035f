"""Settings for reading slow storage in advance, and the door of the guest that does it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from energon_lite.errors import UsageError
from energon_lite.storage.files.byte_ranges import remote_guest
from energon_lite.storage.files.shard_store import ShardRange


@dataclass(frozen=True)
class ReadAhead:
    """Settings for reading a data set on slow storage in advance.

    Args:
        memory_bytes: bytes of ranges that each process keeps in memory (or mapped from ``folder``).
        requests: requests of one process at the same time.
        hedge: send a second request for a range that takes twice as long as usual; the first answer counts.
        folder: a folder on a local disk, shared by all workers and ranks of a machine and kept from run to run, so
            that each range crosses the network once. Only this user can read its files, and each range is verified
            when it is taken from there. None: memory only; then each worker fetches for itself.
        folder_bytes: size of the folder in bytes; beyond it, the least recently used ranges are removed.

    Example:
        >>> dataset = get_train_dataset("s3://bucket/coco", shuffle_buffer_size=1000, max_samples_per_sequence=100,
        ...                             read_ahead=ReadAhead(folder="/local/cache"), ...)
    """

    memory_bytes: int = 256 << 20
    requests: int = 64
    folder: str | None = None
    folder_bytes: int = 64 << 30
    hedge: bool = True

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "requests", "folder_bytes"):
            if getattr(self, name) < 1:
                raise UsageError(f"read_ahead: {name} is {getattr(self, name)}", fix="give at least 1")


class RangeCache(Protocol):
    """Cache of ranges of shards that are requested ahead, many at the same time.

    ``(settings) -> RangeCache`` is the entry ``range_cache`` of the table ``STORAGE_GUESTS``: the cache that all data
    sets of the process with these settings share.
    """

    def prefetch(self, ranges: Iterable[ShardRange]) -> None:
        """Start to fetch the ranges that will be loaded next, as far as there is room for them. Does not wait."""

    def load(self, ranges: Iterable[ShardRange]) -> None:
        """Fetch these ranges and hold them until the next call. A failed range raises in :meth:`get`."""

    def get(self, one: ShardRange) -> memoryview:
        """Return the bytes of a range.

        Raises:
            MissingShardError, ShardChangedError, DatasetError: as
                :meth:`~energon_lite.storage.files.shard_store.ShardStore.read`.
        """


def range_cache(settings: ReadAhead) -> RangeCache:
    """Return the cache of this process for these settings.

    Raises:
        UsageError: the guest is not installed.
    """
    opened: Callable[[ReadAhead], RangeCache] = remote_guest("range_cache", "shards are read ahead", "read_ahead")
    return opened(settings)
