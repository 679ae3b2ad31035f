"""A folder for files of one process, whose size is bounded together with those of all other processes of the machine.

    <parent>/.energon_lite_cache.<user>       bytes and files of all processes; whoever counts holds a lock on it
    <parent>/cache_<name>/                    the files of one process
    <parent>/cache_<name>.<user>.usage        its bytes and files; it holds a lock on this one for as long as it lives

Room is counted before a file is written, and given back after it was removed. A process that is killed lets go of its
lock: so anybody can tell that its folder is left over, without asking for process numbers, which containers do not
share. Whoever starts, or finds the folder full, removes what is left over, and counts again. A process that is killed
between two writes of numbers leaves too large a sum, never too small a one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from energon_lite.errors import UsageError
from energon_lite.storage.files.atomic_file import remove_if_there
from energon_lite.storage.files.file_lock import lock, unlock

__all__ = ["CacheFolder"]

#: Bytes, files.
_USAGE = struct.Struct("<qq")
#: Seconds to wait for another process that counts.
_PATIENCE = 10.0
#: Seconds between two tries, at least; it takes some 30 microseconds to count.
_PAUSE = 2e-4


class CacheFolder:
    """The folder of this process; it is made when it is needed first.

    Args:
        parent: where it is; what is there is bounded together.
        is_ours: the parent was made for this, and goes when it is empty.

    Raises:
        UsageError: the parent cannot be used.
    """

    def __init__(self, parent: str, *, is_ours: bool = False):
        self.parent, self._is_ours = os.path.abspath(parent), is_ours
        self._user = os.geteuid()
        self._ledger = os.path.join(self.parent, f".energon_lite_cache.{self._user}")
        self._mutex = threading.Lock()
        self._path: str | None = None
        self._usage: int | None = None  # descriptor of the file with this process's numbers
        self._used = (0, 0)

    # -- this process ---------------------------------------------------------------------------------------------

    @property
    def path(self) -> str:
        """Of the folder."""
        with self._mutex:
            return self._open()

    @property
    def is_open(self) -> bool:
        """Whether there is one."""
        return self._path is not None

    def _open(self) -> str:
        if self._path is not None:
            return self._path
        try:
            self._path = self._make()
        except OSError as error:
            raise UsageError(
                f"the folder of the cache cannot be used: {error.strerror or error}",
                where=self.parent,
                fix="give parent_cache_dir, a folder on a local disk that this process can write to",
            ) from error
        return self._path

    def _make(self, tries: int = 3) -> str:
        """Make the folder, empty and counted as such."""
        try:
            self._make_parent()
            with self._counting():
                path = os.path.join(self.parent, f"cache_{os.urandom(8).hex()}")
                usage = os.open(f"{path}.{self._user}.usage", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
                self._usage, self._used = usage, (0, 0)
                if not lock(usage, 0.0):
                    raise OSError(errno.ENOLCK, "files cannot be locked there")
                os.pwrite(usage, _USAGE.pack(0, 0), 0)
                os.mkdir(path, 0o700)
                return path
        except FileNotFoundError:  # the last user of the parent removed it just now
            if tries == 1:
                raise
            return self._make(tries - 1)

    def _make_parent(self) -> None:
        os.makedirs(os.path.dirname(self.parent), exist_ok=True)
        with suppress(FileExistsError):
            os.mkdir(self.parent, 0o700)
        if self._is_ours:
            status = os.lstat(self.parent)
            if status.st_uid != self._user or not os.path.isdir(self.parent) or os.path.islink(self.parent):
                raise OSError(errno.EPERM, "it belongs to somebody else")

    def reserve(self, size: int, most_bytes: int, most_files: int) -> str | None:
        """Count a file of this size, if there is room for it; gives the folder that it is to be written to.

        Args:
            size: in bytes.
            most_bytes, most_files: what all processes together may have.
        """
        with self._mutex:
            path = self._open()
            assert self._usage is not None
            try:
                with self._counting() as ledger:
                    used, files = _read(ledger)
                    if used + size > most_bytes or files + 1 > most_files:
                        return None
                    os.pwrite(ledger, _USAGE.pack(used + size, files + 1), 0)
                    self._used = self._used[0] + size, self._used[1] + 1
                    os.pwrite(self._usage, _USAGE.pack(*self._used), 0)
                    return path
            except OSError:
                return None

    def give_back(self, size: int, folder: str) -> None:
        """A file of this size was removed from the folder that :meth:`reserve` gave, or was not written."""
        with self._mutex:
            if self._usage is None or folder != self._path:  # it was removed, and counted no more
                return
            with suppress(OSError), self._counting() as ledger:  # else it counts until this process is gone
                self._used = self._used[0] - size, self._used[1] - 1
                os.pwrite(self._usage, _USAGE.pack(*self._used), 0)
                used, files = _read(ledger)
                os.pwrite(ledger, _USAGE.pack(used - size, files - 1), 0)

    def close(self) -> None:
        """Remove the folder, and those that are left over. It is made anew if it is needed again."""
        with self._mutex:
            path, usage = self._path, self._usage
            self._path = self._usage = None
            if path is not None:
                shutil.rmtree(path, ignore_errors=True)
                remove_if_there(f"{path}.{self._user}.usage")
            if usage is not None:
                os.close(usage)
        self.sweep()

    def forget(self) -> None:
        """In a forked process: the folder is the parent's."""
        if self._usage is not None:
            os.close(self._usage)
        self._path = self._usage = None

    # -- all processes --------------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Remove the folders of processes that are gone, and count again; without any left, the numbers, too."""
        if not self._names() and not os.path.lexists(self._ledger):
            return
        with suppress(OSError), self._counting() as ledger:
            used = files = 0
            names = self._names()
            for name in names:
                numbers = self._of_living(name)
                if numbers is not None:
                    used, files = used + numbers[0], files + numbers[1]
            os.pwrite(ledger, _USAGE.pack(used, files), 0)
            if not self._names():
                remove_if_there(self._ledger)
                if self._is_ours:
                    os.rmdir(self.parent)

    def _names(self) -> list[str]:
        """Of the files with the numbers of processes."""
        pattern = re.compile(rf"cache_[0-9a-f]{{16}}\.{self._user}\.usage")
        try:
            return [name for name in os.listdir(self.parent) if pattern.fullmatch(name)]
        except OSError:
            return []

    def _of_living(self, name: str) -> tuple[int, int] | None:
        """The numbers of a process; None: it is gone, and so is its folder now."""
        place = os.path.join(self.parent, name)
        try:
            file = os.open(place, os.O_RDWR | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return _read(file)
            shutil.rmtree(os.path.join(self.parent, name.partition(".")[0]), ignore_errors=True)
            remove_if_there(place)
            return None
        finally:
            os.close(file)

    @contextmanager
    def _counting(self) -> Iterator[int]:
        """Be the only process that counts; gives the file with the sum.

        Raises:
            OSError: it cannot be locked.
        """
        while True:
            file = os.open(self._ledger, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                if not _lock_soon(file):
                    raise OSError(errno.ENOLCK, "files cannot be locked there")
                if _is_there(self._ledger, file):  # else the last user removed it
                    yield file
                    return
            finally:
                unlock(file)
                os.close(file)


def _lock_soon(file: int) -> bool:
    """Lock a file that others hold for some microseconds at a time; False: it cannot be locked."""
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(_PAUSE * (1 + os.urandom(1)[0] / 64))  # a hook's random numbers are its own
        except OSError:
            return False
    return False


def _is_there(path: str, file: int) -> bool:
    try:
        return os.stat(path).st_ino == os.fstat(file).st_ino
    except FileNotFoundError:
        return False


def _read(file: int) -> tuple[int, int]:
    data = os.pread(file, _USAGE.size, 0)
    used, files = _USAGE.unpack(data) if len(data) == _USAGE.size else (0, 0)
    return used, files
