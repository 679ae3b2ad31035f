"""Cache of shard ranges that are fetched together: in memory, and optionally in a folder that all processes share.

For storage where a request costs milliseconds. A *range* is one request: the samples of a run of neighbours, or a
single sample. All missing ranges of a job are requested at the same time.

Each range in the folder is a file: ``"ENRGLRNG"``, u32 crc32, 4 zeros, then its bytes. The checksum covers the file's
name and the bytes, and is verified whenever a process takes the range from the folder. Therefore nothing has to be
flushed to the disk: files that a power failure cut short, or that were replaced, are fetched again. Folders and files
are readable by their owner only, and files of other users are not read.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import stat
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from energon_lite.errors import EnergonLiteError, UsageError
from energon_lite.extras.remote.fetches import Fetch, Fetches
from energon_lite.extras.remote.remote_files import reads_in_loop
from energon_lite.extras.remote.url_files import explained, read_in_loop
from energon_lite.storage.files.atomic_file import only_one, replacing
from energon_lite.storage.files.byte_ranges import map_file
from energon_lite.storage.files.shard_store import COUNTS, ShardRange, ShardStore, shared_store
from energon_lite.storage.files.urls import is_remote
from energon_lite.storage.read.read_ahead import ReadAhead

__all__ = ["RangeCache", "shared_range_cache"]

_log = logging.getLogger(__name__)

_HEADER = struct.Struct("<8sI4x")
_MAGIC = b"ENRGLRNG"
#: Lock files in a cache folder; the name of a range decides which of them guards it.
_LOCKS = 256
#: The share of a full folder that is kept when the ranges unused for longest are removed.
_KEEP = 0.9
#: Seconds to wait for another process that fetches a range; after that this process fetches it as well.
_PATIENCE = 60.0


class RangeCache:
    """Cache of ranges by their place in a shard, for one thread.

    Args:
        settings: see :class:`ReadAhead`.
        store: the store that ranges are read with.
    """

    def __init__(self, settings: ReadAhead, store: ShardStore | None = None):
        self.settings = settings
        self._store = shared_store() if store is None else store
        #: In order of use: the least recently used range comes first.
        self._kept: dict[ShardRange, memoryview] = {}
        self._bytes = 0
        #: Ranges of the current job; they stay, however small the memory limit is.
        self._held: dict[ShardRange, memoryview] = {}
        self._failed: dict[ShardRange, BaseException] = {}
        #: Requests that have not been answered yet.
        self._coming: dict[ShardRange, Fetch] = {}
        self._coming_bytes = 0
        self._process = os.getpid()
        self._requests = Fetches(
            self._read, settings.requests, loop_of=_loop_of, read_in_loop=self._read_in_loop, is_hedged=settings.hedge
        )
        self._fetches = self._requests
        self._folder = None
        if settings.folder is not None:
            self._folder = _Folder(settings.folder, settings.folder_bytes)
            self._fetches = Fetches(self._from_folder, settings.requests, is_hedged=False)

    def prefetch(self, ranges: Iterable[ShardRange]) -> None:
        """Start to fetch the ranges that will be loaded next, as far as there is room for them. Does not wait."""
        self._after_fork()
        room = self.settings.memory_bytes // 2 - self._coming_bytes
        wanted: dict[ShardRange, None] = {}
        for span in ranges:
            if span not in wanted and span not in self._coming and span not in self._kept and span not in self._held:
                room -= span.size
                if room < 0:
                    break
                wanted[span] = None
        self._start([*wanted])

    def load(self, ranges: Iterable[ShardRange]) -> None:
        """Fetch these ranges and hold them until the next call. A failed range raises in :meth:`get`."""
        self._after_fork()
        data_of = {span: self._held.get(span) or self._kept.get(span) for span in ranges}
        missing = [span for span, data in data_of.items() if data is None]
        COUNTS.memory_hits += len(data_of) - len(missing)
        self._start([span for span in missing if span not in self._coming])
        fetches = [self._coming[span] for span in missing]
        self._fetches.wait(fetches)
        self._failed = {}
        for fetch in fetches:
            data_of[fetch.one] = self._take(fetch)
        self._held = {span: data for span, data in data_of.items() if data is not None}
        for span, data in self._held.items():
            self._keep(span, data)

    def get(self, one: ShardRange) -> memoryview:
        """Return the bytes of a range.

        Raises:
            MissingShardError, ShardChangedError, DatasetError: as :meth:`ShardStore.read`.
        """
        data = self._held.get(one) or self._kept.get(one)
        if data is None and one not in self._failed:
            self._after_fork()
            if one not in self._coming:
                self._start([one])
            fetch = self._coming[one]
            self._fetches.wait([fetch])
            data = self._take(fetch)
            if data is not None:
                self._keep(one, data)
        if data is None:
            path, identity = one.shard
            error = self._failed.pop(one)
            raise explained(error, path, identity.size) if is_remote(path) else error
        return data

    def _after_fork(self) -> None:
        if self._process != os.getpid():  # requests are answered in the process that sent them
            self._process = os.getpid()
            self._coming = {}
            self._coming_bytes = 0

    def _start(self, ranges: Sequence[ShardRange]) -> None:
        if ranges:
            self._coming.update(zip(ranges, self._fetches.start(ranges), strict=True))
            self._coming_bytes += sum([span.size for span in ranges])

    def _take(self, fetch: Fetch) -> memoryview | None:
        """The bytes of a finished fetch; its error is kept for :meth:`get`."""
        if self._coming.pop(fetch.one, None) is not None:
            self._coming_bytes -= fetch.one.size
        if fetch.error is not None:
            self._failed[fetch.one] = fetch.error
        return None if fetch.data is None else memoryview(fetch.data)

    def _keep(self, one: ShardRange, data: memoryview) -> None:
        if self._kept.pop(one, None) is None:
            self._bytes += data.nbytes
        self._kept[one] = data
        while self._bytes > self.settings.memory_bytes and len(self._kept) > 1:
            self._bytes -= self._kept.pop(next(iter(self._kept))).nbytes

    def _from_folder(self, one: ShardRange) -> memoryview:
        assert self._folder is not None
        path, identity = one.shard
        if is_remote(path) and not identity.version:  # the folder may have a range of an earlier object
            return memoryview(self._from_store(one))
        return self._folder.get(one, self._from_store)

    def _from_store(self, one: ShardRange) -> bytes:
        [fetch] = self._requests.start([one])
        self._requests.wait([fetch])
        if fetch.error is not None:
            raise fetch.error
        assert fetch.data is not None
        return bytes(fetch.data)

    def _read(self, one: ShardRange) -> bytes:
        COUNTS.requests += 1
        return self._store.read(*one.shard, one.offset, one.size)

    async def _read_in_loop(self, one: ShardRange) -> bytes:
        COUNTS.requests += 1
        return await read_in_loop(self._store, one)


#: By process and URL scheme: the event loop of the file system, if it has one.
_loops: dict[tuple[int, str], Any] = {}


def _loop_of(one: ShardRange) -> Any:
    path = one.shard[0]
    key = os.getpid(), path[: path.find("://") + 1]
    if key not in _loops:
        _loops[key] = reads_in_loop(path) if is_remote(path) else None
    return _loops[key]


class _Folder:
    """A folder of ranges, one file each. Any number of processes may read, write and clean it up at the same time."""

    def __init__(self, path: str, limit: int):
        self._path = os.path.abspath(os.path.expanduser(path))
        self._limit = limit
        try:
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            with suppress(FileExistsError):
                os.mkdir(self._path, 0o700)
            if not os.path.isdir(self._path):
                raise NotADirectoryError(errno.ENOTDIR, "it is a file")
        except OSError as error:
            raise UsageError(
                f"read_ahead: the folder cannot be used: {error.strerror or error}",
                where=self._path,
                fix="give a folder that this process can write to",
            ) from error
        #: Files whose contents were not as they had been written.
        self.damaged = 0
        #: Bytes written by this process since it last measured the folder.
        self._written = limit
        self._told = False

    def get(self, one: ShardRange, read: Callable[[ShardRange], bytes]) -> memoryview:
        name = hashlib.sha256(repr(tuple(one)).encode("utf-8", "surrogateescape")).hexdigest()[:40]
        path = os.path.join(self._path, name[:2], name)
        data = self._map(path, one)
        if data is not None:
            COUNTS.folder_hits += 1
            return data
        try:
            # One process fetches, the others wait and read its file.
            place = os.path.join(self._path, f"{int(name[:8], 16) % _LOCKS:03d}")
            with only_one(place, mode=0o600, patience=_PATIENCE):
                data = self._map(path, one)
                return self._write(path, read(one)) if data is None else data
        except OSError as error:
            if isinstance(error, EnergonLiteError):
                raise
            if not self._told:
                self._told = True
                _log.warning("the cache folder %s cannot be used (%s); reading on without it", self._path, error)
            return memoryview(read(one))

    def _map(self, path: str, one: ShardRange) -> memoryview | None:
        """Map the file of a range if it exists and is intact; a damaged one is removed."""
        with suppress(OSError), open(path, "rb", buffering=0, opener=_open_own) as file:
            size = os.fstat(file.fileno()).st_size
            view = map_file(file.fileno()) if size == _HEADER.size + one.size else memoryview(b"")
            data = view[_HEADER.size :]
            if bytes(view[: _HEADER.size]) == _header(path, data):
                os.utime(file.fileno())  # the time of last use, by which ranges are removed
                return data
            self.damaged += 1
            if self.damaged == 1:
                _log.warning("a range in the cache folder is damaged, it is fetched again (logged once): %s", path)
            os.unlink(path)
        return None

    def _write(self, path: str, data: bytes) -> memoryview:
        self._written += len(data)
        if self._written > self._limit * (1 - _KEEP):
            self._make_room(len(data))
        _make_own(os.path.dirname(path))
        with replacing(path) as temporary, open(temporary, "xb", opener=_private) as file:
            file.write(_header(path, data))
            file.write(data)
        return memoryview(data)

    def _make_room(self, size: int) -> None:
        """Remove ranges until the folder may grow by a tenth before the next check (each process checks for itself)."""
        self._written = size
        files = []
        for place, _, names in os.walk(self._path):
            for path in [os.path.join(place, name) for name in names if not name.endswith(".lock")]:
                with suppress(OSError):
                    status = os.stat(path)
                    files.append((status.st_mtime_ns, status.st_size, path))
        total = size + sum(bytes_of for _, bytes_of, _ in files)
        for _, bytes_of, path in sorted(files):
            if total <= _KEEP * self._limit:
                break
            with suppress(OSError):  # another process has removed it already
                os.unlink(path)
            total -= bytes_of


def _header(path: str, data: bytes | memoryview) -> bytes:
    return _HEADER.pack(_MAGIC, zlib.crc32(data, zlib.crc32(os.path.basename(path).encode())))


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _open_own(path: str, flags: int) -> int:
    """Open a regular file of this user, following no link, and return its descriptor.

    Raises:
        OSError: there is something else at the path.
    """
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        os.close(fd)
        raise OSError(errno.EPERM, f"{path} is not a file of this user")
    return fd


def _make_own(folder: str) -> None:
    """Create a folder of this user if it does not exist; a link to a folder is refused.

    Raises:
        OSError: there is something else at the path.
    """
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        status = os.lstat(folder)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise OSError(errno.EPERM, f"{folder} is not a folder of this user") from None


_shared: dict[ReadAhead, RangeCache] = {}


def shared_range_cache(settings: ReadAhead) -> RangeCache:
    """Return the cache that all data sets of this process with these settings share."""
    cache = _shared.get(settings)
    return _shared.setdefault(settings, RangeCache(settings)) if cache is None else cache
