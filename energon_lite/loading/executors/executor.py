"""Interface of executors, which run jobs, their options, the record of the workers' time, and the simplest executor:
this process."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextvars import copy_context
from copy import deepcopy
from dataclasses import dataclass, replace
from operator import sub
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from energon_lite.errors import UsageError, at_least_one, check_choice
from energon_lite.hooks import LendingScope, lending
from energon_lite.loading.makers.batch_runner import Job
from energon_lite.loading.makers.job_runner import JobRunner
from energon_lite.loading.makers.observers import JobTimer, Times
from energon_lite.loading.makers.outcomes import Result
from energon_lite.storage.files.shard_store import Reads

if TYPE_CHECKING:
    from energon_lite.loading.makers.chunk_job import Made

StartMethod = Literal["fork", "forkserver", "spawn", "thread", "main"]
OnTimeout = Literal["warn", "replace", "raise"]


@dataclass(frozen=True)
class PoolOptions:
    """Options of a user for workers.

    Args:
        start_method: ``fork``, ``forkserver`` or ``spawn`` for processes; the latter two need a runner (and hooks)
            that can be pickled. ``thread``: threads of this process. ``main``: no workers, whatever their number.
        watchdog_seconds: a longer wait for a micro-batch, in seconds, is reported; None: never.
        on_timeout: reaction to such a wait: ``warn`` once, ``raise``, or ``replace`` the worker that hangs and run its
            job again.
        max_bytes_in_flight: no further job is begun while the results that wait for their turn, and the expected
            results of running jobs, exceed this size in bytes. The job whose result is requested is begun anyway.
        trace: results carry timing records.
        prefetch_factor: jobs that each worker is given before their turn; more if they are tiny, or some take long.

    Raises:
        UsageError: an unknown value of a choice, or a number below 1.
    """

    start_method: StartMethod = "fork"
    watchdog_seconds: float | None = 60.0
    on_timeout: OnTimeout = "warn"
    max_bytes_in_flight: int = 1 << 30
    trace: bool = False
    prefetch_factor: int = 2

    def __post_init__(self) -> None:
        for name, kind in (("start_method", StartMethod), ("on_timeout", OnTimeout)):
            check_choice(name, getattr(self, name), get_args(kind))
        at_least_one(prefetch_factor=self.prefetch_factor)
        if self.start_method == "thread" and self.on_timeout == "replace":
            raise UsageError(
                "on_timeout='replace' with start_method='thread': a thread cannot be ended from outside",
                fix="use processes, or on_timeout='raise'",
            )
        at_least_one("give a number of bytes", max_bytes_in_flight=self.max_bytes_in_flight)


#: Stages of a job, see :func:`~energon_lite.loading.makers.observers.stage_of`; "other" is time outside of them.
STAGES = ("read", "decode", "hooks", "batch", "other")


class WorkSum(NamedTuple):
    """Sums up to some moment.

    Attributes:
        busy: seconds in which workers made batches.
        timed: the part of ``busy`` that is covered by timed jobs: all jobs but the last ones.
        cpu: the part of ``timed`` in which the worker used the CPU.
        stages: seconds of ``timed``, by stage, ``[stages]``.
        sent: seconds in which workers packed and sent results.
        received: seconds in which the trainer process received results, and began to copy them to the device.
    """

    busy: float = 0.0
    timed: float = 0.0
    cpu: float = 0.0
    stages: NDArray[np.float64] = np.zeros(len(STAGES))
    sent: float = 0.0
    received: float = 0.0

    def since(self, before: WorkSum) -> WorkSum:
        """Return the difference from an earlier moment."""
        return WorkSum(*map(sub, self, before))

    def by_stage(self) -> dict[str, float]:
        """Return the seconds of all jobs by stage, extrapolated from the timed jobs."""
        scale = self.busy / self.timed if self.timed > 0 else 0.0
        return dict(zip(STAGES, (self.stages * scale).tolist(), strict=True))


class WorkSeconds:
    """Accumulator of the workers' time.

    Attributes:
        busy: seconds in which workers made batches; the time of a job is added after its report to :meth:`add`.
        received: seconds in which this process received results from workers, and began to copy them to the device.
        reads: what was read.
    """

    def __init__(self) -> None:
        self.busy = self.received = 0.0
        self.reads = Reads()
        self._timed = self._cpu = self._sent = 0.0
        self._steps: Counter[tuple[str, str]] = Counter()  # seconds, by stage and leaf

    def add(self, times: Times) -> None:
        """Add the times of a job. They also stand for the jobs before it that were not timed, but for no later ones: a
        first job that opens files for seconds is not representative of a million others."""
        scale = 1.0 + max(0.0, self.busy - self._timed) / max(1e-9, times.seconds)
        self._timed += times.seconds * scale
        self._cpu += times.cpu_seconds * scale
        self._sent += times.sent
        self.reads += times.reads
        for stage, leaf, seconds in times.steps:
            self._steps[stage, leaf] += seconds * scale  # type: ignore[assignment]

    def sum(self) -> WorkSum:
        """Return the sums up to now."""
        stages = dict.fromkeys(STAGES, 0.0)
        for (stage, _), seconds in list(self._steps.items()):  # another thread may add some meanwhile
            stages[stage] += seconds
        stages["other"] = max(0.0, self._timed - sum(stages.values()))
        return WorkSum(self.busy, self._timed, self._cpu, np.array([*stages.values()]), self._sent, self.received)

    def by_leaf(self) -> list[dict[str, float | str]]:
        """Return the seconds of each leaf with timed jobs: ``read``, ``decode`` and ``hooks`` (of single samples)."""
        scale = self.busy / self._timed if self._timed > 0 else 0.0
        leaves: dict[str, dict[str, float | str]] = {}
        for (stage, leaf), seconds in sorted(self._steps.items()):
            if leaf != "*":
                own = leaves.setdefault(leaf, {"dataset": leaf, "read": 0.0, "decode": 0.0, "hooks": 0.0})
                own[stage] = seconds * scale
        return list(leaves.values())


T = TypeVar("T")

#: Number of jobs that slow storage is asked to fetch before their turn.
_NEAR = 4


class Load(NamedTuple):
    """Present load of an executor.

    Attributes:
        ready: results that wait for their turn.
        pending: jobs that are running, or wait for a worker.
        bytes_in_flight: size of the results that are ready, in bytes.
    """

    ready: int = 0
    pending: int = 0
    bytes_in_flight: int = 0


class Executor(Protocol):
    """Runner of jobs, in the order in which they were submitted, or ahead of it.

    Attributes:
        total_deaths: number of workers that died.
    """

    total_deaths: int = 0

    def submit(self, job: Any) -> Any:
        """Accept a job; return a ticket for its result."""

    def result(self, ticket: Any) -> Result:
        """Wait for the result of a job and return it. Call it once for each ticket."""

    def load(self, alone: bool = True) -> Load:
        """Return the present load.

        Args:
            alone: no other thread waits for results now, so that answers of workers may be taken.
        """
        return Load()

    def cancel(self) -> None:
        """Forget all jobs whose results were not requested."""
        return

    def close(self) -> None:
        """Release all resources; may be called twice."""
        return

    def ahead(self, jobs: int) -> int:
        """Return the number of jobs to submit before their turn, at least ``jobs``: more if they are tiny, or some take
        long."""
        return jobs

    @property
    def more_ahead(self) -> int:
        """Number of jobs to submit before their turn for workers that ``num_workers`` does not count."""
        return 0

    def results(self, jobs: Iterator[Job], ahead: int) -> Iterator[Result]:
        """Yield the results of jobs, in order; ``ahead`` of the jobs, or more, are submitted before their turn."""
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
        """True if all batches of a chunk exist when the first one does; False if each is made on request."""
        return True

    def batches(self, ticket: Any) -> Iterator[Made]:
        """Yield the batches that the job of a chunk makes. Call it once for each ticket."""
        batches = deque(self.result(ticket).batch)
        while batches:
            made = batches.popleft()
            if made.carried is not None:
                # Tensors refer to the received message, which holds the whole chunk; a copy lets go of the rest.
                items, samples = deepcopy((made.carried.items, made.carried.samples))
                made = replace(made, carried=replace(made.carried, items=items, samples=samples))
            yield made


class InlineExecutor(Executor):
    """Executor that runs each job in this process, when its result is requested. A ticket is the job itself.

    Args:
        runner: runner of a job.
        work: record of the time that jobs take.

    The running hook is stored in a context of the job's own, so an interrupt leaves the caller's context unchanged.
    """

    def __init__(self, runner: JobRunner, work: WorkSeconds | None = None):
        self._runner = runner
        self._work = work or WorkSeconds()
        self._timer = JobTimer(self._work.add)

    def submit(self, job: Any) -> Any:
        return job

    def result(self, ticket: Any) -> Result:
        return copy_context().run(self._run, ticket)

    def _run(self, job: Any) -> Result:
        with LendingScope():
            return self._timed(lambda: self._runner.run(job))

    def _timed(self, make: Callable[[], T]) -> T:
        """Return the result of ``make``; some of the calls are timed."""
        began = time.monotonic()
        try:
            return make() if began < self._timer.due else self._timer.run(self._runner.services, make)
        finally:
            self._work.busy += time.monotonic() - began

    def results(self, jobs: Iterator[Job], ahead: int) -> Iterator[Result]:
        return map(self.result, self._prefetched(jobs) if self._runner.reads_ahead else jobs)

    def _prefetched(self, jobs: Iterator[Job]) -> Iterator[Job]:
        """Yield the jobs; slow storage is asked to fetch the samples of each shortly before its turn."""
        near = deque[Job]()
        for job in jobs:
            self._runner.prefetch(job.addresses)
            near.append(job)
            if len(near) > _NEAR:
                yield near.popleft()
        yield from near

    @property
    def makes_all_batches(self) -> bool:
        return False

    def batches(self, ticket: Any) -> Iterator[Made]:
        """Yield the batches of a chunk, each made on request."""
        context = copy_context()
        made = lending(self._runner.batches(ticket))
        return iter(lambda: self._timed(lambda: context.run(next, made, None)), None)
