"""Stores of the files in a folder, on a local disk or behind a URL; and the stores that ``aux`` names for cookers."""

from __future__ import annotations

import errno
import os
import posixpath
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from energon_lite.config.leaf_spec import AuxReference
from energon_lite.documents.paths import is_url
from energon_lite.errors import ConfigError, DatasetError, EnergonLiteError, MissingEntryError, UsageError
from energon_lite.extras.media.metadata import MediaTable
from energon_lite.extras.media.webdataset_store import JsonlFileStore, WebdatasetFileStore
from energon_lite.samples import SourceInfo
from energon_lite.storage.files.byte_ranges import size_of, url_files
from energon_lite.storage.files.retries import SHORTAGES, out_of
from energon_lite.storage.index.nv_meta import is_jsonl
from energon_lite.storage.read.opened_source import AnySource, OpenedSource
from energon_lite.storage.stores import FileStore

T = TypeVar("T")


class SystemFileStore(FileStore[bytes]):
    """The files below a folder, by their paths.

    Args:
        base_dir: the folder, or its URL. None: keys are absolute paths.

    Raises:
        DatasetError: the folder does not exist on this machine.

    Example:
        >>> data, source = SystemFileStore("images")["cats/0001.jpg"]
        >>> source.file_names
        ('cats/0001.jpg',)
    """

    def __init__(self, base_dir: str | os.PathLike[str] | None = None):
        text = None if base_dir is None else os.fspath(base_dir) if hasattr(base_dir, "__fspath__") else str(base_dir)
        self.base_dir: str | None = text if text is None or is_url(text) else text.removeprefix("file://")
        self._media: MediaTable | None = None
        if self.base_dir is not None:
            if not is_url(self.base_dir) and not os.path.isdir(self.base_dir):
                raise DatasetError("there is no such folder", where=self.base_dir, fix="check the path")
            self._media = MediaTable(self.base_dir)

    def __getitem__(self, key: str) -> tuple[bytes, SourceInfo]:
        return self._read(self._path(key), key, 0, None), self._source(key)

    def locate(self, key: str) -> tuple[int, SourceInfo]:
        path = self._path(key)
        size = self._asked(lambda: size_of(path), path, key)
        return size, self._source(key)

    def get_path(self) -> str:
        return str(self.base_dir)

    def get_media_metadata(self, key: str) -> Any:
        return super().get_media_metadata(key) if self._media is None else self._media.get(key)

    def __str__(self) -> str:
        return f"{type(self).__name__}({self.base_dir})"

    def _source(self, key: str) -> SourceInfo:
        folder = self.base_dir or ""
        return SourceInfo(dataset_path=folder, index=key, shard_name=folder, file_names=(key,))

    def _path(self, key: str) -> str:
        """The full path of a key. It must not lead out of the folder: keys come from data."""
        if self.base_dir is None:
            return key
        if is_url(self.base_dir):
            inside = posixpath.normpath(f"/{key}".replace("//", "/"))
            leads_out = posixpath.normpath(key).split("/", 1)[0] == ".." or key.startswith("/")
            path = self.base_dir.rstrip("/") + inside
        else:
            base = os.path.abspath(self.base_dir)
            path = os.path.abspath(os.path.join(base, key))
            leads_out = os.path.commonpath([base, path]) != base
        if leads_out or "\0" in key:
            raise MissingEntryError(
                f"{key!r} leads out of the folder",
                where=self.base_dir,
                fix="give a folder above all files, filesystem:/// at most; or correct the key",
            )
        return path

    def _read(self, path: str, key: str, offset: int, size: int | None) -> bytes:
        def read() -> bytes:
            if is_url(path):
                files = url_files(path)
                return files.read_file(path) if size is None else files.read_range(path, offset, size)
            with open(path, "rb") as file:
                file.seek(offset)
                return file.read() if size is None else file.read(size)

        return self._asked(read, path, key)

    def _asked(self, ask: Callable[[], T], path: str, key: str) -> T:
        """Return the result of a call to a file system; its errors become those of this library."""
        try:
            return ask()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise MissingEntryError(f"there is no file {key!r}", where=self.get_path()) from error
        except OSError as error:
            if isinstance(error, DatasetError):
                raise
            if error.errno in SHORTAGES:
                raise out_of(error, path) from error
            what = error.strerror or str(error) if error.errno != errno.ENAMETOOLONG else "its name is too long"
            raise DatasetError(f"{key!r} cannot be read: {what}", where=path, fix="check the storage") from error


class ByteRangeStore(SystemFileStore):
    """Pieces of the files below a folder; keys are ``path/to/file#bytes=offset:size``.

    Args:
        base_dir: the folder, or its URL.

    Example:
        >>> ByteRangeStore("blobs").get("part-0.bin#bytes=4096:100")
    """

    def __getitem__(self, key: str) -> tuple[bytes, SourceInfo]:
        name, offset, size = self._piece(key)
        data = self._read(self._path(name), name, offset, size)
        if len(data) != size:
            what = f"the file {name!r} has no {size} bytes at byte {offset}"
            raise MissingEntryError(what, where=self.get_path())
        return data, self._source(key)

    def locate(self, key: str) -> tuple[int, SourceInfo]:
        return self._piece(key)[2], self._source(key)

    def _piece(self, key: str) -> tuple[str, int, int]:
        name, mark, numbers = key.rpartition("#bytes=")
        offset, colon, size = numbers.partition(":")
        if not (mark and colon and offset.isdecimal() and size.isdecimal()):
            raise MissingEntryError(
                f"{key!r} is not a part of a file", where=self.get_path(), fix="write path/to/file#bytes=offset:size"
            )
        return name, int(offset), int(size)


#: Store types of the references that are not data sets.
_KINDS = {"filesystem": SystemFileStore, "byterange": ByteRangeStore}


def open_stores(aux: Mapping[str, AuxReference], primary: AnySource | None, /) -> dict[str, FileStore[Any]]:
    """Open the stores of a leaf; see :class:`~energon_lite.loading.metadataset_keys.StoreGuest`."""
    stores = {name: _opened(name, reference) for name, reference in aux.items()}
    if primary is not None:
        stores["primary"] = _primary(primary)
    return stores


def _opened(name: str, reference: AuxReference) -> FileStore[Any]:
    try:
        of_samples = JsonlFileStore if is_jsonl(reference.path) else WebdatasetFileStore
        return _KINDS.get(reference.kind, of_samples)(reference.path)
    except EnergonLiteError as error:
        raise ConfigError(
            f"the store {name!r} cannot be opened: {error.what} ({error.where})", file=reference.origin, fix=error.fix
        ) from error


def _primary(source: AnySource) -> FileStore[Any]:
    if isinstance(source, OpenedSource):
        raise UsageError(
            "a cooker with need_primary=True is for a source of your own, whose samples are found by number only",
            where=source.path,
            fix="leave out need_primary; or name a store of the same data under aux",
        )
    return _opened("primary", AuxReference("dataset", source.path, source.path))
