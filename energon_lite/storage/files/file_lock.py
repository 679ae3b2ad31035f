"""Locks on open files, which nobody waits for without end: a holder may hang, or its machine may be gone."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

__all__ = ["lock", "unlock"]

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
    try:
        import fcntl
    except ImportError:
        return False
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
    with suppress(ImportError, OSError):  # there are no locks here
        import fcntl

        fcntl.flock(file, fcntl.LOCK_UN)
