"""Files behind a URL: ``s3://bucket/a.tar``, ``gs://...``, ``msc://profile/...``, ``memory://...``, all of fsspec.

Every answer is checked: it must have as many bytes as were requested, and over HTTP its status and range must match the
request. A store without support for ranges answers with the whole object, the wrong bytes for nearly every request; it
is refused.

A failed request is sent again as long as that may help (:mod:`energon_lite.extras.remote.store_tries`): for minutes
while a store is overloaded or unreachable; three times after an unknown error; never after wrong credentials.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from energon_lite.errors import DatasetError, FatalStorageError
from energon_lite.extras.remote.direct_ranges import direct_ranges
from energon_lite.extras.remote.file_versions import (
    Answer,
    are_current,
    expect_version,
    is_check_due,
    numbers_of,
    version_in,
)
from energon_lite.extras.remote.store_tries import StoreTries, answered, server_of
from energon_lite.storage.files.byte_ranges import UrlFiles
from energon_lite.storage.files.retries import SHORTAGES, out_of
from energon_lite.storage.files.shard_store import changed_shard, drop_oldest

_log = logging.getLogger(__name__)

T = TypeVar("T")

#: Seconds to wait for a store that is unreachable, during a run.
_PATIENCE = 600.0
#: Seconds to wait for a store that is unreachable, when a data set is opened.
_PATIENCE_AT_START = 6.0
#: Seconds of waiting after which a warning is logged.
_TOLD = 5.0

# By server or bucket. A file system object owns threads and sockets, which do not survive a fork: each process has its
# own.
_file_systems: dict[tuple[int, str], Any] = {}
#: File system and path of each URL: looking them up for each request takes as long as the rest of it.
_opened: dict[tuple[int, str], tuple[Any, str]] = {}
#: Most URLs in that table.
_OPENED = 1 << 14


def read_range(url: str, offset: int, size: int, version: int = 0) -> bytes:
    """Read the ``size`` bytes at ``offset`` of a remote file. Waits while the store is unreachable.

    Args:
        version: the expected version of the file (:mod:`energon_lite.extras.remote.file_versions`); 0: that of the
            first read in this process.

    Raises:
        FileNotFoundError: there is no such file.
        ShardChangedError: the file was replaced.
        FatalStorageError: the store answers with other bytes, refuses the request, or stays unreachable.
        DatasetError: the store failed otherwise, or answered with too few bytes, several times.
    """
    loop = reads_in_loop(url)
    if loop is not None:
        from fsspec.asyn import sync

        return sync(loop, read_range_in_loop, url, offset, size, version)
    fs, path = file_system(url)

    def request() -> bytes:
        data = _checked(fs.cat_file(path, start=offset, end=offset + size), url, offset, size)
        if is_check_due(url):
            info = {}
            with suppress(Exception):  # such as a store that answers to reads only
                fs.invalidate_cache()
                info = fs.info(path)
            are_current(url, numbers_of(info), version)
        return data

    return tried(request, url, None, _PATIENCE)


def reads_in_loop(url: str) -> Any | None:
    """Return the event loop in which :func:`read_range_in_loop` can read this URL; None: there is none."""
    fs, _ = file_system(url)
    # A class that defines cat_file itself is not asynchronous inside.
    return getattr(fs, "loop", None) if getattr(fs, "async_impl", False) and "cat_file" in vars(fs) else None


async def read_range_in_loop(url: str, offset: int, size: int, version: int = 0) -> bytes:
    """:func:`read_range` in the event loop of the file system, where very many requests can wait at the same time."""
    fs, path = file_system(url)
    reader, tries = direct_ranges(fs), None
    while True:
        try:
            answer = None if reader is None else await reader.read(path, offset, size)
            if answer is None:
                options, told = _options(url, offset, size)
                data = await fs._cat_file(path, start=offset, end=offset + size, **options)
                answer = Answer(data, told.get("ETag", ""), told.get("Last-Modified", ""))
            data = _checked(answer.data, url, offset, size)
            answered(url)
            if not are_current(url, answer.versions, version) and is_check_due(url):
                info = {}
                with suppress(Exception):  # such as a store that answers to reads only
                    fs.invalidate_cache()
                    info = await fs._info(path)
                are_current(url, numbers_of(info), version)
            return data
        except Exception as error:  # clients of stores raise exceptions of all kinds
            tries = tries or StoreTries(url, _PATIENCE)
            wait = _wait_after(error, tries, url, _PATIENCE)
        await asyncio.sleep(wait)


def _options(url: str, offset: int, size: int) -> tuple[dict[str, Any], Mapping[str, str]]:
    """Options of a request for a range, and the headers of its answer, once that has arrived; both only for HTTP."""
    headers = dict[str, str]()
    if not url.startswith(("http://", "https://")):
        return {}, headers

    async def check(response: Any) -> None:
        check_answer(response.status, response.headers, url, offset, size)
        response.raise_for_status()
        headers.update({name: response.headers.get(name, "") for name in ("ETag", "Last-Modified")})

    return {"raise_for_status": check}, headers


def _checked(data: bytes, url: str, offset: int, size: int) -> bytes:
    if len(data) > size:
        raise wrong_range(url, f"{len(data)} bytes were answered instead of the {size} at byte {offset}")
    if len(data) < size:
        raise OSError(f"{len(data)} bytes were answered instead of the {size} at byte {offset}")
    return data


def check_answer(status: int, headers: Mapping[str, str], url: str, offset: int, size: int) -> None:
    """Check that an answer over HTTP is the requested range, or an error that the file system reports itself.

    Raises:
        FileNotFoundError: there is no such file.
        FatalStorageError: the answer is another range.
    """
    if status == 404:
        raise FileNotFoundError(url)
    if status >= 400:
        return
    asked, answered = f"bytes {offset}-{offset + size - 1}", headers.get("Content-Range", "")
    coding = headers.get("Content-Encoding", "identity")
    if status != 206:
        raise wrong_range(url, f"it answered with status {status}, where 206 says that it is a part")
    if not answered.startswith(f"{asked}/") or coding != "identity":
        raise wrong_range(url, f"it was asked for {asked}, and answered with {answered or 'no range'!r} as {coding}")


def wrong_range(url: str, how: str) -> FatalStorageError:
    """Return the error for an answer with other bytes than the requested ones."""
    return FatalStorageError(
        f"the store does not give the part of a file that it is asked for: {how}",
        where=url,
        fix="use a server that knows HTTP range requests (nginx and object stores do; python -m http.server does not), "
        "and none that compresses on the way; or copy the data set to a local disk",
    )


def list_files(url: str, folder: str = "") -> dict[str, dict[str, Any]]:
    """Return the store's record of each file below a folder of ``url``, by relative path; empty: there is none.

    Raises:
        DatasetError: the store does not answer, or its package is not installed.
    """
    fs, base = file_system(url)
    where = f"{base}/{folder}".rstrip("/")
    fs.invalidate_cache()
    expect_version(url, None)
    try:
        listing = tried(lambda: fs.find(where, detail=True, withdirs=False), url, folder or None, _PATIENCE_AT_START)
    except FileNotFoundError:
        return {}
    prefix = where.lstrip("/") + "/"
    return {name.lstrip("/").removeprefix(prefix): info for name, info in listing.items()}


def file_info(url: str) -> dict[str, Any]:
    """Return the store's record of a file.

    Raises:
        FileNotFoundError: there is no such file.
        DatasetError: the store does not answer, or its package is not installed.
    """
    fs, path = file_system(url)
    fs.invalidate_cache()
    return tried(lambda: fs.info(path), url, None, _PATIENCE_AT_START)


def read_file(url: str) -> bytes:
    """Read a small file as a whole; also from servers without support for ranges.

    Raises:
        FileNotFoundError, DatasetError: as :func:`file_info`.
    """
    fs, path = file_system(url)
    return tried(lambda: fs.cat_file(path), url, None, _PATIENCE_AT_START)


def copy_file(url: str, name: str, target: str, size: int | None) -> None:
    """Copy the file ``name`` below ``url`` to a local one; it must have ``size`` bytes, if that is known.

    Raises:
        FileNotFoundError: there is no such file.
        DatasetError: the store failed, or answered with too few bytes, several times.
    """
    fs, base = file_system(url)

    def request() -> None:
        fs.get_file(f"{base}/{name}", target)
        if size is not None and os.path.getsize(target) != size:
            raise OSError(f"{os.path.getsize(target)} bytes were answered instead of {size}")

    tried(request, url, name, _PATIENCE_AT_START)


def size_in(info: Mapping[str, Any]) -> int | None:
    """Return the bytes of a file by the store's record of it; None: it does not say."""
    size = info.get("size")
    return None if size is None else int(size)


