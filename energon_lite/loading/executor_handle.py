"""Who does the work for a loader: worker processes, or this process; started when they are needed."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from energon_lite.loading.executors.executor import Executor, InlineExecutor, Load
from energon_lite.loading.executors.own_watchdog import OwnWatchdog
from energon_lite.loading.executors.pool_options import PoolOptions
from energon_lite.loading.executors.thread_pool import ThreadPool, check_threads
from energon_lite.loading.executors.worker_pool import WorkerPool
from energon_lite.loading.iterators.lane_prefetcher import InlineChunks, PooledChunks
from energon_lite.loading.makers.chunk_pipeline import ChunkPipeline
from energon_lite.loading.makers.pipeline import Pipeline
from energon_lite.loading.makers.stage_timer import StageTimer

__all__ = ["ExecutorHandle"]


class ExecutorHandle:
    """Starts workers, and stops them.

    Args:
        pipeline: what runs a job.
        num_workers: 0: this process does the work.
        options: how they are started, watched and bounded.

    Raises:
        UsageError: threads cannot do what the hooks ask for.
    """

    def __init__(self, pipeline: Pipeline | ChunkPipeline, num_workers: int, options: PoolOptions):
        self._pipeline, self._num_workers, self._options = pipeline, num_workers, options
        if num_workers and options.start_method == "thread":
            check_threads(pipeline)
        if not num_workers and options.trace:
            pipeline.samples.observers += (StageTimer(pipeline.samples.leaves),)
        self._watchdog = OwnWatchdog(options)
        #: Entered while a batch is waited for: somebody has to watch this process where it does the work itself.
        self.watching: AbstractContextManager[Any] = nullcontext() if num_workers else self._watchdog
        self._executor: Executor | None = None
        self._past_deaths = 0

    @property
    def worker_deaths(self) -> int:
        """Workers that died, those of pools that were closed since included."""
        return self._past_deaths + int(getattr(self._executor, "total_deaths", 0))

    def load(self) -> Load:
        """What is in hand now."""
        return Load() if self._executor is None else self._executor.load()

    def executor(self) -> Executor:
        """The executor of jobs; the same until it is closed."""
        if self._executor is None:
            self._executor = self._start() if self._num_workers else InlineExecutor(self._pipeline)
        return self._executor

    def chunks(self) -> InlineChunks | PooledChunks:
        """The executor of chunks."""
        if not self._num_workers and isinstance(self._pipeline, ChunkPipeline):
            return InlineChunks(self._pipeline)
        return PooledChunks(self.executor())

    def close(self) -> bool:
        """Stop the workers. False: nobody was at work."""
        self._watchdog.close()
        self._past_deaths = self.worker_deaths
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.close()
        return executor is not None

    def _start(self) -> Executor:
        kind = ThreadPool if self._options.start_method == "thread" else WorkerPool
        return kind(self._pipeline, self._num_workers, self._options)
