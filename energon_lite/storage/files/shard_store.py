"""Positioned reads from many shards with a bounded number of open files.

``os.pread`` does not change the file's position, so several threads, or a forked child and its parent, may use one
descriptor at the same time. There is no lock that a fork could leave locked: the cache is a dict, used only by atomic
operations (a file that another thread has taken out for a moment is opened a second time, which is harmless), and a
descriptor is closed when neither the cache nor a running read refers to it.
"""

from __future__ import annotations

import os
import resource
import time
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

from energon_lite.documents.paths import is_url
from energon_lite.errors import DatasetError, FatalStorageError, MissingShardError, ShardChangedError
from energon_lite.storage.files.byte_ranges import OpenFile, open_file, url_files
from energon_lite.storage.files.retries import GaveUp, Tries, out_of


class Reads(NamedTuple):
    """Counts of reads.

    Attributes:
        bytes_read: bytes of samples, from local files, from slow storage, or from a source of the user's.
        requests: requests to slow storage.
        memory_hits: ranges that :class:`~energon_lite.ReadAhead` had in memory.
        folder_hits: ranges that it had in its folder.
        stored_samples: samples that the ``sample_store`` of the loader had.
    """

    bytes_read: int = 0
    requests: int = 0
    memory_hits: int = 0
    folder_hits: int = 0
    stored_samples: int = 0

    def __add__(self, other: Reads) -> Reads:  # type: ignore[override]
        return Reads(*map(sum, zip(self, other, strict=True)))


class ReadCounts:
    """Running counts of a process. There is one for all threads, since threads read for each other; each count is
    taken by one caller only.

    Attributes:
        bytes_read, requests, memory_hits, folder_hits, stored_samples: see :class:`Reads`; counted since the last
            :meth:`take`.
    """

    __slots__ = Reads._fields

    def __init__(self) -> None:
        self.bytes_read = self.requests = self.memory_hits = self.folder_hits = self.stored_samples = 0

    def take(self) -> Reads:
        """Return the counts since the last call, and subtract them."""
        counts = Reads(*(getattr(self, name) for name in self.__slots__))
        for name, count in counts._asdict().items():
            # Subtracted, not set to 0: other threads may count at the same time.
            setattr(self, name, getattr(self, name) - count)
        return counts


#: The counts of this process.
COUNTS = ReadCounts()


#: Bytes of a shard's first block, the header of a tar.
_HEAD = 512

_PREPARE_AGAIN = "restore the shard, or index the data set again with `energon-lite prepare --force-overwrite`"
#: Bytes of one read at most: Linux reads no more in one call.
_LARGEST_READ = 1 << 30


class ShardIdentity(NamedTuple):
    """The identity of a file: key of its open descriptors and of its cached ranges.

    Attributes:
        size: bytes of the file.
        head: checksum of its first block.
        version: a number that differs for earlier and later contents
            (:func:`~energon_lite.storage.files.byte_ranges.file_version`); 0: unknown. A corrected shard may have the
            same size and first block as before: ``tarfile`` pads, and writes no times.
    """

    size: int
    head: int
    version: int = 0


def head_checksum(block: bytes) -> int:
    """Return the checksum of a shard's first block. The block holds name, size and time of the first member, so the
    checksum distinguishes shards of equal size."""
    return zlib.crc32(block[:_HEAD])


def file_state(path: str) -> list[int]:
    """Return size, time of change in ns and checksum of the first block of a file; empty if it cannot be read."""
    try:
        with open(path, "rb", buffering=0, opener=open_file) as file:
            now = os.fstat(file.fileno())
            return [now.st_size, now.st_mtime_ns, head_checksum(file.read(_HEAD))]
    except OSError:
        return []


#: Path and identity of a shard.
Shard = tuple[str, ShardIdentity]
#: A stretch of a shard: shard, offset and size in bytes.
Range = tuple[Shard, int, int]


class ShardRange(NamedTuple):
    """A :data:`Range` with named fields."""

    shard: Shard
    offset: int
    size: int


class LocalFile:
    """An open local file, whose descriptor is closed with the last reference to it."""

    __slots__ = ("fd",)

    def __init__(self, path: str):
        self.fd = -1
        self.fd = open_file(path, os.O_RDONLY)

    def size(self) -> int:
        return os.fstat(self.fd).st_size

    def read(self, size: int, offset: int) -> bytes:
        return os.pread(self.fd, size, offset)

    def read_into(self, memory: memoryview, offset: int) -> int:
        """Fill ``memory`` with the bytes from ``offset`` on; return the number of bytes that were read."""
        return os.preadv(self.fd, [memory], offset)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # at interpreter exit `os` is gone
        if self.fd >= 0:
            close(self.fd)


