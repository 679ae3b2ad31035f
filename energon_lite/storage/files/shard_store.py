"""Positioned reads from many shards with a bounded number of open files.

``os.pread`` leaves no trace in the file's position, so one descriptor may be used by several threads, and by a forked
child together with its parent, at the same time. There is no lock that a fork could leave held: the cache is a dict,
of which only steps that cannot be interrupted are used (a file that another thread has taken out for a moment is opened
a second time, no more), and a descriptor is closed when neither the cache nor a running read refers to it any more.
"""

from __future__ import annotations

import errno
import hashlib
import math
import os
import random
import resource
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from energon_lite.errors import DatasetError, FatalStorageError, MissingShardError, ShardChangedError
from energon_lite.storage.files.open_file import open_file
from energon_lite.storage.files.read_counts import COUNTS
from energon_lite.storage.files.remote_files import file_size, is_remote, read_range, read_range_in_loop, version_of
from energon_lite.storage.files.shortage import SHORTAGES, out_of

__all__ = [
    "LocalFile",
    "Range",
    "Shard",
    "ShardIdentity",
    "ShardRange",
    "ShardStore",
    "changed_shard",
    "explained",
    "file_version",
    "head_checksum",
    "shared_store",
    "version_number",
]

#: Bytes of a shard's first block, a header of tar.
_HEAD = 512

_PREPARE_AGAIN = "restore the shard, or index the data set anew with `energon-lite prepare --force-overwrite`"
#: Linux reads at most this much in one call; larger reads take several.
_LARGEST_READ = 1 << 30
#: Seconds to wait before a failed read is tried again, more or less.
_RETRIES = (0.0, 0.1, 0.5, 2.0)
#: For so many seconds after the last try failed, no other read is waited for.
_GIVEN_UP = 30.0
#: Errors of storage that may pass.
_PASSING = ("EAGAIN", "EINTR", "EIO", "EREMOTEIO", "ESTALE", "ETIMEDOUT", "ECONNRESET", "EHOSTDOWN", "EHOSTUNREACH")
_PASSING_NUMBERS = frozenset(getattr(errno, name) for name in _PASSING if hasattr(errno, name))
#: Not the global generator: that one is the user's.
_jitter = random.SystemRandom()


class ShardIdentity(NamedTuple):
    """By what a file is recognised, in all that keeps something of it: open files, ranges in memory and in folders,
    stores.

    Attributes:
        size: in bytes.
        head: checksum of its first block.
        version: a number that its earlier and later contents do not have (:func:`file_version`); 0: unknown. Shards
            that were corrected have the size and the first block that they had: ``tarfile`` pads, and writes no times.
    """

    size: int
    head: int
    version: int = 0


def version_number(*told: object) -> int:
    """48 bits of what tells versions of a file apart: sources, which are sent to workers, have one for each shard."""
    return int.from_bytes(hashlib.blake2b(repr(told).encode(), digest_size=6).digest(), "little")


def file_version(found: os.stat_result | Mapping[str, Any], indexed: int = 0) -> int:
    """The version of a file, as its file system or its store has it now.

    Args:
        found: what that says. A local file's change of status counts, too: a time of change can be set back.
        indexed: its time of change in the index, for stores that say nothing.
    """
    told = version_of(found) if isinstance(found, Mapping) else (found.st_mtime_ns, found.st_ctime_ns)
    return version_number(indexed, *told)


def head_checksum(block: bytes) -> int:
    """Checksum of a shard's first block: it holds name, size and time of the first member, so it tells apart shards
    that happen to have the same size."""
    return zlib.crc32(block[:_HEAD])


#: Path and identity.
Shard = tuple[str, ShardIdentity]
#: Shard, offset and size.
Range = tuple[Shard, int, int]


class ShardRange(NamedTuple):
    """A :data:`Range`, with names."""

    shard: Shard
    offset: int
    size: int


