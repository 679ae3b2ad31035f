"""Writing of files behind a URL, each atomically."""

from __future__ import annotations

import os

from energon_lite.errors import DatasetError, UsageError
from energon_lite.storage.files.remote_files import file_system, list_files, tried

__all__ = ["check_writable", "put_bytes", "put_file", "remove_file"]

#: Schemes of servers that cannot be written to.
_READ_ONLY = ("http", "https")


def check_writable(url: str, name: str) -> None:
    """Write an empty file, to detect missing permissions before long work; the caller removes it.

    Raises:
        UsageError: nothing can be written there.
        DatasetError: the store does not answer.
    """
    scheme = url.partition("://")[0]
    what = f"nothing can be written behind {scheme}://"
    fix = "prepare a local copy and upload .nv-meta and the .tar.idx files with the shards, or give the store's own URL"
    if scheme in _READ_ONLY:
        raise UsageError(what, where=url, fix=fix)
    try:
        put_bytes(url, name, b"")
    except DatasetError as error:
        raise UsageError(f"nothing can be written there: {error.what}", where=url, fix=fix) from error


def put_bytes(url: str, name: str, data: bytes) -> None:
    """Write the file ``name`` below ``url``.

    Raises:
        DatasetError: the store refuses, or fails repeatedly.
    """
    fs, base = file_system(url)
    tried(lambda: fs.pipe_file(f"{base}/{name}", data), url, name)


def put_file(url: str, name: str, source: str) -> None:
    """Write the file ``name`` below ``url`` with the contents of a local file.

    Raises:
        DatasetError: the store refuses, fails repeatedly, or has another number of bytes afterwards.
    """
    fs, base = file_system(url)

    def put() -> None:
        fs.put_file(source, f"{base}/{name}")
        fs.invalidate_cache()
        size, there = os.path.getsize(source), fs.info(f"{base}/{name}").get("size")
        if there is not None and int(there) != size:
            raise OSError(f"{there} bytes have arrived instead of {size}")

    tried(put, url, name)


def remove_file(url: str, name: str) -> None:
    """Remove a file if it exists.

    Raises:
        DatasetError: the store refuses, or fails repeatedly.
    """
    folder, _, file = name.rpartition("/")
    if file in list_files(url, folder):
        fs, base = file_system(url)
        tried(lambda: fs.rm_file(f"{base}/{name}"), url, name)
