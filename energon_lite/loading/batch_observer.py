"""Door for observers of a loader: receivers of an event for each delivered batch."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from energon_lite.entry_points import load, observers
from energon_lite.errors import UsageError, at_least_one
from energon_lite.loading.executors.executor import StartMethod, WorkSeconds
from energon_lite.loading.makers.job_runner import JobRunner
from energon_lite.loading.makers.leaf import Leaf
from energon_lite.loading.makers.outcomes import Failure, Result


class BatchEvent(NamedTuple):
    """Record of a delivered batch.

    Args:
        step: number of the pass, and position of the micro-batch in it, ``rank`` included.
        asked: time of the request, in seconds of the monotonic clock.
        delivered: time of the delivery, on the same clock.
        result: the batch with the outcomes of its samples, its digest, and its times if an observer asks for them.
        batches: batches that the loader has delivered, this one included.
        wait_seconds: seconds between requests and deliveries of all these batches.
    """

    step: tuple[int, int]
    asked: float
    delivered: float
    result: Result
    batches: int
    wait_seconds: float


class BatchObserver:
    """Base class of observers: ``get_savable_loader(dataset, observers=[...])``.

    Attributes:
        name: key of its entry in ``loader.stats()``.
        times_stages: have workers measure the seconds of each stage: ``event.result.trace``.
        stats_every: batches between two calls of :meth:`on_stats`; 0: it is not called.

    Example:
        >>> class Digests(BatchObserver):
        ...     def on_batch(self, event):
        ...         print(event.step, event.result.digest)
    """

    name = ""
    times_stages = False
    stats_every = 0

    def on_batch(self, event: BatchEvent) -> None:
        """Take note of a batch, before the user gets it. The training loop waits for this method."""

    def on_lost(self, lost: Sequence[Failure]) -> None:
        """Take note of samples that were skipped or failed, when the batch after them is counted, or a pass ends."""

    def on_stats(self, stats: dict[str, Any]) -> None:
        """Take note of the loader's statistics, after a batch and before the user gets it."""

    def on_close(self) -> None:
        """Take note that the workers were stopped."""

    def stats(self) -> dict[str, Any] | None:
        """Return plain data for ``loader.stats()``; None: no entry."""
        return None


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


@dataclass(frozen=True)
class MetricsReports:
    """Sinks of metrics, and the batches between two writes.

    Raises:
        UsageError: ``every`` is below 1.
    """

    sinks: tuple[MetricsSink, ...]
    every: int

    def __post_init__(self) -> None:
        at_least_one("give a number of batches, at least 1", metrics_every=self.every)


@dataclass(frozen=True)
class ObservedRank:
    """Data-parallel rank whose batches an observer sees.

    Args:
        rank, world_size: data-parallel rank and world size.
        leaves: the leaves, in the order's numbering.
        runner: runner of the jobs.
        work: record of the workers' time.
        num_workers: number of workers; 0: this process does the work.
        start_method: start method of the workers.
        worker_files: files for the observer's lines about single workers; empty: none are wanted.
    """

    rank: int
    world_size: int
    leaves: Sequence[Leaf]
    runner: JobRunner
    work: WorkSeconds
    num_workers: int = 0
    start_method: StartMethod = "fork"
    worker_files: Sequence[str] = ()


class Observers(list[BatchObserver]):
    """Observers of one loader: the user's own, those of guests that have an argument of the loader, and those that
    guests have for every loader.

    Args:
        given: the user's own.
        observed: the rank.
        arguments: the loader's arguments for observers of guests, by name (``trace``, ``quarantine``, ``log_every``,
            ``metrics``); None: not wanted.

    Attributes:
        reporters: those that want the loader's statistics at intervals.

    Raises:
        UsageError: no guest has an observer of this name, or one of the user's is no :class:`BatchObserver`.
    """

    def __init__(self, given: Iterable[BatchObserver], observed: ObservedRank, arguments: Mapping[str, object]):
        super().__init__(given if isinstance(given, Iterable) else [given])
        for observer in self:
            if not isinstance(observer, BatchObserver):
                fix = "give a list of objects whose classes derive from energon_lite.loading.BatchObserver"
                raise UsageError(f"observers has {observer!r}, which is no BatchObserver", fix=fix)
        known = observers()
        for name, target in known.items():
            if name not in arguments:
                self.append(load(target)(None, observed))
        for name, argument in arguments.items():
            if argument is not None:
                self.append(load(_target(known, name, argument))(argument, observed))
        self.times_stages = any(observer.times_stages for observer in self)
        self.reporters = [observer for observer in self if observer.stats_every]

    def on_lost(self, lost: Sequence[Failure]) -> None:
        """Pass lost samples to all observers."""
        for observer in self if lost else ():
            observer.on_lost(lost)

    def on_close(self) -> None:
        """Tell all observers that the workers were stopped."""
        for observer in self:
            observer.on_close()

    def stats(self, taken: Container[str]) -> dict[str, Any]:
        """Return the entries of all observers for ``loader.stats()``.

        Raises:
            UsageError: two observers have one name, or the name of one is in ``taken``.
        """
        entries: dict[str, Any] = {}
        for observer in self:
            if (entry := observer.stats()) is None:
                continue
            if observer.name in entries or observer.name in taken:
                what = f"stats() has an entry {observer.name!r} already"
                raise UsageError(what, where=type(observer).__qualname__, fix="give the observer another `name`")
            entries[observer.name] = entry
        return entries


def _target(known: Mapping[str, str], name: str, argument: object) -> str:
    if name not in known:
        raise UsageError(
            f"{name}={argument!r}: the observer {name!r} is not installed",
            fix="install energon_lite with its extra ``inspect``, or leave the argument out",
        )
    return known[name]
