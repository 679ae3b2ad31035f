"""Files behind a URL: ``s3://bucket/a.tar``, ``gs://...``, ``memory://...``, whatever fsspec reads.

No answer is taken on trust: it must have as many bytes as were asked for, and over HTTP its status and range must say
that it is the part that was asked for. A store that knows no ranges answers with the whole object, the wrong bytes for
nearly every request; it is refused.
"""

from __future__ import annotations

import os
import time
from typing import Any

from energon_lite.errors import DatasetError, FatalStorageError
from energon_lite.storage.files.shortage import SHORTAGES, out_of

__all__ = ["copy_file", "file_size", "is_remote", "list_files", "read_range"]

#: Seconds to wait before a failed request is sent again.
_RETRIES = (0.2, 1.0, 3.0)

# A file system object owns threads and sockets, which do not survive a fork: each process has its own.
_file_systems: dict[tuple[int, str], Any] = {}


def is_remote(path: str) -> bool:
    """True for the URL of a store that is not mounted here."""
    return "://" in path and not path.startswith("file://")


def read_range(url: str, offset: int, size: int) -> bytes:
    """The ``size`` bytes at ``offset`` of a remote file.

    Raises:
        FileNotFoundError: there is no such file.
        FatalStorageError: the store gives other bytes than those it is asked for.
        DatasetError: the store failed, or gave fewer bytes, several times.
    """
    fs, path = _file_system(url)
    options: dict[str, Any] = {}
    if url.startswith(("http://", "https://")):

        async def check(response: Any) -> None:
            _check_answer(response, url, offset, size)

        options["raise_for_status"] = check

    def request() -> bytes:
        data: bytes = fs.cat_file(path, start=offset, end=offset + size, **options)
        if len(data) > size:
            raise _wrong_range(url, f"{len(data)} bytes were answered instead of the {size} at byte {offset}")
        if len(data) < size:
            raise OSError(f"{len(data)} bytes were answered instead of the {size} at byte {offset}")
        return data

    answer: bytes = _tried(request, url, None)
    return answer


def _check_answer(response: Any, url: str, offset: int, size: int) -> None:
    """An answer over HTTP is the range that was asked for; called with aiohttp's response before its body is read."""
    if response.status == 404:
        raise FileNotFoundError(url)
    response.raise_for_status()
    asked, found = f"bytes {offset}-{offset + size - 1}", response.headers.get("Content-Range", "")
    coding = response.headers.get("Content-Encoding", "identity")
    if response.status != 206:
        raise _wrong_range(url, f"it answered with status {response.status}, where 206 says that it is a part")
    if not found.startswith(f"{asked}/") or coding != "identity":
        raise _wrong_range(url, f"it was asked for {asked}, and answered with {found or 'no range'!r} as {coding}")


def _wrong_range(url: str, how: str) -> FatalStorageError:
    return FatalStorageError(
        f"the store does not give the part of a file that it is asked for: {how}",
        where=url,
        fix="use a server that knows HTTP range requests (nginx and object stores do; python -m http.server does not), "
        "and none that compresses on the way; or copy the data set to a local disk",
    )


def file_size(url: str) -> int:
    """How many bytes a remote file has.

    Raises:
        FileNotFoundError: there is no such file.
        DatasetError: the store does not answer, or does not say.
    """
    fs, path = _file_system(url)
    size = _tried(lambda: fs.size(path), url, None)
    if size is None:
        raise DatasetError("the store does not say how long the file is", where=url, fix="copy it to a local disk")
    return int(size)


def list_files(url: str, folder: str = "") -> dict[str, dict[str, Any]]:
    """What the store says of each file below a folder of ``url``, by path relative to it; empty: there is none.

    Raises:
        DatasetError: the store does not answer, or its package is not installed.
    """
    fs, base = _file_system(url)
    where = f"{base}/{folder}".rstrip("/")
    fs.invalidate_cache()
    try:
        found = _tried(lambda: fs.find(where, detail=True, withdirs=False), url, folder or None)
    except FileNotFoundError:
        return {}
    prefix = where.lstrip("/") + "/"
    return {name.lstrip("/").removeprefix(prefix): info for name, info in found.items()}


def copy_file(url: str, name: str, target: str, size: int | None) -> None:
    """Copy the file ``name`` below ``url`` to a local one; it must have ``size`` bytes, if that is known.

    Raises:
        FileNotFoundError: there is no such file.
        DatasetError: the store failed, or gave fewer bytes, several times.
    """
    fs, base = _file_system(url)

    def request() -> None:
        fs.get_file(f"{base}/{name}", target)
        if size is not None and os.path.getsize(target) != size:
            raise OSError(f"{os.path.getsize(target)} bytes were answered instead of {size}")

    _tried(request, url, name)


def _file_system(url: str) -> tuple[Any, str]:
    """The file system behind a URL, and the path in it."""
    if "::" in url:
        raise DatasetError(
            "chained URLs are not read: they can make fsspec do more than reading",
            where=url,
            fix=f"give {url.rpartition('::')[2]!r}; ReadAhead(folder=...) keeps what was read on a local disk",
        )
    scheme = url.partition("://")[0]
    fs = _file_systems.get((os.getpid(), scheme))
    if fs is None:
        import fsspec

        try:
            fs, _ = fsspec.core.url_to_fs(url)
        except Exception as error:  # clients of stores raise what they like
            raise DatasetError(
                f"fsspec cannot open {scheme}:// here: {error}",
                where=url,
                fix="install the package that fsspec names for it (s3fs for s3://, gcsfs for gs://)",
            ) from error
        _file_systems[os.getpid(), scheme] = fs
    path: str = fs._strip_protocol(url)
    return fs, path.rstrip("/")


def _tried(request: Any, url: str, part: str | None) -> Any:
    """Send a request; send it again if it fails in a way that may pass."""
    for wait in (*_RETRIES, None):
        try:
            return request()
        except (FileNotFoundError, FatalStorageError):
            raise
        except Exception as error:  # clients of stores raise what they like
            if wait is None and isinstance(error, OSError) and error.errno in SHORTAGES:
                raise out_of(error, url) from error
            if wait is None or isinstance(error, (PermissionError, TypeError, NotImplementedError)):
                raise DatasetError(
                    f"the store cannot be read: {type(error).__name__}: {error}",
                    where=url if part is None else f"{url}/{part}",
                    fix="check the address, the credentials and the network",
                ) from error
        time.sleep(wait)
    raise AssertionError("not reached")
