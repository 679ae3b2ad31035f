"""Progress of a loader: speed of batches, waiting time and its reason, in log lines, as metrics for sinks, and
of all ranks together."""

from __future__ import annotations

import logging
import math
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import torch

from energon_lite.errors import UsageError
from energon_lite.hooks import own_hooks
from energon_lite.loading.executors.executor_handle import ExecutorHandle
from energon_lite.loading.executors.work_seconds import (
    LEAST_BATCHES,
    LoaderSetup,
    Stretch,
    WorkSum,
    bottleneck,
    bottleneck_text,
    usable_cores,
)
from energon_lite.loading.iterators.collectives import check_group, gather_plain, is_running
from energon_lite.loading.makers.job_runner import JobRunner
from energon_lite.loading.makers.leaf import reads_ahead
from energon_lite.loading.makers.report import Report
from energon_lite.storage.read.webdataset import WebdatasetSource
from energon_lite.worker_config import WorkerConfig

__all__ = ["MetricsSink", "Progress", "ReportingOptions", "gathered_stats", "setup_of", "tokens_of"]

logger = logging.getLogger(__name__)

#: Possible bottlenecks of a run.
LIMITS = ("storage", "decoding", "hooks", "transport", "trainer")
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


class MetricsSink(Protocol):
    """Receiver of numbers, at intervals.

    A loader takes sinks as ``metrics=``, and writes to them every ``metrics_every`` batches. A class whose instances
    are made with the last step that counts (0 for a new run) can be passed to ``Trainer(sinks=...)``; it is
    instantiated on the main rank when a run starts or resumes, and receives the numbers of each step.

    Example:
        >>> class Printer:
        ...     def __init__(self, after: int = 0): ...
        ...     def write(self, values): print(values["step"], values)
        ...     def close(self): ...
        >>> loader = get_savable_loader(dataset, metrics=[Printer()])
        >>> Trainer(config, sinks=[Printer])
    """

    def write(self, values: Mapping[str, Any]) -> None:
        """Receive the numbers, including ``values["step"]``."""

    def close(self) -> None:
        """Close the sink after the last numbers."""


#: Seconds between two marks; the bottleneck is that of the time since the mark before the last.
_WINDOW = 30.0


class ReportingOptions(NamedTuple):
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
    def checked(cls, log_every: int, sinks: Iterable[MetricsSink], sinks_every: int) -> ReportingOptions:
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
        options: receivers of the reports.
    """

    def __init__(self, report: Report, workers: ExecutorHandle, setup: LoaderSetup, options: ReportingOptions):
        self._report = report
        self._workers = workers
        self._setup = setup
        self._options = options
        self.batches = 0
        self.wait_seconds = 0.0
        self._now = 0.0  # time of the last delivery
        self._last: _Mark | None = None  # counters at the last line
        self._written: _Mark | None = None  # counters at the last write to the sinks
        self._sinks = [*options.sinks]
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
        options = self._options
        batches = self.batches
        return bool(options.log_every and batches % options.log_every == 0) or bool(
            options.sinks and batches % options.sinks_every == 0
        )

    def tell(self, stats: dict[str, Any]) -> None:
        """Log a line, and write the metrics to the sinks, if they are due.

        Args:
            stats: statistics of the loader.
        """
        if self._options.log_every and self.batches % self._options.log_every == 0:
            self._log()
        if self._options.sinks and self.batches % self._options.sinks_every == 0:
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


def setup_of(runner: JobRunner, workers: int, start_method: str) -> LoaderSetup:
    """Return the properties of a loader that the advice depends on.

    Args:
        runner: runner of the jobs.
        workers: number of workers.
        start_method: start method of the workers.
    """
    return LoaderSetup(
        workers,
        start_method,
        max(1, usable_cores() // max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))),
        reads_ahead=reads_ahead(runner.leaves),
        can_read_ahead=any(isinstance(leaf.source, WebdatasetSource) for leaf in runner.leaves),
        own_batch=not own_hooks(runner.encoder).isdisjoint(("batch", "encode_batch")),
        seeded=bool(runner.seeded_hooks),
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


#: Counts that are added up.
_SUMS = ("batches", "samples", "tokens", "skipped", "failed", "dropped", "bytes_read", "worker_deaths")


def gathered_stats(own: Mapping[str, Any], config: WorkerConfig) -> dict[str, Any]:
    """Return the statistics of all ranks, on each rank. A collective.

    Args:
        own: statistics of this rank.
        config: rank and world size of this process.

    Raises:
        UsageError: there is no process group.
        TopologyError: the group has another number of ranks.
    """
    if config.world_size == 1:
        ranks = [dict(own)]
    else:
        if not is_running():
            raise UsageError(
                f"gather_stats on {config.world_size} ranks without a process group to ask the others over",
                fix="call torch.distributed.init_process_group before, or stats(), which is about this rank",
            )
        check_group(world_size=config.world_size, group=config.data_parallel_group)
        ranks = gather_plain(own, group=config.data_parallel_group)
    waits = [stats["wait_seconds"] for stats in ranks]
    slowest = max(range(len(waits)), key=waits.__getitem__)
    return {
        **{name: sum(stats[name] for stats in ranks) for name in _SUMS},
        "fallbacks": dict(sum((Counter(stats["fallbacks"]) for stats in ranks), Counter[str]())),
        "wait_seconds": waits[slowest],
        "wait_seconds_mean": sum(waits) / len(waits),
        "wait_rank": slowest,
        "bottleneck": ranks[slowest]["bottleneck"],
        "ranks": ranks,
    }
