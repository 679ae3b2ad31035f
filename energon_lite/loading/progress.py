"""How fast batches come, how long they were waited for, and a line about it from time to time."""

from __future__ import annotations

import logging
import time
from typing import Any, NamedTuple

import torch

from energon_lite.errors import UsageError
from energon_lite.loading.executors.executor_handle import ExecutorHandle
from energon_lite.loading.makers.report import Report

__all__ = ["Progress", "tokens_of"]

logger = logging.getLogger(__name__)


class _Mark(NamedTuple):
    """Where things stood when the last line was logged."""

    time: float
    wait_seconds: float
    samples: int
    tokens: int


class Progress:
    """Adds up waiting, and logs.

    Args:
        report: counts samples and tokens.
        log_every: batches from line to line; 0: no lines.
    """

    def __init__(self, report: Report, log_every: int):
        if log_every < 0:
            raise UsageError(f"log_every is {log_every}", fix="give a number of batches, or 0 for no lines")
        self._report, self._log_every = report, log_every
        self.batches = 0
        self.wait_seconds = 0.0
        self._last: _Mark | None = None

    def waited(self, seconds: float) -> bool:
        """A batch was waited for, so long. Returns whether a line is to be logged now."""
        if not self.batches:
            self._last = _Mark(time.monotonic() - seconds, 0.0, 0, 0)
        self.batches += 1
        self.wait_seconds += seconds
        return bool(self._log_every) and self.batches % self._log_every == 0

    def log(self, workers: ExecutorHandle) -> None:
        """Log how it went since the last line."""
        report, last = self._report, self._last
        now = _Mark(time.monotonic(), self.wait_seconds, report.samples, report.tokens)
        assert last is not None
        self._last = now
        seconds = max(1e-9, now.time - last.time)
        load = workers.load()
        parts = [
            f"batch {self.batches:,}: {(now.samples - last.samples) / seconds:,.1f} samples/s",
            f"{(now.tokens - last.tokens) / seconds:,.0f} tokens/s" if now.tokens else "",
            f"waited {100 * (now.wait_seconds - last.wait_seconds) / seconds:.1f} % of the time",
            f"{load.ready} ready, {load.pending} pending, {load.bytes_in_flight / (1 << 20):.1f} MiB in flight",
            f"{report.skipped} skipped" if report.skipped else "",
            f"{report.failed} failed" if report.failed else "",
            f"{workers.worker_deaths} workers died" if workers.worker_deaths else "",
        ]
        logger.info("%s", "; ".join(part for part in parts if part))


def tokens_of(batch: Any) -> int:
    """The ``num_tokens`` of a batch, summed if there are several; 0: it does not say."""
    found = batch.get("num_tokens") if isinstance(batch, dict) else getattr(batch, "num_tokens", None)
    if found is None or type(found) is int:
        return found or 0
    if isinstance(found, torch.Tensor):
        return int(found.sum())
    if isinstance(found, (list, tuple)):
        return sum(map(int, found))
    try:
        return int(found)
    except (TypeError, ValueError):
        return 0  # some field of the user's that has this name