def file_size(url: str, info: Mapping[str, Any] | None = None) -> int:
    """Return the bytes of a remote file.

    Args:
        info: a record of the file, if there is one already, as in a listing; without a size in it, another one is
            requested.

    Raises:
        FileNotFoundError: there is no such file.
        DatasetError: the store failed, or its record has no size.
    """
    size = size_in(info or {})
    if size is None and (size := size_in(file_info(url))) is None:
        raise DatasetError(
            "the store does not say how large the file is", where=url, fix="use a store, or a server, that does"
        )
    return size


def file_system(url: str) -> tuple[Any, str]:
    """Return the file system behind a URL, and the path in it.

    Raises:
        DatasetError: no installed package can read it, or it is a chained URL.
    """
    known = _opened.get((os.getpid(), url))
    if known is not None:
        return known
    if "::" in url:
        raise DatasetError(
            "chained URLs are not read: they can make fsspec do more than reading",
            where=url,
            fix=f"give {url.rpartition('::')[2]!r}; ReadAhead(folder=...) keeps what was read on a local disk",
        )
    server = server_of(url)
    fs = _file_systems.get((os.getpid(), server))
    if fs is None:
        import fsspec

        try:
            fs, _ = fsspec.core.url_to_fs(url)
        except Exception as error:  # clients of stores raise exceptions of all kinds
            raise DatasetError(
                f"fsspec cannot open {url.partition('://')[0]}:// here: {error}",
                where=url,
                fix="install the package that fsspec names for it: pip install 'energon-lite[s3]' for s3://, "
                "'energon-lite[msc]' for msc://, gcsfs for gs://, aiohttp for http://; or register_source, if it is a "
                "format of your own",
            ) from error
        _file_systems[os.getpid(), server] = fs
    path: str = fs._strip_protocol(url)
    drop_oldest(_opened, _OPENED - 1)
    return _opened.setdefault((os.getpid(), url), (fs, path.rstrip("/")))


