"""Door for paths of batches: the way of results from a rank's workers to its training loop, or to a device.

A loader asks its path for each batch in two calls. :meth:`BatchPath.take` returns the next result; the loader counts
its samples and moves its cursor past it; :meth:`BatchPath.finish` returns the batch for the user. A path may begin its
work on a batch in ``take``, and take the next result ahead in ``finish``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from energon_lite.entry_points import batch_paths, load
from energon_lite.errors import UsageError
from energon_lite.loading.executors.executor import WorkSeconds
from energon_lite.loading.executors.executor_handle import ExecutorHandle
from energon_lite.loading.iterators.iterator import DatasetIterator
from energon_lite.loading.makers.job_runner import JobRunner
from energon_lite.loading.makers.outcomes import Result
from energon_lite.loading.makers.report import Report
from energon_lite.worker_config import WorkerConfig

if TYPE_CHECKING:
    import torch


class BatchPath:
    """Base class of paths. Only the last path of a loader finishes batches: others return them ready from ``take``."""

    def take(self) -> Result | None:
        """Return the next result; None: the loop is over. After an error, or :meth:`forget`, start at the cursor."""
        raise NotImplementedError

    def finish(self, result: Result) -> Any:
        """Return the batch of the result taken last. The cursor is past it, so an error here would lose the batch."""
        return result.batch

    def forget(self) -> None:
        """Drop results that were taken ahead. They were not delivered, and states do not count them."""

    def digest(self, result: Result) -> int:
        """Return the digest of the samples in the batch of the result taken last, also if a peer has loaded it."""
        return result.digest

    def stats(self) -> dict[str, Any]:
        """Return entries for the loader's statistics."""
        return {}

    def notes(self) -> dict[str, str]:
        """Return entries for states that do not decide the order, and are only compared."""
        return {}

    def restored(self, state: Mapping[str, Any]) -> None:
        """Compare the entries of a state that was restored with one's own; a difference is a warning."""


@dataclass(frozen=True)
class PathRequest:
    """Arguments of a path, from its loader.

    Args:
        before: path whose results this one passes on.
        iterator: iterator of this rank.
        runner: runner of the jobs; workers that are not started yet get it as the path leaves it.
        worker_config: place of this rank, and the replica that it belongs to.
        work: record of the workers' time; a path adds the seconds of this process to ``received``.
        device: device for the batches, as torch names it; None: they stay where they are.
        check_peers: compare the batches of peers in the replica.
    """

    before: BatchPath
    iterator: DatasetIterator
    runner: JobRunner
    worker_config: WorkerConfig
    work: WorkSeconds
    device: torch.device | str | None = None
    check_peers: bool = False


@dataclass(frozen=True)
class WorkerResults(BatchPath):
    """First part of every path: the results of this rank's workers, after a check of their failures.

    Args:
        iterator: iterator of this rank.
        workers: handle of the executor, which may have a watchdog.
        report: report of the outcomes.
    """

    iterator: DatasetIterator
    workers: ExecutorHandle
    report: Report

    def take(self) -> Result | None:
        take = self.iterator.take
        watchdog = self.workers.watchdog
        result = take() if watchdog is None else watchdog.watch(take)
        if result is not None:
            self.report.check(result.outcomes)
        return result


def open_path(name: str, request: PathRequest) -> BatchPath:
    """Return the path that a guest has under a name.

    Raises:
        UsageError: no guest has a path of this name.
    """
    target = batch_paths().get(name)
    if target is None:
        raise UsageError(
            f"the path {name!r} of batches is not installed",
            fix="install energon_lite with its extra ``device``, or leave batches where they are loaded",
        )
    return load(target)(request)


def path_of_rank(request: PathRequest) -> BatchPath:
    """Return the path of a rank's own results, or that through its replica if batches are shared or compared there."""
    replica = request.worker_config.replica
    if replica is None or not request.worker_config.loads_data:
        return request.before
    selects = replica.is_last_stage and replica.last_stage_fields is not None
    through_replica = selects or request.check_peers or replica.share == "broadcast"
    return open_path("replica", request) if through_replica else request.before
