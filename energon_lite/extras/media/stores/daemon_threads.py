"""Threads that do calls for others, and that no process waits for when it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

__all__ = ["DaemonThreads"]

_Call = tuple["Future[Any] | None", Callable[..., Any], tuple[Any, ...]]


class DaemonThreads:
    """Like :class:`concurrent.futures.ThreadPoolExecutor`, whose threads keep a process from ending.

    Args:
        count: threads at most; they are started when there is something to do.
        name: of the threads.
    """

    def __init__(self, count: int, name: str):
        self._count, self._name = count, name
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._open = 0  # calls that are not done

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Have a function called; the future is cancelled as long as no thread has begun."""
        future: Future[Any] = Future()
        with self._lock:
            self._open += 1
            if len(self._threads) < min(self._count, self._open):
                name = f"{self._name}-{len(self._threads)}"
                thread = threading.Thread(target=self._work, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
        self._calls.put((future, function, arguments))
        return future

    def call_soon(self, function: Callable[[], Any]) -> None:
        """Have a function called, if there is a thread. Takes no lock, so that the collection of garbage may do it."""
        self._calls.put((None, function, ()))

    def shutdown(self, timeout: float) -> None:
        """Have the threads end when nothing is left to do, and wait for them, at most so many seconds."""
        deadline = time.monotonic() + timeout
        with self._lock:
            threads, self._threads = self._threads, []
        for _ in threads:
            self._calls.put(None)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function, arguments = call
            if future is None:
                function()
                continue
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(*arguments))
                except BaseException as error:  # whoever waits for it gets it
                    future.set_exception(error)
            with self._lock:
                self._open -= 1
            del call, future, function, arguments
