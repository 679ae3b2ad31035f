"""Objects of stores as the core opens them: entry ``url_files`` of ``STORAGE_GUESTS``."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from energon_lite.errors import DatasetError, FatalStorageError
from energon_lite.extras.remote.file_versions import expect_version, version_in
from energon_lite.extras.remote.remote_files import (
    copy_file,
    file_info,
    file_size,
    list_files,
    read_file,
    read_range,
    read_range_in_loop,
)
from energon_lite.storage.files.byte_ranges import UrlFiles
from energon_lite.storage.files.shard_store import COUNTS, ShardRange, ShardStore, changed_shard, storage_error
from energon_lite.storage.tar_headers import BLOCK


class RemoteFile:
    """An object of a known size and version. Nothing is kept open; each read is a request, whose answer has to be of
    that version."""

    __slots__ = ("_size", "_url", "_version")

    def __init__(self, url: str, size: int, version: int):
        self._url = url
        self._size = size
        self._version = version

    def size(self) -> int:
        return self._size

    def read(self, size: int, offset: int) -> bytes:
        wanted = min(size, self._size - offset)
        try:
            return read_range(self._url, offset, wanted, self._version) if wanted > 0 else b""
        except DatasetError as error:
            raise explained(error, self._url, self._size) from error.__cause__


def explained(error: BaseException, url: str, size: int) -> BaseException:
    """Return the error for a failed range of an object; if it has another size now, an error that says so."""
    if isinstance(error, DatasetError) and not isinstance(error, FatalStorageError):
        with suppress(OSError, DatasetError):
            if (now := file_size(url)) != size:
                return changed_shard(url, size, now)
    return error


async def read_in_loop(store: ShardStore, one: ShardRange) -> bytes:
    """:meth:`ShardStore.read` of a range of an object, awaited in the event loop of its file system."""
    (path, identity), offset, size = one
    try:
        if one.shard not in store:
            block = await read_range_in_loop(path, 0, min(BLOCK, identity.size), identity.version)
            store.keep(one.shard, RemoteFile(path, identity.size, identity.version), block)
        if offset + size > identity.size:
            raise changed_shard(path, offset + size, identity.size)
        data = await read_range_in_loop(path, offset, size, identity.version)
    except OSError as error:
        raise storage_error(path, error) from error
    COUNTS.bytes_read += size
    return data


def found(url: str) -> dict[str, Any]:
    """Return the store's current record of a file, whose version is expected from now on."""
    info = file_info(url)
    expect_version(url, info)
    return info


FILES = UrlFiles(found, file_size, version_in, list_files, read_file, read_range, copy_file, RemoteFile)