class ShardStore:
    """Reader of bytes of shards by position, with a bounded number of open files.

    Args:
        capacity: open files that are kept; beyond it the least recently used one is closed.

    Example:
        >>> store = ShardStore()
        >>> store.read("data/s0.tar", ShardIdentity(10240, 1234), offset=512, size=3)
        b'one'
    """

    def __init__(self, capacity: int = 64):
        self.capacity = max(1, capacity)
        #: In order of use: the least recently used file comes first.
        self._files: dict[Shard, OpenFile] = {}
        self._gave_up: GaveUp = {}

    def __len__(self) -> int:
        return len(self._files)

    def read(self, path: str, identity: ShardIdentity, offset: int, size: int) -> bytes:
        """Read ``size`` bytes at ``offset`` of the shard ``path``.

        A read that fails in a way that may pass (such as a stale handle of a network file system) is tried again:
        replacing the sample because of it would change the run.

        Raises:
            MissingShardError: the shard does not exist any more.
            ShardChangedError: the shard has changed since it was indexed.
            FatalStorageError: file descriptors or memory were short for seconds.
            DatasetError: the storage failed several times.
        """
        tries: Tries | None = None
        while True:
            try:
                return self._read(path, identity, offset, size)
            except DatasetError as error:
                tries, cause = tries or Tries(self._gave_up), error.__cause__
                wait = None if cause is None or isinstance(error, FatalStorageError) else tries.wait_after(cause)
                if wait is None:
                    if tries.kind == "short" and isinstance(cause, OSError):
                        raise out_of(cause, path) from cause
                    raise
            if tries.kind == "short":
                self.close()  # release the descriptors that this process can spare
            else:
                self.forget(path, identity)
            time.sleep(wait)

    def fetch(self, ranges: Iterable[Range]) -> list[bytes]:
        """:meth:`read` for each of these ranges, in order, with less overhead for many small samples."""
        files = self._files
        pieces = list[bytes]()
        again = 0
        for shard, offset, size in ranges:
            file = files.pop(shard, None)
            if file is None:
                data = b""
            else:
                files[shard] = file
                try:
                    data = file.read(size, offset)
                except OSError:  # read() raises the error
                    data = b""
            if len(data) != size:
                again += size
                data = self.read(*shard, offset, size)
            pieces.append(data)
        COUNTS.bytes_read += sum(map(len, pieces)) - again  # read() has counted those bytes already
        return pieces

    def _read(self, path: str, identity: ShardIdentity, offset: int, size: int) -> bytes:
        file = self.open(path, identity)
        chunks, have = list[bytes](), 0
        try:
            while have < size:  # a very large read takes several calls
                data = file.read(min(size - have, _LARGEST_READ), offset + have)
                if not data:
                    raise changed_shard(path, identity.size, file.size())
                chunks.append(data)
                have += len(data)
        except OSError as error:
            raise storage_error(path, error) from error
        COUNTS.bytes_read += have
        return b"".join(chunks)

    def open(self, path: str, identity: ShardIdentity) -> OpenFile:
        """Return the open shard ``path``; it stays open as long as it is in use.

        Raises:
            MissingShardError, ShardChangedError, DatasetError: as :meth:`read`.
        """
        # The key has the identity too: a replaced file of the same name may still be open.
        shard = path, identity
        file = self._files.pop(shard, None)
        if file is None:
            file = self._open(shard)
        else:
            self._files[shard] = file
        return file

    def __contains__(self, shard: Shard) -> bool:
        return shard in self._files

    def keep(self, shard: Shard, file: OpenFile, block: bytes) -> None:
        """Keep an open file, if its first block is the indexed one.

        Raises:
            ShardChangedError: it is another one.
        """
        path, identity = shard
        if head_checksum(block) != identity.head:
            raise ShardChangedError(
                "the shard is not the one that was indexed (same size, other contents)", where=path, fix=_PREPARE_AGAIN
            )
        self._files[shard] = file
        drop_oldest(self._files, self.capacity)

    def forget(self, path: str, identity: ShardIdentity) -> None:
        """Close this file, so that the next read opens it again."""
        self._files.pop((path, identity), None)

    def close(self) -> None:
        """Close all files that no read uses. The store can be used again afterwards."""
        self._files.clear()

    def _open(self, shard: Shard) -> OpenFile:
        path, (expected, _, version) = shard
        try:
            file = url_files(path).open(path, expected, version) if is_url(path) else LocalFile(path)
            size = file.size()
            block = file.read(_HEAD, 0)
        except OSError as error:
            raise storage_error(path, error) from error
        if size != expected:
            raise changed_shard(path, expected, size)
        self.keep(shard, file, block)
        return file


def drop_oldest(kept: dict[Any, Any], most: int) -> None:
    """Remove the oldest entries of a dict, which threads may share, until there are at most ``most``."""
    while len(kept) > most:
        with suppress(RuntimeError, StopIteration):  # another thread removed the entry first
            kept.pop(next(iter(kept)), None)


def changed_shard(path: str, expected: int, found: int) -> ShardChangedError:
    """Return the error for a shard whose size differs from the indexed one."""
    return ShardChangedError(
        f"the shard has changed since it was indexed: {found} bytes instead of {expected}",
        where=path,
        fix=_PREPARE_AGAIN,
    )


def storage_error(path: str, error: OSError) -> DatasetError:
    """Return the error for a shard that cannot be read."""
    if isinstance(error, FileNotFoundError):
        return MissingShardError("the shard does not exist any more", where=path, fix=_PREPARE_AGAIN)
    return DatasetError(f"the shard cannot be read: {error.strerror or error}", where=path, fix="check the storage")


@cache
def shared_store() -> ShardStore:
    """Return the store that all data sets of this process share, so that a large blend stays within the limit of files.

    It keeps a quarter of the files that the system allows this process, at least 16 and at most 4096.
    """
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return ShardStore(4096 if allowed < 0 else min(4096, max(16, allowed // 4)))
