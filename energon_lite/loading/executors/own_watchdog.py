"""Watchdog of a loader without workers: it can show the stack of this process, but cannot end it."""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import TypeVar

from energon_lite.errors import WorkerError
from energon_lite.loading.executors.pool_options import PoolOptions

__all__ = ["OwnWatchdog"]

T = TypeVar("T")

logger = logging.getLogger(__name__)


def on_hang() -> None:
    """Do nothing. Called after each warning, in the watchdog's thread; replace it to be notified of hangs."""


class OwnWatchdog:
    """Watchdog of a process that makes batches itself. If a batch takes too long, a thread logs the stack, once.

    With ``on_timeout="raise"``, a WorkerError is raised when the batch is finished; a hook that never returns can only
    be ended in a worker.

    Args:
        options: the timeout, and the reaction to it.
    """

    def __init__(self, options: PoolOptions):
        assert options.watchdog_seconds is not None
        self._seconds = options.watchdog_seconds
        self._on_timeout = options.on_timeout
        self._began: float | None = None
        self._watched = 0  # the thread that makes the batch
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, make: Callable[[], T]) -> T:
        """Return the result of ``make``, which is watched meanwhile."""
        began = time.monotonic()
        self._watched = threading.get_ident()
        self._began = began
        if self._thread is None or not self._thread.is_alive():
            self._ended.clear()
            self._thread = threading.Thread(target=self._look, name="energon-lite-watchdog", daemon=True)
            self._thread.start()
        try:
            made = make()
        finally:
            self._began = None
        seconds = time.monotonic() - began
        if self._on_timeout == "raise" and seconds > self._seconds:
            raise WorkerError(
                f"a micro-batch took {seconds:.3g} s, longer than {self._seconds:g} s, in this process",
                fix="see the stack that was logged; raise watchdog_timeout_seconds if this is normal",
            )
        return made

    def close(self) -> None:
        """End the thread."""
        self._ended.set()

    def _look(self) -> None:
        reported = None
        while not self._ended.wait(min(1.0, self._seconds / 4)):
            began = self._began
            if began is None or began == reported or time.monotonic() - began < self._seconds:
                continue
            reported = began
            frame = sys._current_frames().get(self._watched)
            stack = "" if frame is None else "".join(traceback.format_stack(frame)).rstrip()
            logger.warning(
                "this process, which makes batches itself (num_workers=0), has been at one for longer than %g s%s\n%s",
                self._seconds,
                ", and there is no worker to be replaced" if self._on_timeout == "replace" else "",
                stack,
            )
            on_hang()
