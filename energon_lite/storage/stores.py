"""Stores, which hold files by name (samples are read by number); lazy values; and pools, which make them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from energon_lite.errors import UsageError
from energon_lite.samples import SourceInfo, add_source_info

__all__ = [
    *("CachePool", "DecodeFileStore", "DirectLazy", "FileStore", "FileStoreDecoder", "FileStoreWrapper", "Lazy"),
    *("MockLazy", "NoCachePool", "PrimaryFileStore"),
]

T = TypeVar("T")


class FileStore(Generic[T]):
    """Files by name. Derive your own store from it by defining ``__getitem__`` and ``get_path``.

    A store may be used by several threads at a time, is copied to workers by pickle, and is used after a fork.

    Example:
        >>> class Table(FileStore):
        ...     def __getitem__(self, key):
        ...         source = SourceInfo(dataset_path="t", index=key, shard_name="", file_names=(key,))
        ...         return rows[key], source
        ...     def get_path(self):
        ...         return "t"
    """

    def __getitem__(self, key: str) -> tuple[T, SourceInfo]:
        """Return the value of a key, and the place that it was read from.

        Raises:
            MissingEntryError: there is no such key; it is also a KeyError.
        """
        raise NotImplementedError

    def get(self, key: str, sample: Any = None) -> T:
        """Return the value of a key.

        Args:
            key: the name of the file.
            sample: the sample that the value is for; the value's source is added to its ``__sources__``.
        """
        value, source = self[key]
        add_source_info(sample, source)
        return value

    def get_path(self) -> str:
        """Return the place of the store, for messages and sources."""
        raise NotImplementedError

    def get_media_metadata(self, key: str) -> Any:
        """Return the metadata of an image, audio or video without reading it: an
        :class:`~energon_lite.extras.media.metadata.ImageMetadata` or ``AVMetadata``, if the data set was
        prepared with media metadata.

        Raises:
            UsageError: the store has no metadata.
            MissingEntryError: it has none for this key.
        """
        raise UsageError(f"a {type(self).__name__} has no media metadata", where=self.get_path())

    def raw(self, key: str) -> tuple[Any, SourceInfo]:
        """Return the form in which a cache keeps the value of a key: its bytes, if the store decodes them."""
        return self[key]

    def locate(self, key: str) -> tuple[int, SourceInfo]:
        """Return the size of a key's value in bytes, before decoding, and its source. Stores of this library know the
        size without reading the value; other stores read it.

        Raises:
            MissingEntryError: there is no such key.
        """
        data, source = self.raw(key)
        return len(data if isinstance(data, (bytes, bytearray, memoryview)) else pickle.dumps(data)), source

    def decoded(self, key: str, data: Any) -> Any:
        """Return the value of a key from the result of :meth:`raw`."""
        return data

    def resolve(self, key: str) -> tuple[FileStore[Any], str]:
        """Return the innermost store that contains a key, and the full key in that store."""
        return self, key


class FileStoreWrapper(FileStore[T]):
    """A store on top of another one.

    Args:
        inner: the other store.
    """

    def __init__(self, inner: FileStore[Any]):
        self._inner = inner

    def __getitem__(self, key: str) -> tuple[T, SourceInfo]:
        return self._inner[self._full(key)]

    def get_path(self) -> str:
        return self._inner.get_path()

    def get_media_metadata(self, key: str) -> Any:
        return self._inner.get_media_metadata(self._full(key))

    def raw(self, key: str) -> tuple[Any, SourceInfo]:
        return self._inner.raw(self._full(key))

    def locate(self, key: str) -> tuple[int, SourceInfo]:
        return self._inner.locate(self._full(key))

    def decoded(self, key: str, data: Any) -> Any:
        return self._inner.decoded(self._full(key), data)

    def _full(self, key: str) -> str:
        """Return the key in the other store."""
        return key


@runtime_checkable
class FileStoreDecoder(Protocol):
    """A decoder of files by the extension of their name, such as :class:`~energon_lite.storage.SampleDecoder`."""

    def decode(self, fname: str, data: bytes, /) -> Any:
        """Return the decoded value of a file."""


class DecodeFileStore(FileStoreWrapper[Any]):
    """The files of a store, decoded.

    Args:
        inner: the store of bytes.
        decoder: the decoder of its files.

    Example:
        >>> DecodeFileStore(SystemFileStore("images"), decoder=SampleDecoder()).get("0001.jpg").shape
        torch.Size([3, 480, 640])
    """

    def __init__(self, inner: FileStore[Any], *, decoder: FileStoreDecoder):
        super().__init__(inner)
        self.decoder = decoder

    def __getitem__(self, key: str) -> tuple[Any, SourceInfo]:
        data, source = self._inner[key]
        return self.decoder.decode(key, data), source

    def decoded(self, key: str, data: Any) -> Any:
        return self.decoder.decode(key, self._inner.decoded(key, data))

    def __str__(self) -> str:
        return f"{self._inner}, decoded"


class PrimaryFileStore(FileStoreWrapper[T]):
    """The data set of a sample as a store; a key that begins with a dot is one of the sample's own parts.

    Args:
        inner: the data set.
        current_key: the key of the sample.

    Example:
        >>> PrimaryFileStore(store, "0001").get(".jpg") == store.get("0001.jpg")
        True
    """

    def __init__(self, inner: FileStore[Any], current_key: str):
        super().__init__(inner)
        self._current_key = current_key

    def resolve(self, key: str) -> tuple[FileStore[Any], str]:
        return self._inner.resolve(self._full(key))

    def _full(self, key: str) -> str:
        return f"{self._current_key}{key}" if key.startswith(".") else key


# -- lazy values ------------------------------------------------------------------------------------------------------


class Lazy(Generic[T]):
    """A value of a store that is read at the first call of :meth:`get`. Equal to others of the same store and name.

    Args:
        ds: the store.
        fname: the name of the file in it.
        pool: the pool that made it.
    """

    def __init__(self, *, ds: Any, fname: str, pool: CachePool | None = None):
        self.ds = ds
        self.fname = fname
        self.pool = pool

    def get(self, sample: Any = None) -> T:
        """Return the value; each call returns the same object.

        Args:
            sample: the sample that the value is for; the value's source is added to its ``__sources__``.
        """
        raise NotImplementedError

    def __hash__(self) -> int:
        return hash((id(self.ds), self.fname))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lazy) and self.ds is other.ds and self.fname == other.fname

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.fname!r} of {self.ds})"


class StoreEntry:
    """A file of a store. Its size and source are known before it is read, so decisions of a hook that depend on them do
    not depend on the state of a cache.

    Args:
        ds, fname: the store, and the name of the file in it.
    """

    _place: tuple[int, SourceInfo] | None = None

    def __init__(self, ds: Any, fname: str):
        self.ds = ds
        self.fname = fname

    @property
    def data_size(self) -> int:
        """Size of the file in the store in bytes, before decoding.

        Raises:
            MissingEntryError: the store has no such file.
        """
        return self._located()[0]

    @property
    def source_info(self) -> SourceInfo:
        """The source of the value; raises the errors of :attr:`data_size`."""
        return self._located()[1]

    def _located(self) -> tuple[int, SourceInfo]:
        if self._place is None:
            self._place = self.ds.locate(self.fname)
        return self._place


class DirectLazy(Lazy[T]):
    """A value that is read at the first request, without a cache."""

    _data: tuple[T, SourceInfo] | None = None

    @cached_property
    def entry(self) -> StoreEntry:
        """The file with its size and source."""
        return StoreEntry(self.ds, self.fname)

    def get(self, sample: Any = None) -> T:
        if self._data is None:
            self._data = self.ds[self.fname]
        value, source = self._data
        add_source_info(sample, source)
        return value

    def __reduce__(self) -> Any:
        return direct, (self.ds, self.fname)


class MockLazy(Lazy[T]):
    """A value that a function makes; for tests, or for values that are in memory already.

    Args:
        fname: a name.
        get_fn: function of the name, called at each request.

    Example:
        >>> MockLazy("0001.jpg", lambda name: name.upper()).get()
        '0001.JPG'
    """

    def __init__(self, fname: str, get_fn: Callable[[str], T]):
        super().__init__(ds=None, fname=fname)
        self.get_fn = get_fn

    def get(self, sample: Any = None) -> T:
        return self.get_fn(self.fname)

    def __hash__(self) -> int:
        return hash((self.fname, self.get_fn))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MockLazy) and (self.fname, self.get_fn) == (other.fname, other.get_fn)


def direct(store: FileStore[Any], name: str) -> DirectLazy[Any]:
    """Return a lazy value without a cache, as in another process."""
    return DirectLazy(ds=store, fname=name)


# -- cache pools -----------------------------------------------------------------------------------------------------


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