def tried(request: Callable[[], T], url: str, part: str | None, patience: float = _PATIENCE_AT_START) -> T:
    """Send a request; send it again for up to ``patience`` seconds if it fails in a way that may pass."""
    tries, where = StoreTries(url, patience), url if part is None else f"{url}/{part}"
    while True:
        try:
            result = request()
            answered(url)
            return result
        except Exception as error:  # clients of stores raise exceptions of all kinds
            wait = _wait_after(error, tries, where, patience)
        time.sleep(wait)


def _wait_after(error: Exception, tries: StoreTries, where: str, patience: float) -> float:
    """Seconds to wait before the next try.

    Raises:
        FileNotFoundError, FatalStorageError, DatasetError: there is no further try.
    """
    if isinstance(error, FatalStorageError):
        raise error
    wait = tries.wait_after(error)
    if tries.kind == "missing":
        raise FileNotFoundError(where) from error
    if wait is None:
        if isinstance(error, OSError) and error.errno in SHORTAGES:
            raise out_of(error, where) from error
        raise _failed(error, tries, where) from error
    if tries.seconds > _TOLD and not tries.is_reported:
        tries.is_reported = True
        _log.warning("%s does not answer, waiting for at most %.0f s: %s", where, patience, error)
    return wait


def _failed(error: Exception, tries: StoreTries, where: str) -> DatasetError:
    cause = f"{type(error).__name__}: {error}"
    if tries.kind == "refused":
        return FatalStorageError(
            f"the store cannot be read, it refuses the request: {cause}",
            where=where,
            fix="check the credentials and what they allow, the address, and the name of the bucket",
        )
    if tries.kind in ("passing", "short"):
        return FatalStorageError(
            f"the store cannot be read, for {tries.seconds:.0f} s: {cause}",
            where=where,
            fix="check the address and the network; a saved run goes on where it was",
        )
    return DatasetError(
        f"the store cannot be read: {cause}", where=where, fix="check the address, the credentials and the network"
    )


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


def found(url: str) -> dict[str, Any]:
    """Return the store's current record of a file, whose version is expected from now on."""
    info = file_info(url)
    expect_version(url, info)
    return info


#: Objects of stores as the core opens them: entry ``url_files`` of ``STORAGE_GUESTS``.
FILES = UrlFiles(found, file_size, version_in, list_files, read_file, read_range, copy_file, RemoteFile)