class LocalFile:
    """A descriptor that is closed with its last reference."""

    __slots__ = ("fd",)

    def __init__(self, path: str):
        self.fd = -1
        self.fd = open_file(path, os.O_RDONLY)

    def size(self) -> int:
        return os.fstat(self.fd).st_size

    def read(self, size: int, offset: int) -> bytes:
        return os.pread(self.fd, size, offset)

    def read_into(self, memory: memoryview, offset: int) -> int:
        """Fill ``memory`` from ``offset`` on; returns how many bytes there were."""
        return os.preadv(self.fd, [memory], offset)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # at the end of Python, there is no `os`
        if self.fd >= 0:
            close(self.fd)


class RemoteFile:
    """A file behind a URL that is said to have so many bytes. Nothing is kept open; each read is a request."""

    __slots__ = ("length", "url")

    def __init__(self, url: str, length: int):
        self.url, self.length = url, length

    def size(self) -> int:
        return self.length

    def read(self, size: int, offset: int) -> bytes:
        wanted = min(size, self.length - offset)
        return read_range(self.url, offset, wanted) if wanted > 0 else b""


#: What is open.
OpenShard = LocalFile | RemoteFile


class ShardStore:
    """Read bytes of shards by position.

    Args:
        capacity: open files kept; the one unused for longest is closed when a further one is needed.

    Example:
        >>> store = ShardStore()
        >>> store.read("data/s0.tar", ShardIdentity(10240, 1234), offset=512, size=3)
        b'one'
    """

    def __init__(self, capacity: int = 64):
        self.capacity = max(1, capacity)
        #: The file unused for longest stands first.
        self._files: dict[Shard, OpenShard] = {}
        self._gave_up = -math.inf

    def __len__(self) -> int:
        return len(self._files)

    def read(self, path: str, identity: ShardIdentity, offset: int, size: int) -> bytes:
        """``size`` bytes at ``offset`` of the shard ``path``.

        A read that fails in a way that may pass (the handle of a network file system went stale, say) is tried again:
        a sample that is replaced because of it would make the run another one.

        Raises:
            MissingShardError: the shard does not exist any more.
            ShardChangedError: it is not the shard that was indexed.
            FatalStorageError: file descriptors or memory were short, for seconds.
            DatasetError: the storage failed, several times.
        """
        try:
            return self._read(path, identity, offset, size)
        except DatasetError as error:
            return self._read_again(error, path, identity, offset, size)

    def fetch(self, ranges: Iterable[Range]) -> list[bytes]:
        """:meth:`read` for each of these ranges, in order. Of small samples, many calls would take longer."""
        files, found, again = self._files, list[bytes](), 0
        for shard, offset, size in ranges:
            file = files.pop(shard, None)
            if file is None:
                data = b""
            else:
                files[shard] = file
                try:
                    data = file.read(size, offset)
                except OSError:  # read says what is wrong
                    data = b""
            if len(data) != size:
                again += size
                data = self.read(*shard, offset, size)
            found.append(data)
        COUNTS.bytes_read += sum(map(len, found)) - again  # read has counted these
        return found

    def _read_again(self, error: DatasetError, path: str, identity: ShardIdentity, offset: int, size: int) -> bytes:
        # Where the storage has failed for good, nobody waits for it sample by sample.
        given_up = time.monotonic() - self._gave_up <= _GIVEN_UP and _number(error) not in SHORTAGES
        for wait in _RETRIES[:1] if given_up else _RETRIES:
            if _number(error) in SHORTAGES:
                self.close()  # what this process can give back
            elif _number(error) in _PASSING_NUMBERS and not isinstance(error, FatalStorageError):
                self.forget(path, identity)
            else:
                raise explained(error, (path, identity))
            time.sleep(wait * _jitter.uniform(0.5, 1.5))
            try:
                return self._read(path, identity, offset, size)
            except DatasetError as again:
                error = again
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in SHORTAGES:
            raise out_of(error.__cause__, path) from error.__cause__
        self._gave_up = time.monotonic()
        raise error

    def _read(self, path: str, identity: ShardIdentity, offset: int, size: int) -> bytes:
        file = self.open(path, identity)
        chunks, have = list[bytes](), 0
        try:
            while have < size:  # a very large read takes several
                data = file.read(min(size - have, _LARGEST_READ), offset + have)
                if not data:
                    raise changed_shard(path, identity.size, file.size())
                chunks.append(data)
                have += len(data)
        except OSError as error:
            raise _storage_error(path, error) from error
        COUNTS.bytes_read += have
        return b"".join(chunks)

    def open(self, path: str, identity: ShardIdentity) -> OpenShard:
        """The shard ``path``, open; it stays so as long as it is in use.

        Raises:
            MissingShardError, ShardChangedError, DatasetError: as :meth:`read`.
        """
        # By identity, too: a file that was replaced meanwhile may be open still under the same name.
        key = (path, identity)
        file = self._files.pop(key, None)
        if file is None:
            file = self._open(path, identity)
        self._keep(key, file)
        return file

    def _keep(self, key: Shard, file: OpenShard) -> None:
        self._files[key] = file
        while len(self._files) > self.capacity:
            with suppress(RuntimeError, StopIteration):  # another thread was faster
                self._files.pop(next(iter(self._files)), None)

    def forget(self, path: str, identity: ShardIdentity) -> None:
        """Open this file anew when it is read next."""
        self._files.pop((path, identity), None)

    def close(self) -> None:
        """Forget all open files. The store can be used again afterwards."""
        self._files.clear()

    def _open(self, path: str, identity: ShardIdentity) -> OpenShard:
        try:
            file = RemoteFile(path, identity.size) if is_remote(path) else LocalFile(path)
            size = file.size()
            head = head_checksum(file.read(_HEAD, 0))
        except OSError as error:
            raise _storage_error(path, error) from error
        if size != identity.size:
            raise changed_shard(path, identity.size, size)
        return _checked(file, path, identity, head)

    async def read_in_loop(self, path: str, identity: ShardIdentity, offset: int, size: int) -> bytes:
        """:meth:`read` of a remote shard, to be awaited in the loop of its file system."""
        try:
            key = (path, identity)
            if key not in self._files:
                head = head_checksum(await read_range_in_loop(path, 0, min(_HEAD, identity.size)))
                self._keep(key, _checked(RemoteFile(path, identity.size), path, identity, head))
            if offset + size > identity.size:
                raise changed_shard(path, offset + size, identity.size)
            data = await read_range_in_loop(path, offset, size)
            COUNTS.bytes_read += size
            return data
        except OSError as error:
            raise _storage_error(path, error) from error


