"""Base classes of stores: data sets and folders from which a cooker reads files by name."""

from __future__ import annotations

import pickle
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from energon_lite.errors import UsageError
from energon_lite.samples import SourceInfo, add_source_info

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
        value, source = self._inner[self._full(key)]
        return value, source

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
