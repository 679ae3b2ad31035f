"""Cache pools: lazy values for cookers, which may be fetched before they are asked for."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

from energon_lite.errors import UsageError
from energon_lite.storage.stores.file_store import FileStore
from energon_lite.storage.stores.lazy import DirectLazy, Lazy, MockLazy

__all__ = ["CachePool", "NoCachePool", "checked_pool"]

T = TypeVar("T")


class CachePool:
    """Makes lazy values. Give one to a loader; cookers with ``need_cache=True`` get it, and other hooks find it as
    ``self.cache``."""

    def get(self, ds: FileStore[Any], fname: str, sample: Any = None) -> Any:
        """A value, read now; where it was read is added to the sample."""
        return ds.get(fname, sample)

    def get_lazy(self, ds: FileStore[Any], fname: str) -> Lazy[Any]:
        """A value that will be asked for later.

        Args:
            ds: the store.
            fname: the name of the file in it.
        """
        raise NotImplementedError

    def to_cache(self, data: T, name: str) -> Lazy[T]:
        """A value that is there already, put aside until it is asked for.

        Args:
            data: the value; one that pickle knows.
            name: for messages.
        """
        raise NotImplementedError

    def release(self) -> None:
        """Give back what nobody refers to any more, that of workers that are gone included. Loaders call it when they
        are closed; the pool can still be used."""

    def close(self) -> None:
        """Let everything go. Values that were not asked for are read from their stores then."""


class NoCachePool(CachePool):
    """Keeps nothing: values are read when they are asked for. What is used where a loader has no other pool."""

    def get_lazy(self, ds: FileStore[Any], fname: str) -> Lazy[Any]:
        store, key = ds.resolve(fname) if isinstance(ds, FileStore) else (ds, fname)
        return DirectLazy(ds=store, fname=key, pool=self)

    def to_cache(self, data: T, name: str) -> Lazy[T]:
        return MockLazy(name, partial(_itself, data))


def _itself(data: T, name: str) -> T:
    return data


def checked_pool(pool: CachePool | None) -> CachePool | None:
    """A pool that a user gave.

    Raises:
        UsageError: it is none.
    """
    if pool is None or isinstance(pool, CachePool):
        return pool
    raise UsageError(
        f"cache_pool is a {type(pool).__name__}", fix="give a FileStoreCachePool, or derive yours from CachePool"
    )
