"""Handle of a loader's executor: worker processes, threads or this process, started on demand."""

from __future__ import annotations

from functools import partial

from energon_lite.loading.executors.executor import Executor, InlineExecutor, Load
from energon_lite.loading.executors.own_watchdog import OwnWatchdog
from energon_lite.loading.executors.pool_options import PoolOptions
from energon_lite.loading.executors.thread_handle import check_threads
from energon_lite.loading.executors.work_seconds import WorkSeconds
from energon_lite.loading.executors.worker_pool import WorkerPool
from energon_lite.loading.makers.chunk_pipeline import ChunkPipeline
from energon_lite.loading.makers.pipeline import Pipeline
from energon_lite.loading.makers.stage_timer import StageTimer
from energon_lite.storage.files.read_counts import COUNTS

__all__ = ["ExecutorHandle"]


class ExecutorHandle:
    """Handle that starts and stops the workers.

    Args:
        pipeline: runner of a job.
        num_workers: number of workers; 0: this process runs the jobs.
        options: options for starting, watching and limiting the workers.

    Attributes:
        num_workers: actual number of workers: 0 for the start method ``main``.

    Raises:
        UsageError: the hooks cannot be run in threads.
    """

    def __init__(self, pipeline: Pipeline | ChunkPipeline, num_workers: int, options: PoolOptions):
        num_workers = 0 if options.start_method == "main" else num_workers
        self._pipeline = pipeline
        self.num_workers = num_workers
        self._options = options
        if num_workers and options.start_method == "thread":
            check_threads(pipeline)
        if not num_workers and options.trace:
            pipeline.samples.observers += (StageTimer(pipeline.samples.leaves),)
        #: Watchdog of this process, if it runs the jobs itself; None: no watchdog.
        self.watchdog = None if num_workers or options.watchdog_seconds is None else OwnWatchdog(options)
        self._executor: Executor | None = None
        self._past_deaths = 0
        #: Record of the workers' time, including that of workers that were stopped.
        self.work = WorkSeconds()

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

    def executor(self) -> Executor:
        """Return the executor of jobs; the same object until it is closed."""
        if self._executor is None:
            COUNTS.take()  # drop the counts of earlier reads in this process
            workers = self.num_workers
            pipeline = self._pipeline
            pool = partial(WorkerPool, pipeline, workers, self._options, self.work)
            self._executor = pool() if workers else InlineExecutor(pipeline, self.work)
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
        if self._executor is not None and (not self.num_workers or self._options.start_method == "thread"):
            self.work.reads += COUNTS.take()
