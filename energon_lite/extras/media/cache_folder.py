"""A folder for files of one process, with a common limit for the folders of all processes of the machine.

    <parent>/.energon_lite_cache.<user>       bytes and files of all processes; locked while they are counted
    <parent>/cache_<name>/                    the files of one process
    <parent>/cache_<name>.<user>.usage        its bytes and files; locked by the process as long as it lives

Space is counted before a file is written, and released after it was removed. The lock of a killed process ends with it,
so any process can tell that a folder is left over, without using process numbers, which differ between containers. A
process that starts, or finds the folder full, removes folders that are left over, and counts again. If a process is
killed between two writes of the numbers, the sum is too large, never too small.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from energon_lite.errors import UsageError
from energon_lite.storage.files.atomic_file import lock, lock_file, remove_if_there, unlock

#: Bytes and number of files.
_USAGE = struct.Struct("<qq")
#: Seconds to wait for another process that counts.
_PATIENCE = 10.0


class CacheFolder:
    """The cache folder of this process; it is made at the first use.

    Args:
        parent: folder of all cache folders, to which the limits apply.
        is_ours: the parent belongs to this library, and is removed when it is empty.

    Raises:
        UsageError: the parent cannot be used.
    """

    def __init__(self, parent: str, *, is_ours: bool = False):
        self.parent = os.path.abspath(parent)
        self._is_ours = is_ours
        self._user = os.geteuid()
        self._ledger = os.path.join(self.parent, f".energon_lite_cache.{self._user}")
        self._mutex = threading.Lock()
        self._path: str | None = None
        self._usage: int | None = None  # descriptor of the file with this process's counts
        self._used = (0, 0)
        self._has_ended = False

    # -- this process ---------------------------------------------------------------------------------------------

    @property
    def path(self) -> str:
        """Path of the folder; it is made if necessary."""
        with self._mutex:
            return self._open()

    @property
    def is_open(self) -> bool:
        """True if the folder exists."""
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
        """Make the folder, and its counts of zero."""
        try:
            self._make_parent()
            with self._counting():
                path = os.path.join(self.parent, f"cache_{os.urandom(8).hex()}")
                usage = os.open(f"{path}.{self._user}.usage", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
                self._usage = usage
                self._used = (0, 0)
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
            if status.st_uid != self._user or os.path.islink(self.parent):
                raise OSError(errno.EPERM, "it belongs to another user")

    def reserve(self, size: int, most_bytes: int, most_files: int) -> str | None:
        """Count a file of this size if there is space for it; return the folder to write it to, or None.

        Args:
            size: bytes of the file.
            most_bytes, most_files: limits of all processes together.
        """
        with self._mutex:
            if self._has_ended:
                return None
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
        """Release the space of a file that was removed from the folder of :meth:`reserve`, or was not written."""
        with self._mutex:
            if self._usage is None or folder != self._path:  # the folder was removed, with its counts
                return
            with suppress(OSError), self._counting() as ledger:  # on failure it counts until this process ends
                self._used = self._used[0] - size, self._used[1] - 1
                os.pwrite(self._usage, _USAGE.pack(*self._used), 0)
                used, files = _read(ledger)
                os.pwrite(ledger, _USAGE.pack(used - size, files - 1), 0)

    def close(self) -> None:
        """Remove the folder, and folders that are left over. It is made anew if it is needed again."""
        with self._mutex:
            path, usage = self._path, self._usage
            self._path = self._usage = None
            if path is not None:
                shutil.rmtree(path, ignore_errors=True)
                remove_if_there(f"{path}.{self._user}.usage")
            if usage is not None:
                os.close(usage)
        self.sweep()

    def end(self) -> None:
        """Close at the end of the process, whose other threads may still look for space."""
        self._has_ended = True
        self.close()

    def forget(self) -> None:
        """Forget the folder in a forked process: it belongs to the parent process."""
        if self._usage is not None:
            os.close(self._usage)
        self._path = self._usage = None

    # -- all processes --------------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Remove the folders of processes that have ended, and count again; remove the sum if no folder is left."""
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
        """Names of the files with the counts of each process."""
        pattern = re.compile(rf"cache_[0-9a-f]{{16}}\.{self._user}\.usage")
        try:
            return [name for name in os.listdir(self.parent) if pattern.fullmatch(name)]
        except OSError:
            return []

    def _of_living(self, name: str) -> tuple[int, int] | None:
        """The counts of a process; None if it has ended, after removing its folder."""
        place = os.path.join(self.parent, name)
        try:
            file = os.open(place, os.O_RDWR | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        try:
            if not lock(file, 0.0):
                return _read(file)
            shutil.rmtree(os.path.join(self.parent, name.partition(".")[0]), ignore_errors=True)
            remove_if_there(place)
            return None
        finally:
            os.close(file)

    @contextmanager
    def _counting(self) -> Iterator[int]:
        """Lock the file with the sum for this process alone; give its descriptor.

        Raises:
            OSError: it cannot be locked.
        """
        file, is_locked = lock_file(self._ledger, 0o600, _PATIENCE)
        try:
            if not is_locked:
                raise OSError(errno.ENOLCK, "files cannot be locked there")
            yield file
        finally:
            unlock(file)
            os.close(file)


def _read(file: int) -> tuple[int, int]:
    data = os.pread(file, _USAGE.size, 0)
    used, files = _USAGE.unpack(data) if len(data) == _USAGE.size else (0, 0)
    return used, files
