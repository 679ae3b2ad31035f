"""Objects of a store with checksums, which any number of processes read, write and clean up at the same time.

Objects are put as a whole, so racing writers need nothing. An object is in one of 256 folders, each of which may have a
256th of the bytes: a writer lists one of them, when it has written its share of it, or when it seems full. Processes
that list at the same time may exceed the limit by their shares, until the next of them lists.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import NamedTuple, TypeVar

from energon_lite.errors import DatasetError, UsageError
from energon_lite.extras.remote.checked_folder import HEADER, KEEP_NEXT, StoredFile, header, to_remove
from energon_lite.extras.remote.prepare_url import put_bytes
from energon_lite.extras.remote.remote_files import file_system, list_files, tried

_log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

#: Folders, by the start of an object's name.
_FOLDERS = 256
#: Share of a folder's bytes, as a divisor, that a process writes before it lists the folder again.
_SHARE = 256
#: Most requests at the same time, and most objects that wait to be written.
_TOGETHER, _WAITING = 16, 64
#: Name of an object that tests write access.
_MARK = "energon_lite.store"


class _Threads(NamedTuple):
    pool: ThreadPoolExecutor
    waiting: threading.BoundedSemaphore
    lock: threading.Lock


@cache
def _threads(process: int) -> _Threads:
    """Return the threads of a process: a fork has none."""
    pool = ThreadPoolExecutor(_TOGETHER, "energon-lite-store")
    return _Threads(pool, threading.BoundedSemaphore(_WAITING), threading.Lock())


class CheckedBucket:
    """The objects below a URL; its methods are those of a :class:`CheckedFolder`. Objects are written in threads.

    Args:
        url: the URL.
        limit: bytes of all objects.
        option: the argument that names the URL, for messages.
        kept: folder of objects whose next uses are known.
        distances: returns the distances of their next uses, by name.

    Raises:
        UsageError: nothing can be written there.
    """

    def __init__(
        self, url: str, limit: int, *, option: str, kept: str, distances: Callable[[Sequence[str]], Iterable[float]]
    ):
        self.path = url.rstrip("/")
        self.damaged = 0
        self._limit = limit // _FOLDERS
        self._kept = kept
        self._distances = distances
        self._near = dict[str, float | None]()  # by folder, see to_remove()
        self._folders = dict[str, tuple[int, int]]()  # bytes, and those that may be written before it is listed again
        self._written = Counter[str]()  # bytes that threads write at present: a listing may be without them
        self._error: Exception | None = None
        try:
            put_bytes(self.path, _MARK, b"")
        except (DatasetError, OSError) as error:
            fix = "give the URL of a bucket that this process can write to, or a folder"
            raise UsageError(f"{option}: nothing can be written: {error}", where=url, fix=fix) from error

    def file(self, folder: str, name: str) -> str:
        """Return the path of an object."""
        return f"{folder}/{self._kept}/{name}"

    def each(self, function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        """Return the results of a function for each item, many at the same time."""
        return _threads(os.getpid()).pool.map(function, items)

    def find(self, path: str) -> memoryview | None:
        """Return the bytes of an object if it exists and is intact; another one is written again."""
        fs, base = file_system(self.path)
        try:
            data = memoryview(tried(lambda: fs.cat_file(f"{base}/{path}"), self.path, path))
        except FileNotFoundError:
            return None
        except (DatasetError, OSError) as error:
            self._error = error
            return None
        if bytes(data[:HEADER]) == header(path, data[HEADER:]):
            return data[HEADER:]
        self.damaged += 1
        if self.damaged == 1:
            _log.warning("an object of the store is damaged, it is made again (logged once): %s/%s", self.path, path)
        return None

    def write(self, path: str, data: bytes, distance: Callable[[], float] = lambda: 0.0) -> bool:
        """Write an object in a thread; return False if there is no room for it.

        Args:
            path: its path, from :meth:`file`.
            data: its bytes.
            distance: returns the distance of its next use.

        Raises:
            OSError, DatasetError: the store could not be used for an earlier one.
        """
        if (error := self._error) is not None:
            self._error = None
            raise error
        near, own = self._near.get(path[:2]), distance()
        if HEADER + len(data) > self._limit or (near is not None and 2 * own >= near):
            return False
        threads = _threads(os.getpid())
        threads.waiting.acquire()
        threads.pool.submit(self._put, threads, path, header(path, data) + data, own)
        return True

    def _put(self, threads: _Threads, path: str, data: bytes, distance: float) -> None:
        folder, size = path[:2], 0
        try:
            with threads.lock:
                size = len(data) if self._reserve(folder, len(data), distance) else 0
                self._written[folder] += size
            if size:
                put_bytes(self.path, path, data)
        except (DatasetError, OSError) as error:
            self._error = error
        finally:
            with threads.lock:
                self._written[folder] -= size
            threads.waiting.release()

    def _reserve(self, folder: str, size: int, distance: float) -> bool:
        """Count bytes that are about to be written, after making room for them; return False if there is none."""
        used, left = self._folders.get(folder, (0, 0))
        if left < size or used + size > self._limit:
            used, left = self._make_room(folder, size, distance), max(size, self._limit // _SHARE)
        has_room = used + size <= self._limit
        self._folders[folder] = (used + size, left - size) if has_room else (used, left)
        return has_room

    def _make_room(self, folder: str, size: int, distance: float) -> int:
        """List a folder, and remove objects if it is full; return the bytes that stay."""
        there = {f"{folder}/{name}": int(info.get("size") or 0) for name, info in list_files(self.path, folder).items()}
        total = sum(there.values()) + self._written[folder]
        if total + size <= self._limit:
            return total
        kept = [name for name in there if name.split("/")[1] == self._kept]
        nearness = {name: -far for name, far in zip(kept, self._distances(kept), strict=True)}
        files = [StoredFile(name in nearness, nearness.get(name, 0.0), 0, there[name], name) for name in there]
        removed, self._near[folder] = to_remove(files, total + size - KEEP_NEXT * self._limit, distance)
        fs, base = file_system(self.path)
        with suppress(FileNotFoundError):  # another process has removed them already
            if removed:
                tried(lambda: fs.rm([f"{base}/{file.path}" for file in removed]), self.path, folder)
        return total - sum(file.size for file in removed)
