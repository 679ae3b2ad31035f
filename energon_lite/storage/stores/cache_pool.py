"""Cache pools: makers of lazy values for cookers, which may fetch values before they are needed."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

from energon_lite.errors import UsageError
from energon_lite.storage.stores.file_store import FileStore
from energon_lite.storage.stores.lazy import DirectLazy, Lazy, MockLazy

__all__ = ["CachePool", "NoCachePool", "checked_pool"]

T = TypeVar("T")


class CachePool:
    """Maker of lazy values. Give one to a loader; cookers with ``need_cache=True`` get it as an argument, and other
    hooks have it as ``self.cache``."""

    def get(self, ds: FileStore[Any], fname: str, sample: Any = None) -> Any:
        """Read a value now, and add its source to the sample."""
        return ds.get(fname, sample)

    def get_lazy(self, ds: FileStore[Any], fname: str) -> Lazy[Any]:
        """Return a lazy value that will be needed later.

        Args:
            ds: the store.
            fname: the name of the file in it.
        """
        raise NotImplementedError

    def to_cache(self, data: T, name: str) -> Lazy[T]:
        """Store an existing value until it is needed; return it as a lazy value.

        Args:
            data: the value; it has to be picklable.
            name: a name for messages.
        """
        raise NotImplementedError

    def release(self) -> None:
        """Release space that no lazy value uses, that of ended workers included. Loaders call it when they are closed;
        the pool can still be used."""

    def close(self) -> None:
        """Release all space. Lazy values that have not been read are then read from their stores."""


class NoCachePool(CachePool):
    """A pool without a cache, the default of loaders: values are read when they are needed."""

    def get_lazy(self, ds: FileStore[Any], fname: str) -> Lazy[Any]:
        store, key = ds.resolve(fname) if isinstance(ds, FileStore) else (ds, fname)
        return DirectLazy(ds=store, fname=key, pool=self)

    def to_cache(self, data: T, name: str) -> Lazy[T]:
        return MockLazy(name, partial(_itself, data))


def _itself(data: T, name: str) -> T:
    return data


def checked_pool(pool: CachePool | None) -> CachePool | None:
    """Check a pool that a user gave, and return it.

    Raises:
        UsageError: it is no pool.
    """
    if pool is None or isinstance(pool, CachePool):
        return pool
    raise UsageError(
        f"cache_pool is a {type(pool).__name__}", fix="give a FileStoreCachePool, or derive yours from CachePool"
    )
