"""How fast batches come, how long they were waited for, what for, and a line about it from time to time."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from energon_lite.errors import UsageError
from energon_lite.hooks import own_hooks
from energon_lite.loading.bottleneck import LEAST_BATCHES, LoaderSetup, Stretch, bottleneck, bottleneck_text
from energon_lite.loading.executors.executor_handle import ExecutorHandle
from energon_lite.loading.executors.work_seconds import WorkSum
from energon_lite.loading.forks import usable_cores
from energon_lite.loading.loader_metrics import loader_metrics
from energon_lite.loading.makers.leaf import reads_ahead
from energon_lite.loading.makers.report import Report
from energon_lite.loading.metrics_sink import MetricsSink
from energon_lite.storage.read.webdataset import WebdatasetSource

__all__ = ["Progress", "Telling", "setup_of", "tokens_of"]

logger = logging.getLogger(__name__)

#: Seconds from one look to the next; the limit is that of the time since the one before the last.
_WINDOW = 30.0


class Telling(NamedTuple):
    """Who is told how it goes, and how often.

    Args:
        log_every: batches from line to line; 0: no lines.
        sinks: get the numbers.
        sinks_every: batches from one time to the next.

    Raises:
        UsageError: a number makes no sense.
    """

    log_every: int = 0
    sinks: tuple[MetricsSink, ...] = ()
    sinks_every: int = 100

    @classmethod
    def checked(cls, log_every: int, sinks: Iterable[MetricsSink], sinks_every: int) -> Telling:
        if log_every < 0:
            raise UsageError(f"log_every is {log_every}", fix="give a number of batches, or 0 for no lines")
        if sinks_every < 1:
            raise UsageError(f"metrics_every is {sinks_every}", fix="give a number of batches, at least 1")
        return cls(log_every, tuple(sinks), sinks_every)


class _Mark(NamedTuple):
    """Where things stood at some moment."""

    time: float
    batches: int = 0
    wait_seconds: float = 0.0
    samples: int = 0
    tokens: int = 0
    work: WorkSum = WorkSum()


class Progress:
    """Adds up waiting, decides what was waited for, and tells.

    Args:
        report: counts samples and tokens.
        workers: say how they spend their time.
        setup: what an advice depends on.
        telling: who is told.
    """

    def __init__(self, report: Report, workers: ExecutorHandle, setup: LoaderSetup, telling: Telling):
        self._report = report
        self._workers = workers
        self._setup = setup
        self._telling = telling
        self.batches = 0
        self.wait_seconds = 0.0
        self._now = 0.0  # when the last batch was delivered
        self._last: _Mark | None = None  # the last line
        self._written: _Mark | None = None  # the last numbers
        self._sinks = [*telling.sinks]
        self._older = self._newer = _Mark(-math.inf)

    def waited(self, seconds: float, now: float) -> bool:
        """A batch was waited for, so long, and is delivered now. Returns whether anybody is to be told."""
        if not self.batches:
            self._last = _Mark(now - seconds)
        self.batches = self.batches + 1
        self._now = now
        self.wait_seconds += seconds
        if now - self._newer.time > _WINDOW and self.batches not in range(2, self._newer.batches + LEAST_BATCHES):
            # The first batch, for which workers are started and files opened, says nothing about the others.
            mark = self._mark()
            self._older = self._newer if self.batches > 1 else mark
            self._newer = mark
        telling = self._telling
        batches = self.batches
        return bool(telling.log_every and batches % telling.log_every == 0) or bool(
            telling.sinks and batches % telling.sinks_every == 0
        )

    def tell(self, stats: dict[str, Any]) -> None:
        """Log a line, and give the numbers to those who want them.

        Args:
            stats: of the loader.
        """
        if self._telling.log_every and self.batches % self._telling.log_every == 0:
            self._log()
        if self._telling.sinks and self.batches % self._telling.sinks_every == 0:
            self._write(stats)

    def stats(self) -> dict[str, Any]:
        """What the loader's :meth:`~energon_lite.DataLoader.stats` has of it."""
        load = self._workers.load()
        work = self._workers.work
        summed = work.sum()
        reads = work.reads
        return {
            "wait_seconds": self.wait_seconds,
            "queue": load._asdict(),
            "worker_deaths": self._workers.worker_deaths,
            "stage_seconds": summed.by_stage() | {"transfer": summed.sent + summed.received},
            "dataset_seconds": work.by_leaf(),
            "bytes_read": reads.bytes_read,
            "cache": {
                "memory_hits": reads.memory_hits,
                "folder_hits": reads.folder_hits,
                "requests": reads.requests,
            },
            "bottleneck": self.bottleneck(),
        }

    def bottleneck(self) -> dict[str, Any] | None:
        """The limit of the last half minute or so; None: too little is known."""
        now = self._mark()
        older = self._older
        if not math.isfinite(older.time):
            return None
        work = now.work.since(older.work)
        if work.timed <= 0:  # quick batches, and few of them: those before say how it is
            work = now.work._replace(busy=work.busy, sent=work.sent, received=work.received)
        batches = now.batches - older.batches
        seconds = now.time - older.time
        stretch = Stretch(batches, seconds, now.wait_seconds - older.wait_seconds, work)
        return bottleneck(stretch, self._setup)

    def log_end(self) -> None:
        """The workers are stopped: a line about what they were waited for, if that was much."""
        found = self.bottleneck()
        if found is not None and found["limit"] != "trainer":
            waited = 100 * found["waited"]
            logger.info("batch %s: waited %.1f %% of the time; %s", f"{self.batches:,}", waited, bottleneck_text(found))

    def _mark(self) -> _Mark:
        report = self._report
        work = self._workers.work.sum()
        return _Mark(self._now, self.batches, self.wait_seconds, report.samples, report.tokens, work)

    def _log(self) -> None:
        """A line on how it went since the last one."""
        report = self._report
        last = self._last
        now = self._mark()
        assert last is not None
        self._last = now
        seconds = max(1e-9, now.time - last.time)
        load = self._workers.load()
        found = self.bottleneck()
        deaths = self._workers.worker_deaths
        parts = [
            f"batch {self.batches:,}: {(now.samples - last.samples) / seconds:,.1f} samples/s",
            f"{(now.tokens - last.tokens) / seconds:,.0f} tokens/s" if now.tokens else "",
            f"waited {100 * (now.wait_seconds - last.wait_seconds) / seconds:.1f} % of the time",
            bottleneck_text(found) if found is not None else "",
            f"{load.ready} ready, {load.pending} pending, {load.bytes_in_flight / (1 << 20):.1f} MiB in flight",
            f"{report.skipped} skipped" if report.skipped else "",
            f"{report.failed} failed" if report.failed else "",
            f"{deaths} workers died" if deaths else "",
        ]
        logger.info("%s", "; ".join(part for part in parts if part))

    def _write(self, stats: dict[str, Any]) -> None:
        now = self._mark()
        last = self._written
        self._written = now
        values = loader_metrics(stats)
        if last is not None and now.time > last.time:
            values["loader/samples_per_second"] = (now.samples - last.samples) / (now.time - last.time)
        for sink in list(self._sinks):
            try:
                sink.write(values)
            except Exception as error:  # numbers are not worth a run
                self._sinks.remove(sink)
                logger.warning("%s cannot be written to, and is left out from now on: %s", type(sink).__name__, error)


def setup_of(samples: Any, workers: int, start_method: str) -> LoaderSetup:
    """What an advice depends on.

    Args:
        samples: makes the samples.
        workers: that there are.
        start_method: of these.
    """
    return LoaderSetup(
        workers,
        start_method,
        max(1, usable_cores() // max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))),
        reads_ahead=reads_ahead(samples.leaves),
        can_read_ahead=any(isinstance(leaf.source, WebdatasetSource) for leaf in samples.leaves),
        own_batch=not own_hooks(samples.encoder).isdisjoint(("batch", "encode_batch")),
        seeded=bool(samples.seeded_hooks),
    )


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
