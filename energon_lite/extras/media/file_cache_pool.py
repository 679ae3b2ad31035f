"""A cache of values on a local disk, which background threads fill before the values are needed."""

from __future__ import annotations

import logging
import os
import pickle
import tempfile
import threading
import weakref
from concurrent.futures import Future
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, Literal, TypeVar

from energon_lite.errors import UsageError, check_choice
from energon_lite.extras.media.cache_folder import CacheFolder
from energon_lite.extras.media.daemon_threads import DaemonThreads
from energon_lite.extras.media.kept_lazy import CacheEntry, CacheFileLazy, FileCacheLazy
from energon_lite.samples import SourceInfo
from energon_lite.storage.files.atomic_file import remove_if_there, write_bytes
from energon_lite.storage.stores import CachePool, FileStore, Lazy

_log = logging.getLogger(__name__)

T = TypeVar("T")

#: Seconds between two checks if other processes have released space.
_LOOK = 0.1
#: Fewest checks between two clean-ups of the folder.
_LOOKS = 20
#: Seconds that threads have to finish their calls when a pool is closed.
_LEAVE = 1.0


class FileStoreCachePool(CachePool):
    """Cache that fetches values to a folder on a local disk, in the background, and keeps each as long as a lazy value
    refers to it.

    The limits hold for all processes of a user on this machine that use the same folder: workers, and ranks. A value
    without space waits for it; if it is needed before, it is read from its store. Files that a killed process left are
    removed by the next process that starts, or that needs space.

    Workers get pools of their own, with the same settings. Loaders clean up when they are closed; no file is left on
    the disk when a process ends.

    Args:
        parent_cache_dir: the folder; None: a folder of this user in the system's folder for temporary files.
        num_workers: threads of each process that fetch values.
        max_cache_size_gbytes: size of all files in units of 2^30 bytes, at most.
        max_cache_count: number of files, at most.
        method: "raw": keep bytes, and decode them when they are needed. "pickle": keep decoded values.

    Raises:
        UsageError: a limit is not above 0, or the method is unknown.

    Example:
        >>> pool = FileStoreCachePool(parent_cache_dir="/local/cache", max_cache_size_gbytes=200)
        >>> loader = get_savable_loader(dataset, cache_pool=pool)
    """

    def __init__(
        self,
        *,
        parent_cache_dir: str | os.PathLike[str] | None = None,
        num_workers: int = 8,
        max_cache_size_gbytes: float = 1024,
        max_cache_count: int = 10_000_000,
        method: Literal["raw", "pickle"] = "raw",
    ):
        limits = {
            "num_workers": num_workers,
            "max_cache_size_gbytes": max_cache_size_gbytes,
            "max_cache_count": max_cache_count,
        }
        for name, value in limits.items():
            if not value > 0:
                raise UsageError(f"{name} is {value}", fix="give a number above 0")
        check_choice("method", method, ["raw", "pickle"])
        self._arguments: dict[str, Any] = {"parent_cache_dir": parent_cache_dir, **limits, "method": method}
        self.num_workers = num_workers
        self.max_cache_count = max_cache_count
        self.method = method
        self.max_cache_size = int(max_cache_size_gbytes * (1 << 30))
        ours = os.path.join(tempfile.gettempdir(), f"energon_lite_cache_{os.geteuid()}")
        self.parent_cache_dir = Path(ours if parent_cache_dir is None else parent_cache_dir).expanduser()
        self._is_closed = self._told = False
        self._begin()
        self._arm()
        self._folder.sweep()
        _pools.add(self)

    def _begin(self) -> None:
        """Set up the pool's state for this process."""
        self._process = os.getpid()
        self._condition = threading.Condition(threading.Lock())
        self._entries: dict[tuple[int, str], CacheEntry] = {}
        self._let_go: list[CacheEntry | tuple[str, int]] = []  # entries and files of lazy values that are gone
        self._put_aside: set[str] = set()
        self._writing = 0  # values that are being written by to_cache()
        self.current_cache_size = self.current_cache_count = 0
        self._worker_pool = DaemonThreads(self.num_workers, "energon-lite-cache")
        self._end: Finalize | None = None
        is_ours = self._arguments["parent_cache_dir"] is None
        self._folder = CacheFolder(os.fspath(self.parent_cache_dir), is_ours=is_ours)

    def _arm(self) -> None:
        """Register the removal of the folder for the end of the pool or of this process, before each use of a pool
        that is open. It runs after the end of the process's workers, because the folders of killed workers have to be
        removed by this process."""
        if self._is_closed:
            raise UsageError("the cache pool was closed", fix="make another one")
        if not self._folder.is_open and not (self._end is not None and self._end.still_active()):
            self._end = Finalize(self, self._folder.end, exitpriority=5)

    def _forked(self) -> None:
        self._folder.forget()
        self._begin()

    def __reduce__(self) -> Any:
        return partial(FileStoreCachePool, **self._arguments), (), {"max_cache_size": self.max_cache_size}

    @property
    def cache_dir(self) -> Path:
        """The folder of this process; it is made if it does not exist."""
        self._arm()
        return Path(self._folder.path)

    # -- lazy values ----------------------------------------------------------------------------------------------

    def get_lazy(self, ds: FileStore[Any], fname: str) -> Lazy[Any]:
        """Return a lazy value that is fetched in the background. Lazy values of one file share the fetched bytes.

        Raises:
            UsageError: the pool was closed.
        """
        store, key = ds.resolve(fname) if isinstance(ds, FileStore) else (ds, fname)
        self._arm()
        with self._condition:
            self._drop()
            entry = self._entries.get((id(store), key))
            if entry is None:
                entry = self._entries[id(store), key] = CacheEntry(store, key, self._process)
                self._fetch_later(entry)
            else:
                entry.refcount += 1
        return FileCacheLazy(pool=self, entry=entry)

    def to_cache(self, data: T, name: str) -> Lazy[T]:
        """Write a value to the disk, or, if there is no space, keep it in memory; return it as a lazy value.

        Raises:
            UsageError: the pool was closed.
        """
        self._arm()
        raw = pickle.dumps(data, protocol=pickle.HIGHEST_PROTOCOL)
        with self._condition:
            self._drop()
            self._writing += 1
            folder = self._reserve(len(raw))
        path = None if folder is None else self._write(folder, raw)
        with self._condition:
            self._writing -= 1
            if path is None:
                return CacheFileLazy(pool=self, fname=name, data=data)
            self._put_aside.add(path)
        return CacheFileLazy(pool=self, fname=name, cache_path=Path(path), size=len(raw))

    def value_of(self, entry: CacheEntry) -> tuple[Any, SourceInfo]:
        """Return the value of an entry to a lazy value that refers to it, and end that reference."""
        if entry.process != os.getpid():  # an entry of the process that this one was forked from
            return entry.ds[entry.fname]
        with self._condition:
            future = entry.send_to_cache_future
            is_cancelled = future.cancel()
            entry.waiting += 1
            self._condition.notify_all()
        is_kept = failed = True
        try:
            is_kept = not is_cancelled and future.result()
            value = self._read(entry) if is_kept else entry.ds[entry.fname]
            failed = False
            return value
        finally:
            with self._condition:
                entry.waiting -= 1
                self._refer_less(entry)
                if entry.refcount > 0 and not is_kept and not failed and entry.send_to_cache_future is future:
                    self._fetch_later(entry)  # for the other lazy values of the entry

    def drop_later(self, what: CacheEntry | tuple[str, int]) -> None:
        """Release the entry that a destroyed lazy value referred to, or its file, given with the size. Takes no lock,
        because the garbage collector may call it at any time."""
        self._let_go.append(what)
        self._worker_pool.call_soon(self._drop_now)

    # -- in the background ----------------------------------------------------------------------------------------

    def _fetch_later(self, entry: CacheEntry) -> None:
        if self._is_closed:
            entry.send_to_cache_future = Future()
            entry.send_to_cache_future.cancel()
            return
        entry.send_to_cache_future = self._worker_pool.submit(self._fetch, entry)

    def _fetch(self, entry: CacheEntry) -> bool:
        """Write the value of an entry to the disk; return False if it is not there."""
        if self._is_closed:
            return False
        data, entry.read_from = entry.ds.raw(entry.fname) if self.method == "raw" else entry.ds[entry.fname]
        entry.is_pickled = self.method == "pickle" or not isinstance(data, (bytes, bytearray, memoryview))
        raw = pickle.dumps(data, protocol=pickle.HIGHEST_PROTOCOL) if entry.is_pickled else bytes(data)
        entry.kept_size = len(raw)
        folder = self._wait_for_room(entry)
        path = None if folder is None else self._write(folder, raw)
        if path is None:
            return False
        with self._condition:
            self.current_cache_size += len(raw)
            self.current_cache_count += 1
            entry.cache_path = Path(path)
            if entry.refcount <= 0 or self._is_closed:
                self._remove(entry)
                return False
        return True

    def _wait_for_room(self, entry: CacheEntry) -> str | None:
        """Wait for space and reserve it; return the folder to write to. None: no lazy value refers to the entry any
        more, a caller waits for the value, or there will never be enough space."""
        looks = 0
        while not self._is_closed and entry.kept_size <= self.max_cache_size:
            with self._condition:
                self._drop()
                if entry.refcount <= 0:
                    return None
                folder = self._reserve(entry.kept_size)
                if folder is not None or entry.require_data_now:
                    return folder
                self._condition.wait(_LOOK)
            looks += 1
            if looks % _LOOKS == 0:
                self._folder.sweep()
        return None

    def _reserve(self, size: int) -> str | None:
        return self._folder.reserve(size, self.max_cache_size, self.max_cache_count)

    def _write(self, folder: str, raw: bytes) -> str | None:
        """Write these bytes to a new file in reserved space, and return its path; None: it cannot be written."""
        path = os.path.join(folder, os.urandom(12).hex())
        try:
            write_bytes(path, raw, flush=False)
            return path
        except OSError as error:
            self._folder.give_back(len(raw), folder)
            if not self._told:
                self._told = True
                _log.warning(
                    "the cache in %s cannot be written, values are read again: %s", self.parent_cache_dir, error
                )
            return None

    def _read(self, entry: CacheEntry) -> tuple[Any, SourceInfo]:
        path, source = entry.cache_path, entry.read_from
        try:
            raw = None if path is None else path.read_bytes()
        except OSError:
            raw = None  # the pool was closed, or the file was removed by hand
        if raw is None or source is None or len(raw) != entry.kept_size:
            return entry.ds[entry.fname]
        data = pickle.loads(raw) if entry.is_pickled else raw  # written by this user, in a private folder
        return (entry.ds.decoded(entry.fname, data) if self.method == "raw" else data), source

    # -- references; the caller of the other methods holds the lock ---------------------------------------------

    def _drop(self) -> None:
        while self._let_go:
            what = self._let_go.pop()
            if isinstance(what, CacheEntry):
                self._refer_less(what)
            elif what[0] in self._put_aside:
                self._put_aside.discard(what[0])
                self._remove_file(*what)

    def _drop_now(self) -> None:
        with self._condition:
            self._drop()

    def _refer_less(self, entry: CacheEntry) -> None:
        entry.refcount -= 1
        if entry.refcount <= 0:
            if self._entries.get((id(entry.ds), entry.fname)) is entry:
                del self._entries[id(entry.ds), entry.fname]
            entry.send_to_cache_future.cancel()
            self._remove(entry)

    def _remove(self, entry: CacheEntry) -> None:
        """Remove the file of an entry, if it has one."""
        path, entry.cache_path = entry.cache_path, None
        if path is not None:
            self.current_cache_size -= entry.kept_size
            self.current_cache_count -= 1
            self._remove_file(os.fspath(path), entry.kept_size)

    def _remove_file(self, path: str, size: int) -> None:
        remove_if_there(path)
        self._folder.give_back(size, os.path.dirname(path))
        self._condition.notify_all()

    # -- the end --------------------------------------------------------------------------------------------------

    def release(self) -> None:
        with self._condition:
            self._drop()
            is_idle = not (self._entries or self._put_aside or self._writing)
        if is_idle:
            self._folder.close()
        else:
            self._folder.sweep()

    def close(self) -> None:
        with self._condition:
            self._is_closed = True
            for entry in self._entries.values():
                entry.send_to_cache_future.cancel()
            self._condition.notify_all()
        self._worker_pool.shutdown(_LEAVE)
        with self._condition:
            self._drop()
            self._put_aside.clear()
        if self._end is not None:
            self._end.cancel()
        self._folder.close()

    def __str__(self) -> str:
        return (
            f"FileStoreCachePool({self.parent_cache_dir}, {self.method}: {self.current_cache_count} files, "
            f"{self.current_cache_size} of at most {self.max_cache_size} bytes)"
        )


_pools: weakref.WeakSet[FileStoreCachePool] = weakref.WeakSet()


def _forked() -> None:
    for pool in list(_pools):
        pool._forked()


os.register_at_fork(after_in_child=_forked)
