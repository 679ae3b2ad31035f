"""Who runs jobs, and the simplest who does: this process."""

from __future__ import annotations

from contextvars import copy_context
from typing import Any, NamedTuple, Protocol

from energon_lite.hooks import LendingScope
from energon_lite.loading.makers.outcomes import Result
from energon_lite.loading.makers.pipeline import Job
from energon_lite.loading.makers.sample_maker import SampleMaker

__all__ = ["Executor", "InlineExecutor", "JobRunner", "Load"]


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
    """Runs jobs in the order they were submitted, or ahead of it."""

    def submit(self, job: Job) -> int:
        """Take a job; returns a ticket."""

    def result(self, ticket: int) -> Result:
        """The result of a job; waits for it. Each ticket is asked for once."""

    def load(self) -> Load:
        """What is in hand now."""

    def ahead(self, jobs: int) -> int:
        """Jobs that should be submitted before their turn, where so many were wished for: more if they are tiny."""

    def cancel(self) -> None:
        """Forget all jobs whose results were not asked for."""

    def close(self) -> None:
        """Let go of everything; may be called twice."""


class InlineExecutor:
    """Runs each job in this process, when its result is asked for."""

    def __init__(self, pipeline: JobRunner):
        self._pipeline = pipeline
        self._jobs: dict[int, Job] = {}
        self._tickets = 0

    def submit(self, job: Job) -> int:
        self._tickets += 1
        self._jobs[self._tickets] = job
        return self._tickets

    def result(self, ticket: int) -> Result:
        # Which hook runs is noted in a context of the job's own: the caller's is as it was, whenever Ctrl-C comes.
        return copy_context().run(self._run, self._jobs.pop(ticket))

    def _run(self, job: Job) -> Result:
        with LendingScope():
            return self._pipeline.run(job)

    def load(self) -> Load:
        return Load(pending=len(self._jobs))

    def ahead(self, jobs: int) -> int:
        return jobs

    def cancel(self) -> None:
        self._jobs.clear()

    def close(self) -> None:
        self._jobs.clear()
