"""Who runs jobs, and the simplest who does: this process."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import copy_context
from copy import deepcopy
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeVar

from energon_lite.hooks import LendingScope, lending
from energon_lite.loading.executors.work_seconds import WorkSeconds
from energon_lite.loading.makers.chunk_job import Made
from energon_lite.loading.makers.chunk_pipeline import ChunkPipeline
from energon_lite.loading.makers.job_timer import JobTimer
from energon_lite.loading.makers.outcomes import Result
from energon_lite.loading.makers.pipeline import Job
from energon_lite.loading.makers.sample_maker import SampleMaker

__all__ = ["Executor", "InlineExecutor", "JobRunner", "Load"]

T = TypeVar("T")

#: Jobs that slow storage is told of before their turn.
_NEAR = 4


class JobRunner(Protocol):
    """What makes something of a job: a batch, the batches of a chunk, or lengths.

    Attributes:
        samples: makes the samples.
    """

    samples: SampleMaker

    def run(self, job: Any) -> Result:
        """The result of a job; pure, so that it can be run by anybody, and again."""


class Load(NamedTuple):
    """What an executor has in hand.

    Attributes:
        ready: results that wait for their turn.
        pending: jobs that are at work, or wait for a worker.
        bytes_in_flight: of the results that are ready.
    """

    ready: int = 0
    pending: int = 0
    bytes_in_flight: int = 0


class Executor(Protocol):
    """Runs jobs in the order they were submitted, or ahead of it.

    Attributes:
        total_deaths: workers that died.
    """

    total_deaths: int = 0

    def submit(self, job: Any) -> Any:
        """Take a job; returns a ticket."""

    def result(self, ticket: Any) -> Result:
        """The result of a job; waits for it. Each ticket is asked for once."""

    def load(self) -> Load:
        """What is in hand now."""
        return Load()

    def cancel(self) -> None:
        """Forget all jobs whose results were not asked for."""
        return

    def close(self) -> None:
        """Let go of everything; may be called twice."""
        return

    def ahead(self, jobs: int) -> int:
        """Jobs that should be submitted before their turn, where so many were wished for: more if they are tiny."""
        return jobs

    def results(self, jobs: Iterator[Job], ahead: int) -> Iterator[Result]:
        """The results of jobs, in their order; ``ahead`` of them, or more, are submitted before their turn."""
        tickets = deque[Any]()
        while True:
            wanted = 1 + self.ahead(ahead)
            while len(tickets) < wanted and (job := next(jobs, None)) is not None:
                tickets.append(self.submit(job))
            if not tickets:
                return
            yield self.result(tickets.popleft())

    @property
    def makes_all_batches(self) -> bool:
        """True if all batches of a chunk are there when the first one is; else each is made when it is asked for."""
        return True

    def batches(self, ticket: Any) -> Iterator[Made]:
        """The batches that the job of a chunk makes. Each ticket is asked for once."""
        batches = deque(self.result(ticket).batch)
        while batches:
            made = batches.popleft()
            if made.carried is not None:
                # Tensors look into the message that they came with, which has the whole chunk: only these have to stay.
                items, samples = deepcopy((made.carried.items, made.carried.samples))
                made = replace(made, carried=replace(made.carried, items=items, samples=samples))
            yield made


class InlineExecutor(Executor):
    """Runs each job in this process, when its result is asked for. A ticket is the job itself.

    Args:
        pipeline: what runs a job.
        work: is told how long it took.

    Which hook runs is noted in a context of the job's own, so the caller's is as it was, whenever Ctrl-C comes.
    """

    def __init__(self, pipeline: JobRunner, work: WorkSeconds | None = None):
        self._pipeline, self._work = pipeline, work or WorkSeconds()
        self._timer = JobTimer(self._work.add)

    def submit(self, job: Any) -> Any:
        return job

    def result(self, ticket: Any) -> Result:
        return copy_context().run(self._run, ticket)

    def _run(self, job: Any) -> Result:
        with LendingScope():
            return self._timed(lambda: self._pipeline.run(job))

    def _timed(self, make: Callable[[], T]) -> T:
        """What ``make`` returns; now and then it is timed."""
        began = time.monotonic()
        try:
            return make() if began < self._timer.due else self._timer.run(self._pipeline.samples, make)
        finally:
            self._work.busy += time.monotonic() - began

    def results(self, jobs: Iterator[Job], ahead: int) -> Iterator[Result]:
        return map(self.result, self._foreseen(jobs) if self._pipeline.samples.reads_ahead else jobs)

    def _foreseen(self, jobs: Iterator[Job]) -> Iterator[Job]:
        """The jobs; slow storage is told of each when its turn is near."""
        near = deque[Job]()
        for job in jobs:
            self._pipeline.samples.foresee(job.addresses)
            near.append(job)
            if len(near) > _NEAR:
                yield near.popleft()
        yield from near

    @property
    def makes_all_batches(self) -> bool:
        return False

    def batches(self, ticket: Any) -> Iterator[Made]:
        """The same, a batch at a time."""
        assert isinstance(self._pipeline, ChunkPipeline)
        context = copy_context()
        made = lending(self._pipeline.batches(ticket))
        return iter(lambda: self._timed(lambda: context.run(next, made, None)), None)
