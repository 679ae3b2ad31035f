"""Folder of checksummed files that any number of processes read, write and clean up at the same time.

Each file has ``"ENRGLRNG"``, u32 crc32, 4 zeros, then its bytes. The checksum covers the file's name and the bytes, and
is verified whenever a process takes the file. Therefore nothing has to be flushed to the disk: files that a power
failure cut short, or that were replaced, count as missing. Folders and files are readable by their owner only, and
files of other users are not read.
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
from typing import NamedTuple

from energon_lite.errors import UsageError
from energon_lite.storage.files.atomic_file import lock, replacing, unlock
from energon_lite.storage.files.byte_ranges import map_file

_log = logging.getLogger(__name__)

_HEADER = struct.Struct("<8sI4x")
#: Bytes before those of a file.
HEADER = _HEADER.size
_MAGIC = b"ENRGLRNG"
#: The share of a full folder that is kept when files are removed: those unused for longest, or those needed last.
_KEEP, KEEP_NEXT = 0.9, 0.97
#: Name of the file with the bytes of all files, and its format.
_COUNT = "bytes.lock"
_SIZE = struct.Struct("<Q")
#: Seconds to wait for another process that counts, or makes room.
_PATIENCE = 60.0


class StoredFile(NamedTuple):
    """A file that may be removed; sorted by what goes first.

    Attributes:
        is_kept: its next use is known.
        nearness: the negative distance of that use.
        used_at: time of the last use.
        size: its bytes.
        path: its path.
    """

    is_kept: bool
    nearness: float
    used_at: int
    size: int
    path: str


def to_remove(files: Iterable[StoredFile], excess: float, distance: float) -> tuple[list[StoredFile], float | None]:
    """Return files of ``excess`` bytes, or a little more: those unused for longest, then those that are needed last.

    Of files whose next use is known, none gives way to one that is not needed at least twice as soon: samples that are
    needed once in each epoch would replace each other, and no more of them would be found.

    Args:
        files: all files.
        excess: the bytes.
        distance: distance of the next use of the file that is to be written.

    Returns:
        The files, and the smallest distance of the known next uses of those that are needed last; None: there is none.
    """
    chosen = list[StoredFile]()
    for file in sorted(files):
        if excess <= 0:
            break
        excess -= file.size
        chosen.append(file)
    near = min((-file.nearness for file in chosen if file.is_kept), default=None)
    is_near = near is None or 2 * distance < near
    return [file for file in chosen if is_near or not file.is_kept], near


class CheckedFolder:
    """Folder of checksummed files.

    Args:
        path: the folder.
        limit: bytes of all files; the files unused for longest are removed.
        option: the argument that names the folder, for messages.
        kept: name of a subfolder with files whose next uses are known, and which are removed last; "": there is none.
        distances: returns the distances of their next uses, by path.

    Attributes:
        damaged: files whose contents were not as they had been written.

    Raises:
        UsageError: the folder cannot be made.

    Example:
        >>> folder = CheckedFolder("/scratch/cache", 1 << 40, option="read_ahead")
        >>> folder.write(folder.place(b"key"), b"data")
        >>> bytes(folder.find(folder.place(b"key")))
        b'data'
    """

    each = map

    def __init__(
        self,
        path: str,
        limit: int,
        *,
        option: str,
        kept: str = "",
        distances: Callable[[Sequence[str]], Iterable[float]] = lambda paths: [0.0] * len(paths),
    ):
        self.path = os.path.abspath(os.path.expanduser(path))
        self.damaged = 0
        self._limit = limit
        self._kept = os.path.join(self.path, kept) if kept else ""
        self._distances = distances
        self._near: float | None = None  # see to_remove()
        try:
            os.makedirs(self.path, 0o700, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"{option}: the folder cannot be used: {error.strerror or error}",
                where=self.path,
                fix="give a folder that this process can write to",
            ) from error

    def place(self, key: bytes) -> str:
        """Return the path of the file for a key."""
        name = hashlib.sha256(key).hexdigest()[:40]
        return self.file(name[:2], name)

    def file(self, folder: str, name: str) -> str:
        """Return the path of a file with a name of its own."""
        return os.path.join(self._kept or self.path, folder, name)

    def has(self, path: str) -> bool:
        """Return whether there is a file, which may be damaged."""
        return os.path.exists(path)

    def find(self, path: str) -> memoryview | None:
        """Map the bytes of a file if it exists and is intact; a damaged one is removed.

        Args:
            path: its path, from :meth:`place` or :meth:`file`.
        """
        with suppress(OSError), open(path, "rb", buffering=0, opener=_open_own) as file:
            view = map_file(file.fileno())
            data = view[_HEADER.size :]
            if bytes(view[: _HEADER.size]) == header(path, data):
                os.utime(file.fileno())  # the time of last use, by which files are removed
                return data
            self.damaged += 1
            if self.damaged == 1:
                _log.warning("a file in the cache folder is damaged, it is made again (logged once): %s", path)
            os.unlink(path)
        return None

    def write(self, path: str, data: bytes, distance: Callable[[], float] = lambda: 0.0) -> bool:
        """Write a file; return False if there is no room for it.

        Args:
            path: its path, from :meth:`place` or :meth:`file`.
            data: its bytes.
            distance: returns the distance of its next use; called only if the folder is full.

        Raises:
            OSError: the folder cannot be used.
        """
        is_late = self._near is not None and 2 * distance() >= self._near
        if is_late or not self._reserve(_HEADER.size + len(data), distance):
            return False
        for folder in (os.path.dirname(os.path.dirname(path)), os.path.dirname(path)):
            _make_own(folder)
        with suppress(FileNotFoundError):  # another process has removed it already, to make room
            with replacing(path) as temporary, open(temporary, "xb", opener=_private) as file:
                file.write(header(path, data))
                file.write(data)
        return True

    def _reserve(self, size: int, distance: Callable[[], float]) -> bool:
        """Count bytes that are about to be written; return False if the folder is full, or too small for them.

        The count of all processes is in a file. Bytes of writers that were killed, and of files that were removed from
        outside, stay in it until the folder seems full, and is measured.
        """
        if size > self._limit:
            return False
        descriptor = os.open(os.path.join(self.path, _COUNT), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            lock(descriptor, _PATIENCE)  # without locks, the count is less exact
            stored = os.pread(descriptor, _SIZE.size, 0)
            used = _SIZE.unpack(stored)[0] if len(stored) == _SIZE.size else self._limit
            if used + size > self._limit:
                used = self._make_room(size, distance)
            has_room = used + size <= self._limit
            os.pwrite(descriptor, _SIZE.pack(used + size if has_room else used), 0)
            return has_room
        finally:
            unlock(descriptor)
            os.close(descriptor)

    def _make_room(self, size: int, distance: Callable[[], float]) -> int:
        """Measure the folder, and remove files until it may grow; return the bytes that stay."""
        found: tuple[list[StoredFile], list[StoredFile]] = [], []
        for place, _, names in os.walk(self.path):
            is_kept = bool(self._kept) and place.startswith(self._kept)
            for path in [os.path.join(place, name) for name in names if not name.endswith(".lock")]:
                with suppress(OSError):
                    status = os.stat(path)
                    found[is_kept].append(StoredFile(is_kept, 0.0, status.st_mtime_ns, status.st_size, path))
        others, kept = found
        total = sum(file.size for file in others) + sum(file.size for file in kept)
        if total + size <= self._limit:
            return total  # the count was wrong
        own, far = distance(), self._distances([file.path for file in kept])
        kept = [file._replace(nearness=-its) for file, its in zip(kept, far, strict=True)]
        excess = total + size - (KEEP_NEXT if kept else _KEEP) * self._limit
        removed, self._near = to_remove(others + kept, excess, own)
        for file in removed:
            with suppress(OSError):  # another process has removed it already
                os.unlink(file.path)
        return total - sum(file.size for file in removed)


def header(path: str, data: bytes | memoryview) -> bytes:
    """Return the bytes before those of a file."""
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
