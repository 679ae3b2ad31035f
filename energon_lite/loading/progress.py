"""Progress of a loader: speed of batches, waiting time and its reason, logged from time to time."""

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

#: Seconds between two marks; the bottleneck is that of the time since the mark before the last.
_WINDOW = 30.0


class Telling(NamedTuple):
    """Receivers of progress reports, and the intervals between reports.

    Args:
        log_every: batches between log lines; 0: no lines.
        sinks: sinks that get the metrics.
        sinks_every: batches between two writes to the sinks.

    Raises:
        UsageError: a number is out of range.
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
    """Counters at some moment."""

    time: float
    batches: int = 0
    wait_seconds: float = 0.0
    samples: int = 0
    tokens: int = 0
    work: WorkSum = WorkSum()


class Progress:
    """Sum of the waiting time, and reports of speed and bottleneck.

    Args:
        report: counts of samples and tokens.
        workers: handle of the executor, with the workers' time.
        setup: properties of the loader that the advice depends on.
        telling: receivers of the reports.
    """

    def __init__(self, report: Report, workers: ExecutorHandle, setup: LoaderSetup, telling: Telling):
        self._report = report
        self._workers = workers
        self._setup = setup
        self._telling = telling
        self.batches = 0
        self.wait_seconds = 0.0
        self._now = 0.0  # time of the last delivery
        self._last: _Mark | None = None  # counters at the last line
        self._written: _Mark | None = None  # counters at the last write to the sinks
        self._sinks = [*telling.sinks]
        self._older = self._newer = _Mark(-math.inf)

    def waited(self, seconds: float, now: float) -> bool:
        """Note a batch that is delivered at ``now`` after a wait of ``seconds``. Return whether a report is due."""
        if not self.batches:
            self._last = _Mark(now - seconds)
        self.batches = self.batches + 1
        self._now = now
        self.wait_seconds += seconds
        if now - self._newer.time > _WINDOW and self.batches not in range(2, self._newer.batches + LEAST_BATCHES):
            # The first batch includes the start of workers and the opening of files, so it is not representative.
            mark = self._mark()
            self._older = self._newer if self.batches > 1 else mark
            self._newer = mark
        telling = self._telling
        batches = self.batches
        return bool(telling.log_every and batches % telling.log_every == 0) or bool(
            telling.sinks and batches % telling.sinks_every == 0
        )

    def tell(self, stats: dict[str, Any]) -> None:
        """Log a line, and write the metrics to the sinks, if they are due.

        Args:
            stats: statistics of the loader.
        """
        if self._telling.log_every and self.batches % self._telling.log_every == 0:
            self._log()
        if self._telling.sinks and self.batches % self._telling.sinks_every == 0:
            self._write(stats)

    def stats(self, alone: bool = True) -> dict[str, Any]:
        """Return the part of the loader's :meth:`~energon_lite.DataLoader.stats` that is counted here.

        Args:
            alone: no other thread iterates over the loader now.
        """
        load = self._workers.load(alone)
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
        """Return the bottleneck of the last half minute or so; None: too little is known."""
        now = self._mark()
        older = self._older
        if not math.isfinite(older.time):
            return None
        work = now.work.since(older.work)
        if work.timed <= 0:  # no job was timed since, so the times of earlier jobs are used
            work = now.work._replace(busy=work.busy, sent=work.sent, received=work.received)
        batches = now.batches - older.batches
        seconds = now.time - older.time
        stretch = Stretch(batches, seconds, now.wait_seconds - older.wait_seconds, work)
        return bottleneck(stretch, self._setup)

    def log_end(self) -> None:
        """Log a line about the bottleneck when the workers are stopped, if the wait was long."""
        limits = self.bottleneck()
        if limits is not None and limits["limit"] != "trainer":
            waited = 100 * limits["waited"]
            logger.info(
                "batch %s: waited %.1f %% of the time; %s", f"{self.batches:,}", waited, bottleneck_text(limits)
            )

    def _mark(self) -> _Mark:
        report = self._report
        work = self._workers.work.sum()
        return _Mark(self._now, self.batches, self.wait_seconds, report.samples, report.tokens, work)

    def _log(self) -> None:
        """Log a line on the progress since the last one."""
        report = self._report
        last = self._last
        now = self._mark()
        assert last is not None
        self._last = now
        seconds = max(1e-9, now.time - last.time)
        load = self._workers.load()
        limits = self.bottleneck()
        deaths = self._workers.worker_deaths
        parts = [
            f"batch {self.batches:,}: {(now.samples - last.samples) / seconds:,.1f} samples/s",
            f"{(now.tokens - last.tokens) / seconds:,.0f} tokens/s" if now.tokens else "",
            f"waited {100 * (now.wait_seconds - last.wait_seconds) / seconds:.1f} % of the time",
            bottleneck_text(limits) if limits is not None else "",
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
            except Exception as error:  # a run must not fail because of metrics
                self._sinks.remove(sink)
                logger.warning("%s cannot be written to, and is left out from now on: %s", type(sink).__name__, error)


def setup_of(samples: Any, workers: int, start_method: str) -> LoaderSetup:
    """Return the properties of a loader that the advice depends on.

    Args:
        samples: maker of the samples.
        workers: number of workers.
        start_method: start method of the workers.
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
    """Return the ``num_tokens`` of a batch, summed if there are several; 0 if it has none."""
    tokens = batch.get("num_tokens") if isinstance(batch, dict) else getattr(batch, "num_tokens", None)
    if tokens is None or type(tokens) is int:
        return tokens or 0
    if isinstance(tokens, torch.Tensor):
        return int(tokens.sum())
    if isinstance(tokens, (list, tuple)):
        return sum(map(int, tokens))
    try:
        return int(tokens)
    except (TypeError, ValueError):
        return 0  # a field of the user's that happens to have this name