def _checked(file: OpenShard, path: str, identity: ShardIdentity, head: int) -> OpenShard:
    if head != identity.head:
        raise ShardChangedError(
            "the shard is not the one that was indexed (same size, other contents)", where=path, fix=_PREPARE_AGAIN
        )
    return file


def explained(error: BaseException, shard: Shard) -> BaseException:
    """The error for a range that a store has not given, which is another one where the object has another size now."""
    path, identity = shard
    if is_remote(path) and isinstance(error, DatasetError) and not isinstance(error, FatalStorageError):
        with suppress(OSError, DatasetError):
            if (size := file_size(path)) != identity.size:
                return changed_shard(path, identity.size, size)
    return error


def _number(error: DatasetError) -> int | None:
    return error.__cause__.errno if isinstance(error.__cause__, OSError) else None


def changed_shard(path: str, expected: int, found: int) -> ShardChangedError:
    """The error for a shard of another size than the indexed one."""
    return ShardChangedError(
        f"the shard has changed since it was indexed: {found} bytes instead of {expected}",
        where=path,
        fix=_PREPARE_AGAIN,
    )


def _storage_error(path: str, error: OSError) -> DatasetError:
    if isinstance(error, FileNotFoundError):
        return MissingShardError("the shard does not exist any more", where=path, fix=_PREPARE_AGAIN)
    return DatasetError(f"the shard cannot be read: {error.strerror or error}", where=path, fix="check the storage")


_shared: ShardStore | None = None


def shared_store() -> ShardStore:
    """The store that all data sets of this process use, so that a blend of many stays below the limit of open files.

    It keeps a quarter of what the system allows this process, at least 16 and at most 4096.
    """
    global _shared
    if _shared is None:
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        _shared = ShardStore(4096 if allowed < 0 else min(4096, max(16, allowed // 4)))
    return _shared
