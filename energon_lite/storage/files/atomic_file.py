"""Files that one process makes, and that appear complete or not at all.

A reader on another rank, or a run that starts after a crash, must never see half an index: the bytes are written to a
temporary file in the same folder, which is then renamed to the final name (atomic on POSIX file systems). Locks keep
several processes from making the same file at the same time.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial

from energon_lite.errors import DatasetError

_TEMPORARY = re.compile(r"\..+\.(?P<host>[0-9a-f]{8})\.(?P<process>\d+)\.[0-9a-f]{8}\.tmp")
#: Seconds after which the temporary file of another machine, whose processes cannot be checked, counts as left over.
_LONG_AGO = 86_400.0
#: Threads that flush files at the same time.
_FLUSHING_THREADS = 8


def temporary_path(path: str) -> str:
    """Return a name in the same folder that no other process uses, and that identifies this process."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.{_host()}.{os.getpid()}.{os.urandom(4).hex()}.tmp")


def _host() -> str:
    """Identify the machine, or the container on it, whose processes can check each other, in 8 hexadecimal digits."""
    namespace = ""
    with suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return f"{zlib.crc32(f'{os.uname().nodename} {namespace}'.encode()):08x}"


@contextmanager
def replacing(path: str, *, flush: bool = False) -> Iterator[str]:
    """Give a temporary path; rename it to ``path`` when the block succeeds, remove it when the block fails.

    Args:
        path: the file.
        flush: also flush it to the disk. Without that a power failure after the rename may leave an empty file under
            the final name; many files are flushed faster together, by :func:`flush_files`.

    Example:
        >>> with replacing("index.sqlite") as temporary:
        ...     build_database(temporary)
    """
    temporary = temporary_path(path)
    try:
        yield temporary
        if flush:
            _flush(temporary)
        os.replace(temporary, path)
    except BaseException:
        remove_if_there(temporary)
        raise


def write_bytes(path: str, *chunks: bytes | memoryview, flush: bool = True) -> None:
    """Write ``chunks`` one after the other as the file ``path``, atomically.

    Args:
        path: the file.
        chunks: its contents.
        flush: see :func:`replacing`.
    """
    with replacing(path, flush=flush) as temporary, open(temporary, "xb") as file:
        file.writelines(chunks)


def flush_files(paths: Sequence[str]) -> None:
    """Flush files to the disk in parallel, so that the file system writes its journal once for many of them."""
    with ThreadPoolExecutor(_FLUSHING_THREADS) as pool:
        list(pool.map(_flush, paths))


def _flush(path: str) -> None:
    with open(path, "rb", buffering=0) as file:
        os.fsync(file.fileno())


def remove_if_there(path: str) -> None:
    """Remove a file if it exists."""
    with suppress(FileNotFoundError):
        os.unlink(path)


def remove_leftovers(folder: str) -> list[str]:
    """Remove temporary files of dead processes from a folder (not from its subfolders); return their paths.

    Files of other machines are removed when they are a day old.
    """
    removed = []
    with os.scandir(folder or ".") as entries:
        for entry in entries:
            match = _TEMPORARY.fullmatch(entry.name) if entry.name.endswith(".tmp") else None
            with suppress(FileNotFoundError):
                if match and _is_left_over(entry, match["host"], int(match["process"])):
                    os.unlink(entry.path)
                    removed.append(entry.path)
    return removed


def _is_left_over(entry: os.DirEntry[str], host: str, process: int) -> bool:
    if host != _host():
        return time.time() - entry.stat().st_mtime > _LONG_AGO
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):  # no process has a number that large
        return True
    except PermissionError:  # the process lives, under another user
        return False
    return False


_log = logging.getLogger(__name__)

#: Seconds that a process waits for another one that makes the same file.
_PATIENCE = 3600.0
#: Seconds after which the wait is logged.
_TOLD = 10.0
#: Seconds between the first two attempts to lock.
_SOON = 0.002
#: Seconds between two attempts, at most.
_LATER = 0.1


def lock(file: int, patience: float, *, told: float = float("inf"), tell: Callable[[], object] = lambda: None) -> bool:
    """Lock an open file. The lock ends with :func:`unlock`, or when this process and its forks have closed the file.

    Args:
        file: its descriptor.
        patience: seconds to wait for another holder.
        told, tell: after ``told`` seconds of waiting, ``tell`` is called once.

    Returns:
        False: another process still holds it, or the file system has no locks (as some network file systems).

    Example:
        >>> lock(file, 2.0)
        True
    """
    began, pause = time.monotonic(), _SOON
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            waited = time.monotonic() - began
        except OSError:
            return False
        if waited >= patience:
            return False
        if waited >= told:
            tell()
            told = float("inf")
        time.sleep(min(pause, patience - waited))
        pause = min(_LATER, 1.5 * pause)


def unlock(file: int) -> None:
    """Release a lock, even if a forked process still has the file open."""
    with suppress(OSError):  # there are no locks here
        fcntl.flock(file, fcntl.LOCK_UN)


@contextmanager
def held_folder(folder: str, doing: str) -> Iterator[None]:
    """Reserve a folder for this process until its end; the lock is on the folder itself, so no file is left behind.

    Args:
        folder: an existing folder.
        doing: the work on it, in a form such as "prepares", for messages.

    Raises:
        DatasetError: another process has reserved it. Never raised where there are no locks (some network systems).
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DatasetError(
                f"another process {doing} this folder at this moment",
                where=folder,
                fix="wait for its end; run this again if that failed, or had other arguments",
            ) from None
        except OSError as error:
            _log.debug("no lock on %s: %s", folder, error)
        yield
    finally:
        unlock(fd)
        os.close(fd)


def lock_file(path: str, mode: int, patience: float) -> tuple[int, bool]:
    """Open a lock file, which its holders may remove, and lock it; return its descriptor, and whether this process
    holds it: after ``patience`` seconds, or where there are no locks, it does not."""
    tell = partial(_log.warning, "another process holds %s; waiting for at most %g s, then without it", path, patience)
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, mode)
        try:
            if not lock(fd, patience, told=_TOLD, tell=tell):
                # The file is replaced atomically, so making it twice costs time only.
                _log.debug("no lock on %s: several processes may make the file at the same time", path)
                return fd, False
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), os.stat(path)):
                    return fd, True
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # its holder has removed it, and others may hold a new one


@contextmanager
def only_one(path: str, mode: int = 0o666, *, patience: float | None = None) -> Iterator[None]:
    """Let one process at a time make ``path``, on this machine (and on others, where the file system has locks).

    Args:
        path: the file that is made. The lock is a file next to it; a link of that name is not followed.
        mode: permissions of the lock file.
        patience: seconds to wait for another process, which may hang, or run on a machine that is gone; after that this
            process continues without the lock. None: an hour, the time that an index of very many shards may take.
    """
    patience = _PATIENCE if patience is None else patience
    os.makedirs(os.path.dirname(path), exist_ok=True)
    fd, _ = lock_file(path + ".lock", mode, patience)
    try:
        yield
    finally:
        try:
            remove_if_there(path + ".lock")
        finally:
            unlock(fd)
            os.close(fd)
