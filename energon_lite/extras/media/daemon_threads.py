"""Threads that run calls in the background, and do not keep a process from ending."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

_Call = tuple["Future[Any] | None", Callable[..., Any], tuple[Any, ...]]


class DaemonThreads:
    """Pool of daemon threads. The threads of :class:`concurrent.futures.ThreadPoolExecutor` keep a process from ending.

    Args:
        count: threads at most; they are started when there are calls.
        name: prefix of the threads' names.
    """

    def __init__(self, count: int, name: str):
        self._count = count
        self._name = name
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._open = 0  # calls that have not been finished

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Schedule a call; its future can be cancelled until a thread starts the call."""
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
        """Schedule a call if there is a thread. Takes no lock, so that the garbage collector may call it."""
        self._calls.put((None, function, ()))

    def shutdown(self, timeout: float) -> None:
        """End the threads after all scheduled calls; wait for them for at most ``timeout`` seconds."""
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
                except BaseException as error:  # raised again for the caller who waits on the future
                    future.set_exception(error)
            with self._lock:
                self._open -= 1
            del call, future, function, arguments
