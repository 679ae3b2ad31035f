"""Handle of a loader's executor: worker processes, threads or this process, started on demand; and a watchdog of
this process."""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from energon_lite.entry_points import RemoteWorkers, load, workers
from energon_lite.errors import UsageError, WorkerError
from energon_lite.loading.executors.executor import Executor, InlineExecutor, Load, PoolOptions, WorkSeconds
from energon_lite.loading.makers.job_runner import JobRunner
from energon_lite.loading.makers.observers import StageTimer
from energon_lite.storage.files.shard_store import COUNTS

logger = logging.getLogger(__name__)

T = TypeVar("T")


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
                "this process, which makes batches itself (num_workers=0), has made one for longer than %g s%s\n%s",
                self._seconds,
                ", and there is no worker to be replaced" if self._on_timeout == "replace" else "",
                stack,
            )
            on_hang()


class PoolRequest(NamedTuple):
    """Arguments of an executor, from its loader.

    Args:
        runner: runner of a job.
        num_workers: number of workers; 0: this process runs the jobs, unless there are workers elsewhere.
        options: options for starting, watching and limiting the workers.
        work: record of the workers' time, including that of workers that were stopped.
        described: description of workers elsewhere; None: there are none.
        identity: identity of the data set, as it is stored in states.
    """

    runner: JobRunner
    num_workers: int
    options: PoolOptions
    work: WorkSeconds
    described: RemoteWorkers | str | None
    identity: Mapping[str, Any]


def _pool_of(described: RemoteWorkers | str) -> Callable[[PoolRequest], Executor]:
    """Return the function of a guest that opens a pool with workers elsewhere.

    Raises:
        UsageError: no guest has such workers.
    """
    kind = described.partition("://")[0] if isinstance(described, str) else described.kind
    target = workers().get(kind)
    if target is None:
        raise UsageError(
            f"workers={described!r} of a WorkerConfig: there are no workers of the kind {kind!r}",
            fix=f"give one of: {', '.join(sorted(workers()))}"
            if workers()
            else "install energon_lite with energon_lite/extras/remote_workers",
        )
    return load(target)


class ExecutorHandle:
    """Handle that starts and stops the workers.

    Raises:
        UsageError: the hooks cannot be run in threads; or there are no such workers.
    """

    def __init__(self, request: PoolRequest):
        self._request = request
        runner = request.runner
        options = request.options
        self._open = None if request.described is None else _pool_of(request.described)
        self._has_pool = bool(request.num_workers) or self._open is not None
        if request.num_workers and options.start_method == "thread":
            from energon_lite.loading.executors.worker_handle import check_threads

            check_threads(runner)
        if not self._has_pool and options.trace:
            runner.services.observers += (StageTimer(runner.leaves),)
        #: Watchdog of this process, if it runs the jobs itself; None: no watchdog.
        self.watchdog = None if self._has_pool or options.watchdog_seconds is None else OwnWatchdog(options)
        self._executor: Executor | None = None
        self._past_deaths = 0
        self.work = request.work

    @property
    def worker_deaths(self) -> int:
        """Number of workers that died, including those of pools that were closed."""
        return self._past_deaths + (0 if self._executor is None else self._executor.total_deaths)

    def load(self, alone: bool = True) -> Load:
        """Return the present load.

        Args:
            alone: no other thread waits for results now; else answers that have arrived are left to that thread.
        """
        executor = self._executor
        if alone:
            self._take_reads()
        return Load() if executor is None else executor.load(alone)

    def stats(self, alone: bool) -> dict[str, Any]:
        """Return the part of the loader's :meth:`~energon_lite.DataLoader.stats` that is about the workers."""
        load = self.load(alone)
        work = self.work.sum()
        reads = self.work.reads._asdict()
        return {
            "queue": load._asdict(),
            "worker_deaths": self.worker_deaths,
            "stage_seconds": work.by_stage() | {"transfer": work.sent + work.received},
            "dataset_seconds": self.work.by_leaf(),
            "bytes_read": reads["bytes_read"],
            "cache": {name: reads[name] for name in ("memory_hits", "folder_hits", "stored_samples", "requests")},
        }

    def executor(self) -> Executor:
        """Return the executor of jobs; the same object until it is closed."""
        if self._executor is None:
            COUNTS.take()  # drop the counts of earlier reads in this process
            request = self._request
            if self._open is not None:
                self._executor = self._open(request)
            elif request.num_workers:
                from energon_lite.loading.executors.worker_pool import WorkerPool

                self._executor = WorkerPool(request.runner, request.num_workers, request.options, request.work)
            else:
                self._executor = InlineExecutor(request.runner, request.work)
        return self._executor

    def close(self) -> bool:
        """Stop the workers; return False if there was no executor."""
        if self.watchdog is not None:
            self.watchdog.close()
        self._past_deaths = self.worker_deaths
        self._take_reads()
        executor = self._executor
        self._executor = None
        if executor is not None:
            executor.close()
        return executor is not None

    def _take_reads(self) -> None:
        """Add the bytes that this process has read since the last timed job, if it runs the jobs."""
        if self._executor is not None and (not self._has_pool or self._request.options.start_method == "thread"):
            self.work.reads += COUNTS.take()
