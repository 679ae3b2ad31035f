"""Steps that once waited for ever: a test of them fails, and does not hang."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_time(step: Callable[[], T], seconds: float = 10.0) -> T:
    """What ``step`` gives, or raises, run in another thread; TimeoutError: it is still at it after so long."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(step())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result(seconds)
