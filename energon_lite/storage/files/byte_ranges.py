"""Local files and files behind URLs: opening, mapping, sizes, versions, and ranges of bytes without an open file that a
fork or a pickle would break.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import io
import mmap
import os
import stat
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from energon_lite.documents.paths import is_url
from energon_lite.entry_points import storage_guest
from energon_lite.errors import MissingShardError, ShardChangedError


def open_file(path: str, flags: int) -> int:
    """Open a file like ``os.open``, and return its descriptor; also an ``opener`` for ``open``. Folders open as usual.

    Raises:
        FileNotFoundError: there is only a pipe (which would block until it has a writer), a device or the like.
        OSError: as ``os.open``.

    Example:
        >>> with open("a.idx", "rb", opener=open_file) as file:
        ...     head = file.read(8)
    """
    fd = os.open(path, flags | os.O_NONBLOCK)
    mode = os.fstat(fd).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        os.close(fd)
        raise FileNotFoundError(errno.ENOENT, "this is not a file, but a pipe, a device or the like", path)
    os.set_blocking(fd, True)  # some file systems (such as tape archives) restore contents only for blocking reads
    return fd


def map_file(fd: int) -> memoryview:
    """Map an open file, read-only and shared with all processes that map it; return its bytes.

    The mapping ends when the view (and every array over it) is gone; ``fd`` can be closed at once. ``mmap.mmap`` keeps
    a descriptor of its own as long as the mapping lives, though the system needs none. A blend of a thousand data sets
    would use a thousand descriptors for its indexes alone, which is the usual limit of a process.

    Raises:
        OSError: the file cannot be mapped.

    Example:
        >>> with open("data/.nv-meta/energon_lite.idx", "rb") as file:
        ...     view = map_file(file.fileno())
        >>> bytes(view[:8])
        b'ENRGLIDX'
    """
    size = os.fstat(fd).st_size
    if not size:  # the system maps no empty files
        return memoryview(b"")
    if sys.version_info >= (3, 13):
        return memoryview(mmap.mmap(fd, size, access=mmap.ACCESS_READ, trackfd=False))
    return _map_by_libc(fd, size)


def _map_by_libc(fd: int, size: int) -> memoryview:
    """Map by libc, which Python does since 3.13 with ``trackfd=False``."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_ssize_t]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    memory = (ctypes.c_ubyte * size).from_address(address)
    # Not at exit: other threads may still read it then, and the system frees it anyway.
    weakref.finalize(memory, libc.munmap, address, size).atexit = False
    return memoryview(memory).cast("B").toreadonly()


#: Last two bits of the number of a version that an answer of a store names; both are 0 in all other numbers.
_NAMED = 3


def version_number(*told: object) -> int:
    """Return 48 bits that identify a version of a file. They are few, since workers receive one for each shard."""
    return int.from_bytes(hashlib.blake2b(repr(told).encode(), digest_size=6).digest(), "little")


def uncompared(number: int) -> int:
    """Return a number that no answer of a store is compared with, such as that of a time in an index."""
    return number & ~_NAMED


def file_version(found: os.stat_result | Mapping[str, Any], indexed: int = 0) -> int:
    """Return the current version of a file: a number that differs for earlier and later contents; 0: unknown.

    Args:
        found: the record of its file system or store. The time of status change of a local file counts too: the time of
            change can be set back.
        indexed: its time of change in the index.
    """
    if isinstance(found, os.stat_result):
        return version_number(indexed, found.st_mtime_ns, found.st_ctime_ns)
    return url_files().version(found)


def found_at(path: str) -> os.stat_result | Mapping[str, Any]:
    """Return the current record of a file in its file system or store; from now on its version is expected.

    Raises:
        MissingShardError: there is no such file.
        DatasetError: the store does not answer.
    """
    try:
        return url_files(path).found(path) if is_url(path) else os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        raise missing(path) from None


def size_of(path: str, found: os.stat_result | Mapping[str, Any] | None = None) -> int:
    """Return the bytes of a file; ``found`` is the result of :func:`found_at` if that was called before.

    Raises:
        MissingShardError, DatasetError: as :func:`found_at`; or the store's record has no size.
    """
    found = found_at(path) if found is None else found
    return found.st_size if isinstance(found, os.stat_result) else url_files(path).size(path, found)


