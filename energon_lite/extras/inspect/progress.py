"""Progress of a loader: lines of speed, waiting time and its reason in the log, and metrics for sinks."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from energon_lite.errors import UsageError
from energon_lite.extras.inspect.bottleneck import LIMITS, bottleneck_text
from energon_lite.loading.batch_observer import BatchEvent, BatchObserver, MetricsReports, ObservedRank

logger = logging.getLogger(__name__)

#: Entries of the statistics that are plain numbers.
_PLAIN = ("batches", "samples", "tokens", "skipped", "failed", "dropped", "wait_seconds", "bytes_read", "worker_deaths")


def loader_metrics(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of ``loader.stats()``, for a :class:`~energon_lite.loading.MetricsSink`.

    Names begin with ``loader/``; after a second slash comes a stage, a data set, or a bottleneck. ``step`` is the
    number of batches, ``time`` that of seconds since 1970.

    Args:
        stats: statistics of the loader.

    Example:
        >>> loader_metrics(loader.stats())["loader/stage_seconds/decode"]
        12.25
    """
    values: dict[str, Any] = {"step": stats["batches"], "time": time.time()}
    values |= {f"loader/{name}": stats[name] for name in _PLAIN}
    values["loader/fallbacks"] = sum(stats["fallbacks"].values())
    values |= {f"loader/queue_{name}": value for name, value in stats["queue"].items()}
    values |= {f"loader/cache_{name}": value for name, value in stats["cache"].items()}
    values |= {f"loader/stage_seconds/{name}": seconds for name, seconds in stats["stage_seconds"].items()}
    for entry in stats["dataset_seconds"]:
        values |= {f"loader/{stage}_seconds/{entry['dataset']}": entry[stage] for stage in ("read", "decode", "hooks")}
    for entry in stats["datasets"]:
        name = f"loader/dataset_samples/{entry['dataset']}"
        values[name] = values.get(name, 0) + entry["samples"]
    bottleneck = stats["bottleneck"]
    if bottleneck is not None:
        values["loader/waited"] = bottleneck["waited"]
        values |= {f"loader/bottleneck/{name}": int(name == bottleneck["limit"]) for name in LIMITS}
    return values


class _Mark(NamedTuple):
    """Counters at the delivery of a batch."""

    time: float
    samples: int = 0
    tokens: int = 0
    wait_seconds: float = 0.0


class _Reporter(BatchObserver):
    """Base class of observers that report what was done since their last report."""

    _batches = 0
    _now = 0.0  # time of the last delivery
    _last: _Mark | None = None

    def on_batch(self, event: BatchEvent) -> None:
        self._batches = event.batches
        self._now = event.delivered

    def _marks(self, stats: Mapping[str, Any]) -> tuple[_Mark | None, _Mark]:
        """Return the counters at the last report and now."""
        now = _Mark(self._now, stats["samples"], stats["tokens"], stats["wait_seconds"])
        last = self._last
        self._last = now
        return last, now


class ProgressLog(_Reporter):
    """Observer that logs a line on the progress since the last one.

    Args:
        every: batches between two lines.
        observed: not used.

    Raises:
        UsageError: ``every`` is negative.
    """

    def __init__(self, every: int, observed: ObservedRank):
        if every < 0:
            raise UsageError(f"log_every is {every}", fix="give a number of batches, or 0 for no lines")
        self.stats_every = every

    def on_batch(self, event: BatchEvent) -> None:
        super().on_batch(event)
        if self._last is None:
            self._last = _Mark(event.asked)

    def on_stats(self, stats: dict[str, Any]) -> None:
        last, now = self._marks(stats)
        assert last is not None
        seconds = max(1e-9, now.time - last.time)
        limits = stats["bottleneck"]
        queue = stats["queue"]
        deaths = stats["worker_deaths"]
        parts = [
            f"batch {self._batches:,}: {(now.samples - last.samples) / seconds:,.1f} samples/s",
            f"{(now.tokens - last.tokens) / seconds:,.0f} tokens/s" if now.tokens else "",
            f"waited {100 * (now.wait_seconds - last.wait_seconds) / seconds:.1f} % of the time",
            bottleneck_text(limits) if limits is not None else "",
            f"{queue['ready']} ready, {queue['pending']} pending, {queue['bytes_in_flight'] / (1 << 20):.1f} MiB in "
            "flight",
            f"{stats['skipped']} skipped" if stats["skipped"] else "",
            f"{stats['failed']} failed" if stats["failed"] else "",
            f"{deaths} workers died" if deaths else "",
        ]
        logger.info("%s", "; ".join(part for part in parts if part))


class MetricsWriter(_Reporter):
    """Observer that writes metrics to sinks. A sink that fails is left out from then on.

    Args:
        reports: the sinks, and the batches between two writes.
        observed: not used.
    """

    def __init__(self, reports: MetricsReports, observed: ObservedRank):
        self.stats_every = reports.every
        self._sinks = [*reports.sinks]

    def on_stats(self, stats: dict[str, Any]) -> None:
        last, now = self._marks(stats)
        values = loader_metrics(stats)
        if last is not None and now.time > last.time:
            values["loader/samples_per_second"] = (now.samples - last.samples) / (now.time - last.time)
        for sink in list(self._sinks):
            try:
                sink.write(values)
            except Exception as error:  # a run must not fail because of metrics
                self._sinks.remove(sink)
                logger.warning("%s cannot be written to, and is left out from now on: %s", type(sink).__name__, error)
