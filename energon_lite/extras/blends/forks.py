"""Parallel work in forked processes: they share the memory of this process, and only results are sent."""

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

from energon_lite.topology import usable_cores

T = TypeVar("T")

#: Largest number of processes.
_MOST = 32
#: Seconds to wait for a forked process after this one has finished its part.
_PATIENCE = 10.0
#: Further time to wait, as a multiple of the time that this process took.
_TIMES = 3.0


def cores_to_fork() -> int:
    """Return the number of processes that may work at the same time, including this one; 1 if none can be forked."""
    if not hasattr(os, "fork") or multiprocessing.current_process().daemon:
        return 1
    return min(usable_cores(), _MOST)


def done_by_forks(
    work: Callable[[int], T], count: int, processes: int, told: Callable[[int], None] = lambda done: None
) -> list[T]:
    """Return the results of ``work`` for 0, 1, ... up to ``count``, in this order.

    The numbers are dealt out in turn to ``processes`` processes, including this one. This process does the work that a
    forked one does not deliver: because it failed (so the error is raised here), because the process died, or because
    it waits for a lock that a thread of this process held during the fork. So a problem there only costs time.

    Args:
        work: function to call; its results can be pickled.
        count: number of calls.
        processes: number of processes that work at the same time.
        told: called with the number of results, after each call in this process.

    Example:
        >>> done_by_forks(lambda number: number**2, 5, processes=2)
        [0, 1, 4, 9, 16]
    """
    context: Any = multiprocessing.get_context("fork" if processes > 1 else None)
    results: dict[int, T] = {}
    forks: list[tuple[Any, Connection]] = []
    began = time.monotonic()
    try:
        for first in range(1, min(processes, count)):
            if (fork := _started(context, work, range(first, count, processes))) is None:
                break
            forks.append(fork)
        for number in range(0, count, processes):
            results[number] = work(number)
            for _, receive in forks:  # their pipes hold little
                _take(receive, results, 0.0)
            told(len(results))
        until = time.monotonic() + _PATIENCE + _TIMES * (time.monotonic() - began)
        for _, receive in forks:
            while _take(receive, results, max(0.0, until - time.monotonic())):
                pass
    finally:
        for fork, receive in forks:
            receive.close()
            fork.kill()
            fork.join()
    return [results[number] if number in results else work(number) for number in range(count)]


def _started(context: Any, work: Callable[[int], Any], numbers: Iterable[int]) -> tuple[Any, Connection] | None:
    """Start a forked process, and return it with its pipe; None: too few processes, files, or too little memory."""
    with suppress(OSError):
        receive, send = context.Pipe(duplex=False)
        with send:
            fork = context.Process(target=_work, args=(work, numbers, receive, send), daemon=True)
            fork.start()
        return fork, receive
    return None


def _take(receive: Connection, found: dict[int, Any], seconds: float) -> bool:
    """Store the results that a process has sent, waiting at most ``seconds``; return whether there were any."""
    taken = False
    # An error means that no more results come: the process is done, it died, or its result cannot be read.
    with suppress(EOFError, OSError, pickle.UnpicklingError):
        while receive.poll(0.0 if taken else seconds):
            number, result = receive.recv()
            found[number] = result
            taken = True
    return taken


def _work(work: Callable[[int], Any], numbers: Iterable[int], receive: Connection, send: Connection) -> None:
    """Run the work of a forked process."""
    receive.close()  # so that the pipe has no reader left when the waiting process is killed, and sending fails
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the waiting process
    with suppress(Exception):  # the waiting process repeats the work and raises the error
        for number in numbers:
            send.send((number, work(number)))
