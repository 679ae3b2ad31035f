"""Locks on open files, which nobody waits for without end: a holder may hang, or its machine may be gone."""

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

#: Seconds that one process waits for another that makes the same, and after which it says that it does.
_PATIENCE, _TOLD = 3600.0, 10.0
#: Seconds between two looks: the first, and the longest.
_SOON, _LATER = 0.002, 0.1


def lock(file: int, patience: float, *, told: float = float("inf"), tell: Callable[[], object] = lambda: None) -> bool:
    """Lock an open file, until :func:`unlock`, or until neither this process nor one forked from it has it open.

    Args:
        file: its descriptor.
        patience: seconds to wait for another holder.
        told, tell: after so many seconds of waiting, this is called, once.

    Returns:
        False: another one holds it still, or there are no locks here (some network file systems have none).

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
    """Give a lock back, also where a process that was forked meanwhile has the file open still."""
    with suppress(OSError):  # there are no locks here
        fcntl.flock(file, fcntl.LOCK_UN)


@contextmanager
def held_folder(folder: str, doing: str) -> Iterator[None]:
    """Let one process have a folder, until it ends in any way; the lock is the folder's, so no file is left over.

    Args:
        folder: it exists.
        doing: what it is had for, as "prepares".

    Raises:
        DatasetError: another process has it. Never where there are no locks (some network file systems).
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
    """Let one process of this machine (and of others, where the file system has locks) make ``path`` at a time.

    Args:
        path: what is made; the lock is a file beside it, and never what a link of that name leads to.
        mode: of the lock.
        patience: seconds to wait for another process, which may hang, or be on a machine that is gone; then this one
            goes on without the lock. None: an hour, as an index of very many shards may take.
    """
    patience = _PATIENCE if patience is None else patience
    os.makedirs(os.path.dirname(path), exist_ok=True)
    fd = os.open(path + ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, mode)
    tell = partial(
        _log.warning, "another process holds %s.lock; waiting for at most %g s, then without it", path, patience
    )
    try:
        if not lock(fd, patience, told=_TOLD, tell=tell):
            # What is made appears whole, so that two of them cost time only.
            _log.debug("no lock on %s: several processes may make it at the same time", path)
        yield
    finally:
        # Who waits for this file finds the index when it is let in; who comes later makes a new one.
        try:
            remove_if_there(path + ".lock")
        finally:
            unlock(fd)
            os.close(fd)
