"""Lazy values whose files are in a cache folder."""

from __future__ import annotations

import os
import pickle
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from energon_lite.errors import UsageError
from energon_lite.samples import SourceInfo, add_source_info
from energon_lite.storage.stores import Lazy, MockLazy, StoreEntry, direct

if TYPE_CHECKING:
    from energon_lite.extras.media.file_cache_pool import FileStoreCachePool

T = TypeVar("T")


@dataclass(eq=False)
class CacheEntry(StoreEntry):
    """The state of a store's file in a cache pool.

    Args:
        ds, fname: the store, and the name of the file in it.
        process: number of the process that owns the pool.
        send_to_cache_future: result of the fetch: True if the value is on the disk.
        refcount: lazy values that refer to it and have not been read.
        waiting: lazy values that are being read at the moment.
        kept_size: bytes on the disk.
        cache_path: the file on the disk; None: there is none.
        read_from: source of the value; None: it has not been read.
        is_pickled: the file on the disk holds a pickle, not plain bytes.
    """

    ds: Any
    fname: str
    process: int
    send_to_cache_future: Future[bool] = field(default_factory=Future)
    refcount: int = 1
    waiting: int = 0
    kept_size: int = 0
    cache_path: Path | None = None
    read_from: SourceInfo | None = None
    is_pickled: bool = False

    @property
    def require_data_now(self) -> bool:
        """True if a caller waits for the value."""
        return self.waiting > 0


class FileCacheLazy(Lazy[T]):
    """A value that is fetched in the background, made by :meth:`FileStoreCachePool.get_lazy`. If the fetch has not
    started, or if there is no space, it is read at the first request."""

    _data: tuple[T, SourceInfo] | None = None

    def __init__(self, *, pool: FileStoreCachePool, entry: CacheEntry):
        super().__init__(ds=entry.ds, fname=entry.fname, pool=pool)
        self.entry = entry
        self._cache = pool
        self._is_used = False

    def get(self, sample: Any = None) -> T:
        if self._data is None:
            if self._is_used:  # the first call failed
                self._data = self.ds[self.fname]
            else:
                self._is_used = True
                self._data = self._cache.value_of(self.entry)
        value, source = self._data
        add_source_info(sample, source)
        return value

    def __del__(self) -> None:
        if not getattr(self, "_is_used", True) and self.entry.process == os.getpid():
            self._cache.drop_later(self.entry)

    def __reduce__(self) -> Any:
        return direct, (self.ds, self.fname)


_NOTHING: Any = object()


class CacheFileLazy(Lazy[T]):
    """A value that :meth:`FileStoreCachePool.to_cache` has written to the disk."""

    def __init__(
        self, *, pool: FileStoreCachePool, fname: str, data: T = _NOTHING, cache_path: Path | None = None, size: int = 0
    ):
        super().__init__(ds=None, fname=fname, pool=pool)
        self.cache_path = cache_path
        self._cache = pool
        self._size = size
        self._data = data
        self._process = os.getpid()

    def get(self, sample: Any = None) -> T:
        if self._data is _NOTHING:
            assert self.cache_path is not None
            try:
                raw = self.cache_path.read_bytes()
            except FileNotFoundError:
                raise UsageError(f"{self.fname!r} was stored in a cache pool that is closed") from None
            self._data = pickle.loads(raw)  # written by this user, in a private folder
            self._drop()
        return self._data

    def _drop(self) -> None:
        path, self.cache_path = self.cache_path, None
        if path is not None and self._process == os.getpid():
            self._cache.drop_later((os.fspath(path), self._size))

    def __del__(self) -> None:
        if getattr(self, "cache_path", None) is not None:
            self._drop()

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __reduce__(self) -> Any:
        return _held, (self.fname, self.get())


def _held(name: str, data: T) -> MockLazy[T]:
    return MockLazy(name, lambda _: data)
