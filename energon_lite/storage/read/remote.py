"""Data sets behind a URL: ``s3://bucket/coco``, ``gs://...``, ``memory://...``, whatever fsspec reads.

The small files of ``.nv-meta`` (the packed index is the largest) are copied once into the user's cache, and again when
they change; shards are never copied as a whole, only ranges of them are read. A remote data set must have been
prepared with ``energon-lite prepare`` before it was uploaded: indexing needs a local folder.

No answer is taken on trust: it must have as many bytes as were asked for, and over HTTP its status and range must say
that it is the part that was asked for. A store that knows no ranges answers with the whole object, the wrong bytes for
nearly every request; it is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from typing import Any

from energon_lite.errors import DatasetError, FatalStorageError, NotPreparedError
from energon_lite.storage.files.atomic_file import replacing, write_bytes
from energon_lite.storage.files.shortage import SHORTAGES, out_of
from energon_lite.storage.index.index_cache import cache_folder, only_one
from energon_lite.storage.index.jsonl import is_jsonl
from energon_lite.storage.index.nv_meta import META_FOLDER

__all__ = ["is_remote", "local_meta", "read_range", "shard_sizes"]

#: Files of ``.nv-meta`` that nothing here reads.
_UNUSED = (".sqlite", ".sqlite-journal", ".sqlite-shm", ".sqlite-wal", ".lock", ".tmp")
#: Seconds to wait before a failed request is sent again.
_RETRIES = (0.2, 1.0, 3.0)

# A file system object owns threads and sockets, which do not survive a fork: each process has its own.
_file_systems: dict[tuple[int, str], tuple[Any, str]] = {}


def is_remote(path: str) -> bool:
    """True for the URL of a store that is not mounted here."""
    return "://" in path and not path.startswith("file://")


def local_meta(path: str) -> str:
    """The folder in whose ``.nv-meta`` the small files of a data set are: ``path`` itself, or a copy in the cache.

    Raises:
        NotPreparedError: there is no prepared data set behind the URL.
        DatasetError: the store does not answer, or its package is not installed.
    """
    if not is_remote(path):
        return path
    if is_jsonl(path):
        raise NotPreparedError(
            "JSONL files are read from local disks only",
            where=path,
            fix="copy it, or write its samples into tar shards",
        )
    name = hashlib.sha256(path.rstrip("/").encode()).hexdigest()[:16]
    root = os.path.join(cache_folder(), "remote", f"{os.path.basename(path.rstrip('/'))}-{name}")
    folder = os.path.join(root, META_FOLDER)
    os.makedirs(folder, exist_ok=True)
    there = _listing(path, META_FOLDER)
    if not there:
        raise NotPreparedError(
            f"there is no prepared data set (no {META_FOLDER} folder)",
            where=path,
            fix="run `energon-lite prepare` on a local copy, and upload .nv-meta with the shards",
        )
    with only_one(os.path.join(root, "copy")):
        _copy_changed(path, there, root, folder)
    return root


def _copy_changed(path: str, there: dict[str, dict[str, Any]], root: str, folder: str) -> None:
    record = os.path.join(root, "versions.json")
    try:
        with open(record, encoding="utf-8") as file:
            read = json.load(file)
    except (FileNotFoundError, ValueError, RecursionError):
        read = None
    have = read if isinstance(read, dict) else {}
    versions = {name: _version(info) for name, info in there.items()}
    for name in versions:
        local = os.path.join(folder, name)
        if any(versions[name]) and have.get(name) == versions[name] and os.path.exists(local):
            continue
        fs, base = _file_system(path)
        with replacing(local) as temporary:
            source = f"{base}/{META_FOLDER}/{name}"
            _tried(lambda: _copy(fs, source, temporary, there[name].get("size")), path, f"{META_FOLDER}/{name}")  # noqa: B023
    for name in set(os.listdir(folder)) - set(versions):
        os.unlink(os.path.join(folder, name))
    if have != versions:
        write_bytes(record, json.dumps(versions).encode())


def _copy(fs: Any, source: str, target: str, size: int | None) -> None:
    fs.get_file(source, target)
    if size is not None and os.path.getsize(target) != size:
        raise OSError(f"{os.path.getsize(target)} bytes were answered instead of {size}")


def _version(info: dict[str, Any]) -> list[str]:
    """What tells one version of a remote file from another, as far as the store says; all empty if it says nothing."""
    names = ("size", "ETag", "etag", "md5Hash", "mtime", "LastModified", "created")
    return ["" if info.get(name) is None else str(info[name]) for name in names]


def shard_sizes(path: str) -> dict[str, int | None]:
    """Size of every file of a remote data set, by its path relative to it; None: a listing of this store does not say.
    One listing, not one request a shard."""
    sizes = {name: info.get("size") for name, info in _listing(path, "").items()}
    return {name: None if size is None else int(size) for name, size in sizes.items()}


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
    found = response.headers.get("Content-Range", "")
    coding = response.headers.get("Content-Encoding", "identity")
    if response.status != 206:
        raise _wrong_range(url, f"it answered with status {response.status}, where 206 says that it is a part")
    if not re.match(rf"bytes {offset}-{offset + size - 1}/", found) or coding != "identity":
        asked = f"bytes {offset}-{offset + size - 1}"
        raise _wrong_range(url, f"it was asked for {asked}, and answered with {found or 'no range'!r} as {coding}")


def _wrong_range(url: str, how: str) -> FatalStorageError:
    return FatalStorageError(
        f"the store does not give the part of a file that it is asked for: {how}",
        where=url,
        fix="use a server that knows HTTP range requests (nginx and object stores do; python -m http.server does not), "
        "and none that compresses on the way; or copy the data set to a local disk",
    )


def _listing(url: str, folder: str) -> dict[str, dict[str, Any]]:
    fs, base = _file_system(url)
    where = f"{base}/{folder}".rstrip("/")
    fs.invalidate_cache()
    try:
        found = _tried(lambda: fs.find(where, detail=True, withdirs=False), url, folder or None)
    except FileNotFoundError:
        return {}
    prefix = where.lstrip("/") + "/"
    names = {name.lstrip("/").removeprefix(prefix): info for name, info in found.items()}
    return {name: info for name, info in names.items() if not folder or _is_used(name)}


def _is_used(name: str) -> bool:
    return "/" not in name and not name.endswith(_UNUSED)


def _file_system(url: str) -> tuple[Any, str]:
    """The file system behind a URL, and the path in it."""
    if "::" in url:
        raise DatasetError(
            "chained URLs are not read: they can make fsspec do more than reading",
            where=url,
            fix=f"give {url.rpartition('::')[2]!r}; ReadAhead(folder=...) keeps what was read on a local disk",
        )
    scheme = url.partition("://")[0]
    known = _file_systems.get((os.getpid(), scheme))
    if known is None:
        import fsspec

        try:
            fs, _ = fsspec.core.url_to_fs(url)
        except Exception as error:  # clients of stores raise what they like
            raise DatasetError(
                f"fsspec cannot open {scheme}:// here: {error}",
                where=url,
                fix="install the package that fsspec names for it (s3fs for s3://, gcsfs for gs://)",
            ) from error
        known = _file_systems[os.getpid(), scheme] = (fs, scheme)
    path: str = known[0]._strip_protocol(url)
    return known[0], path.rstrip("/")


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
