"""Who does the work for a loader: worker processes, or this process; started when they are needed."""

from __future__ import annotations

from energon_lite.loading.chunk_pipeline import ChunkPipeline
from energon_lite.loading.lane_feed import InlineChunks, PooledChunks
from energon_lite.loading.pipeline import Pipeline
from energon_lite.loading.workers import Executor, InlineExecutor, Load, WorkerPool

__all__ = ["Crew"]


class Crew:
    """Starts workers, and stops them.

    Args:
        pipeline: what runs a job.
        num_workers: 0: this process does the work.
        start_method, watchdog_seconds, fail_on_timeout, max_bytes_in_flight: see
            :class:`~energon_lite.loading.workers.WorkerPool`.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        num_workers: int,
        *,
        start_method: str,
        watchdog_seconds: float | None,
        fail_on_timeout: bool,
        max_bytes_in_flight: int,
    ):
        self._pipeline, self._num_workers = pipeline, num_workers
        self._start_method, self._watchdog_seconds = start_method, watchdog_seconds
        self._fail_on_timeout, self._max_bytes = fail_on_timeout, max_bytes_in_flight
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
        """The one who runs jobs; the same until it is closed."""
        if self._executor is None:
            self._executor = self._start() if self._num_workers else InlineExecutor(self._pipeline)
        return self._executor

    def chunks(self) -> InlineChunks | PooledChunks:
        """The one who works on chunks."""
        if not self._num_workers and isinstance(self._pipeline, ChunkPipeline):
            return InlineChunks(self._pipeline)
        return PooledChunks(self.executor())

    def close(self) -> bool:
        """Stop the workers. False: nobody was at work."""
        self._past_deaths = self.worker_deaths
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.close()
        return executor is not None

    def _start(self) -> WorkerPool:
        return WorkerPool(
            self._pipeline,
            self._num_workers,
            start_method=self._start_method,
            watchdog_seconds=self._watchdog_seconds,
            fail_on_timeout=self._fail_on_timeout,
            max_bytes_in_flight=self._max_bytes,
        )