def read_bytes(path: str, offset: int, size: int) -> bytes:
    """Read the ``size`` bytes at ``offset``.

    Raises:
        MissingShardError: there is no such file.
        ShardChangedError: the file ends before the last of them.
        DatasetError: the store does not answer.
    """
    if size <= 0:
        return b""
    try:
        if is_url(path):
            return url_files(path).read_range(path, offset, size)
        with open(path, "rb", buffering=0, opener=open_file) as file:
            pieces, left = [], size
            while left and (data := os.pread(file.fileno(), left, offset + size - left)):
                pieces.append(data)
                left -= len(data)
    except FileNotFoundError:
        raise missing(path) from None
    if left:
        raise ShardChangedError(
            f"the file ends {left} bytes before byte {offset + size}", where=path, fix="restore or download it again"
        )
    return b"".join(pieces)


def missing(path: str) -> MissingShardError:
    """Return the error for a file that does not exist."""
    return MissingShardError("the file does not exist", where=path, fix="restore it, or correct the path")


class RangedFile(io.RawIOBase):
    """A seekable file, or a stretch of one. Each read is one request; nothing stays open between two reads.

    Args:
        size: its bytes.
        read_at: ``(offset, size) -> bytes``.
    """

    def __init__(self, size: int, read_at: Callable[[int, int], bytes]):
        super().__init__()
        self.size = size
        self._read_at = read_at
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self.size - self._position)
        data = self._read_at(self._position, left if size is None or size < 0 else min(size, left))
        self._position += len(data)
        return data

    def readall(self) -> bytes:
        return self.read()

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)


# -- files behind URLs ------------------------------------------------------------------------------------------------
#
# Such as ``s3://bucket/a.tar``: the door of the guest that reads them.

#: The store's records of its files, by path.
Listing = Mapping[str, Mapping[str, Any]]


class OpenFile(Protocol):
    """A file that is read by position."""

    def size(self) -> int:
        """Return its bytes."""

    def read(self, size: int, offset: int, /) -> bytes:
        """Read up to ``size`` bytes at ``offset``, fewer only at the end of the file.

        Raises:
            OSError, DatasetError: the storage failed.
        """


class UrlFiles(NamedTuple):
    """Functions of the guest that reads files behind URLs: entry ``url_files`` of the table ``STORAGE_GUESTS``.

    They raise FileNotFoundError if there is no such file, and DatasetError if the store does not answer.

    Attributes:
        found: returns the store's current record of a file, whose version is expected from now on.
        size: returns the bytes of a file; with the record, if that is known.
        version: returns the number of the version that a record names; 0: it names none.
        list_files: returns the record of each file in a folder of a URL, by its path relative to that folder.
        read_file: reads a small file as a whole.
        read_range: reads the ``size`` bytes at ``offset``: ``(url, offset, size) -> bytes``.
        copy_file: copies the file ``name`` below a URL to a local one, and compares its size, if that is known:
            ``(url, name, target, size)``.
        open: returns a file of a known size and version, each of whose reads is a request.
    """

    found: Callable[[str], Mapping[str, Any]]
    size: Callable[[str, Mapping[str, Any] | None], int]
    version: Callable[[Mapping[str, Any]], int]
    list_files: Callable[[str, str], Listing]
    read_file: Callable[[str], bytes]
    read_range: Callable[[str, int, int], bytes]
    copy_file: Callable[[str, str, str, int | None], None]
    open: Callable[[str, int, int], OpenFile]


def url_files(url: str = "") -> UrlFiles:
    """Return the guest that reads files behind URLs.

    Raises:
        UsageError: it is not installed.
    """
    return remote_guest("url_files", "files behind URLs are read", url)


def remote_guest(name: str, what: str, where: str, fix: str = "copy the files to a local disk") -> Any:
    """Return an entry of ``STORAGE_GUESTS`` that the extra ``remote`` has.

    Args:
        name: the entry.
        what: the task, for messages.
        where: the data set or file.
        fix: the way without the extra.

    Raises:
        UsageError: the extra is not installed.
    """
    return storage_guest(name, what, "remote", where, fix)
