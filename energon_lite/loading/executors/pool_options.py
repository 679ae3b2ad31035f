"""Options for starting, watching and limiting workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from energon_lite.errors import UsageError, check_choice

__all__ = ["OnTimeout", "PoolOptions", "StartMethod"]

StartMethod = Literal["fork", "forkserver", "spawn", "thread", "main"]
OnTimeout = Literal["warn", "replace", "raise"]


@dataclass(frozen=True)
class PoolOptions:
    """Options of a user for workers.

    Args:
        start_method: ``fork``, ``forkserver`` or ``spawn`` for processes; the latter two need a pipeline (and hooks)
            that can be pickled. ``thread``: threads of this process. ``main``: no workers, whatever their number.
        watchdog_seconds: a longer wait for a micro-batch, in seconds, is reported; None: never.
        on_timeout: reaction to such a wait: ``warn`` once, ``raise``, or ``replace`` the worker that hangs and run its
            job again.
        max_bytes_in_flight: no further job is begun while the results that wait for their turn, and the expected
            results of running jobs, exceed this size in bytes. The job whose result is requested is begun anyway.
        trace: results carry timing records.
        prefetch_factor: jobs that each worker is given before their turn; more if they are tiny.

    Raises:
        UsageError: an unknown value of a choice, or a number below 1.
    """

    start_method: StartMethod = "fork"
    watchdog_seconds: float | None = 60.0
    on_timeout: OnTimeout = "warn"
    max_bytes_in_flight: int = 1 << 30
    trace: bool = False
    prefetch_factor: int = 2

    def __post_init__(self) -> None:
        for name, kind in (("start_method", StartMethod), ("on_timeout", OnTimeout)):
            check_choice(name, getattr(self, name), get_args(kind))
        if self.prefetch_factor < 1:
            raise UsageError(f"prefetch_factor is {self.prefetch_factor}", fix="give at least 1")
        if self.start_method == "thread" and self.on_timeout == "replace":
            raise UsageError(
                "on_timeout='replace' with start_method='thread': a thread cannot be ended from outside",
                fix="use processes, or on_timeout='raise'",
            )
        if self.max_bytes_in_flight < 1:
            raise UsageError(f"max_bytes_in_flight is {self.max_bytes_in_flight}", fix="give a number of bytes")
