"""Work that all cores share, done by forked processes: they know all that this one knows, and only results are sent."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, TypeVar

__all__ = ["cores_to_fork", "done_by_forks", "usable_cores"]

T = TypeVar("T")

#: Processes at most.
_MOST = 32
#: A process is waited for so many seconds, and so many times as long as this one took for as much.
_PATIENCE, _TIMES = 10.0, 3.0


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cores_to_fork() -> int:
    """Processes that may work at the same time, this one among them; 1 where none can be forked."""
    if not hasattr(os, "fork") or multiprocessing.current_process().daemon:
        return 1
    return min(usable_cores(), _MOST)


def done_by_forks(
    work: Callable[[int], T], count: int, processes: int, told: Callable[[int], None] = lambda done: None
) -> list[T]:
    """What ``work`` gives for 0, 1, ... up to ``count``, in this order.

    Each of ``processes`` does every so many-th, this one too. What a forked one does not deliver is done here: its work
    failed (so the error is raised here), it died, or it waits for a lock that a thread of this process had when it was
    forked. So whatever goes wrong there, it only takes longer.

    Args:
        work: what is done; its results can be pickled.
        count: how often.
        processes: how many work at the same time.
        told: called with how much is done, after each piece that this process does.

    Example:
        >>> done_by_forks(lambda number: number**2, 5, processes=2)
        [0, 1, 4, 9, 16]
    """
    context: Any = multiprocessing.get_context("fork" if processes > 1 else None)
    found: dict[int, T] = {}
    forks: list[tuple[Any, Connection]] = []
    began = time.monotonic()
    try:
        for first in range(1, min(processes, count)):
            if (fork := _started(context, work, range(first, count, processes))) is None:
                break
            forks.append(fork)
        for number in range(0, count, processes):
            found[number] = work(number)
            for _, receive in forks:  # whose pipes hold little
                _take(receive, found, 0.0)
            told(len(found))
        until = time.monotonic() + _PATIENCE + _TIMES * (time.monotonic() - began)
        for _, receive in forks:
            while _take(receive, found, max(0.0, until - time.monotonic())):
                pass
    finally:
        for fork, receive in forks:
            receive.close()
            fork.kill()
            fork.join()
    return [found[number] if number in found else work(number) for number in range(count)]


def _started(context: Any, work: Callable[[int], Any], numbers: Iterable[int]) -> tuple[Any, Connection] | None:
    """A forked process, and what comes from it; None: there may be no more processes, files, or memory for them."""
    with suppress(OSError):
        receive, send = context.Pipe(duplex=False)
        with send:
            fork = context.Process(target=_work, args=(work, numbers, receive, send), daemon=True)
            fork.start()
        return fork, receive
    return None


def _take(receive: Connection, found: dict[int, Any], seconds: float) -> bool:
    """Take what a process has sent until now; whether that was anything, within so many seconds."""
    taken = False
    # Nothing comes any more: it is done, it died, or what it has cannot be read.
    with suppress(EOFError, OSError, pickle.UnpicklingError):
        while receive.poll(0.0 if taken else seconds):
            number, result = receive.recv()
            found[number], taken = result, True
    return taken


def _work(work: Callable[[int], Any], numbers: Iterable[int], receive: Connection, send: Connection) -> None:
    """Body of a forked process."""
    receive.close()  # so that nobody reads any more when the one that waits is killed, and sending ends this one
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one that waits
    with suppress(Exception):  # it is found again by the one that waits, or nobody does
        for number in numbers:
            send.send((number, work(number)))
