"""Stores: data sets and folders out of which a cooker takes files by their names."""

from __future__ import annotations

import pickle
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from energon_lite.errors import UsageError
from energon_lite.samples import SourceInfo, add_source_info

__all__ = ["DecodeFileStore", "FileStore", "FileStoreDecoder", "FileStoreWrapper", "PrimaryFileStore"]

T = TypeVar("T")


class FileStore(Generic[T]):
    """Files by name. Derive a store of your own from it with ``__getitem__`` and ``get_path``.

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
        """The value of a key, and where it was read.

        Raises:
            MissingEntryError: there is no such key; a KeyError, too.
        """
        raise NotImplementedError

    def get(self, key: str, sample: Any = None) -> T:
        """The value of a key.

        Args:
            key: the name of the file.
            sample: the sample that it is for; where it was read is added to its ``__sources__``.
        """
        value, source = self[key]
        add_source_info(sample, source)
        return value

    def get_path(self) -> str:
        """Where the store is."""
        raise NotImplementedError

    def get_media_metadata(self, key: str) -> Any:
        """What is known about the picture, the sound or the video of a key without reading it: an
        :class:`~energon_lite.extras.media.metadata.ImageMetadata` or ``AVMetadata``, if the data set was
        prepared with media metadata.

        Raises:
            UsageError: the store has none.
            MissingEntryError: it has none of this key.
        """
        raise UsageError(f"a {type(self).__name__} has no media metadata", where=self.get_path())

    def raw(self, key: str) -> tuple[Any, SourceInfo]:
        """What a cache keeps of a key: its bytes, where the store decodes them."""
        return self[key]

    def locate(self, key: str) -> tuple[int, SourceInfo]:
        """The bytes that a key has, before they are decoded, and where they are. Stores of this library know without
        reading the payload; for others it is read.

        Raises:
            MissingEntryError: there is no such key.
        """
        data, source = self.raw(key)
        return len(data if isinstance(data, (bytes, bytearray, memoryview)) else pickle.dumps(data)), source

    def decoded(self, key: str, data: Any) -> Any:
        """The value of a key, made of what :meth:`raw` gave."""
        return data

    def resolve(self, key: str) -> tuple[FileStore[Any], str]:
        """The store that a key is in, and its whole name there."""
        return self, key


class FileStoreWrapper(FileStore[T]):
    """A store over another one.

    Args:
        inner: the other one.
    """

    def __init__(self, inner: FileStore[Any]):
        self._inner = inner

    def __getitem__(self, key: str) -> tuple[T, SourceInfo]:
        value, source = self._inner[key]
        return value, source

    def get_path(self) -> str:
        return self._inner.get_path()

    def get_media_metadata(self, key: str) -> Any:
        return self._inner.get_media_metadata(key)

    def raw(self, key: str) -> tuple[Any, SourceInfo]:
        return self._inner.raw(key)

    def locate(self, key: str) -> tuple[int, SourceInfo]:
        return self._inner.locate(key)

    def decoded(self, key: str, data: Any) -> Any:
        return self._inner.decoded(key, data)


@runtime_checkable
class FileStoreDecoder(Protocol):
    """Makes values of bytes, by the extension of the name. :class:`~energon_lite.storage.SampleDecoder` is one."""

    def decode(self, fname: str, data: bytes, /) -> Any:
        """The value of a file."""


class DecodeFileStore(FileStoreWrapper[Any]):
    """The files of a store, decoded.

    Args:
        inner: the store of bytes.
        decoder: what decodes them.

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
    """The data set that a sample is of, as a store; a key that begins with a dot is one of the sample's own parts.

    Args:
        inner: the data set.
        current_key: the sample's.

    Example:
        >>> PrimaryFileStore(store, "0001").get(".jpg") == store.get("0001.jpg")
        True
    """

    def __init__(self, inner: FileStore[Any], current_key: str):
        super().__init__(inner)
        self._current_key = current_key

    def __getitem__(self, key: str) -> tuple[T, SourceInfo]:
        value, source = self._inner[self._full(key)]
        return value, source

    def get_media_metadata(self, key: str) -> Any:
        return self._inner.get_media_metadata(self._full(key))

    def raw(self, key: str) -> tuple[Any, SourceInfo]:
        return self._inner.raw(self._full(key))

    def locate(self, key: str) -> tuple[int, SourceInfo]:
        return self._inner.locate(self._full(key))

    def decoded(self, key: str, data: Any) -> Any:
        return self._inner.decoded(self._full(key), data)

    def resolve(self, key: str) -> tuple[FileStore[Any], str]:
        return self._inner.resolve(self._full(key))

    def _full(self, key: str) -> str:
        return f"{self._current_key}{key}" if key.startswith(".") else key
