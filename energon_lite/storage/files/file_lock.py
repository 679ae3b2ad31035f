"""Locks on open files, with a limited waiting time: the holder may hang, or its machine may be gone."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

from energon_lite.errors import DatasetError
from energon_lite.storage.files.atomic_file import remove_if_there

__all__ = ["held_folder", "lock", "only_one", "unlock"]

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
    fd = os.open(path + ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, mode)
    tell = partial(
        _log.warning, "another process holds %s.lock; waiting for at most %g s, then without it", path, patience
    )
    try:
        if not lock(fd, patience, told=_TOLD, tell=tell):
            # The file is replaced atomically, so making it twice costs time only.
            _log.debug("no lock on %s: several processes may make it at the same time", path)
        yield
    finally:
        # Processes that wait for this lock file find the result when they get the lock; later ones make a new file.
        try:
            remove_if_there(path + ".lock")
        finally:
            unlock(fd)
            os.close(fd)
