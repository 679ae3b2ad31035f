"""Pool of local workers and workers elsewhere. Local ones come first: others get what local ones cannot do in time."""

from __future__ import annotations

import logging
import select
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from energon_lite.errors import UsageError
from energon_lite.loading.executors.executor_handle import PoolRequest
from energon_lite.loading.executors.transport import Channel, WakingChannel
from energon_lite.loading.executors.worker_handle import LocalHandle, WorkerHandle, end_workers, fewest_jobs
from energon_lite.loading.executors.worker_pool import WorkerPool
from energon_lite.loading.makers.batch_runner import Job
from energon_lite.loading.makers.outcomes import Result

logger = logging.getLogger(__name__)

#: A job that the trainer waits for is late, and given to a second worker, after these seconds and this many mean jobs;
#: one that is not behind another job, after so many times the longest recent job; and if no worker is idle, after so
#: many times that.
_LATE, _LATE_JOBS, _LATE_LONGEST, _LATE_BUSY = 0.1, 3.0, 1.5, 2.0
#: Weight of the longest recent job after each further one.
_FADES = 0.99
#: Weight of the last measurement in a moving average; and in that of all workers' jobs, and its first value.
_LAST = 0.1
_LAST_JOB, _UNKNOWN = 0.2, 1.0
#: A job that is expected to take so many times the mean begins before those that were submitted earlier.
_SLOW = 4.0
#: A longer pause of the trainer, in steps, counts as this many: it saves, or evaluates.
_PAUSE = 4.0
#: Share of their time that local workers may need to keep up, before others are given jobs.
_BUSY = 0.95
#: Seconds between two measurements of the load of this machine, and the counters of Linux with it.
_EVERY = 0.5
_COUNTERS = Path("/proc/stat")


class RemoteHandle(WorkerHandle):
    """Handle of a worker elsewhere."""

    #: The end of a connection is no proof that the job is to blame.
    blame = 0.25

    def __init__(self, number: int, channel: Channel, name: str):
        super().__init__(number, channel)
        self._name = name

    def look(self) -> None:
        """Take note of whether something is heard of it; called when something has come on its channel."""

    def end_text(self) -> str:
        return "is gone"

    def stacks(self) -> str:
        return "(its stack is not shown here)"

    def __str__(self) -> str:
        return f"worker {self.number} ({self._name})"


class WorkerSource:
    """Source of workers elsewhere: it finds them, or starts them, in threads of its own. A pool never waits for it.

    Attributes:
        joined: channel on which workers join; it wakes the trainer.
        is_short: the trainer waits now, and local workers cannot keep up.
    """

    is_short = False

    def __init__(self) -> None:
        self.joined = WakingChannel()

    def start(self) -> None:
        """Begin to find workers."""
        raise NotImplementedError

    def take(self) -> list[RemoteHandle]:
        """Return the workers that have joined since the last call."""
        workers = []
        while (received := self.joined.receive()) is not None:
            workers.append(received[0])
        return workers

    def refusal(self) -> UsageError | None:
        """Return the reason why there are no workers, if it is known, to be raised in a pool that has none."""
        raise NotImplementedError

    def left(self, worker: RemoteHandle) -> None:
        """Take note that the pool has dropped a worker."""

    def spare(self) -> Sequence[RemoteHandle]:
        """Return workers that are not needed any more."""
        return ()

    def close(self) -> None:
        """Stop to find workers; may be called twice. The pool closes those that it has taken."""
        for worker in self.take():
            worker.close()


class Pace:
    """Comparison of the trainer's speed with that of local workers, from moving averages.

    Args:
        local: number of local workers.
    """

    def __init__(self, local: int):
        self._local = local
        self._jobs = 0
        self._step: float | None = None  # seconds of the trainer between two results
        self._job: float | None = None  # seconds of a local worker for a job
        self._given: float | None = None  # time at which the trainer got a result

    def ask(self, now: float) -> None:
        """Note that the trainer requests a result."""
        if self._given is not None:
            step = now - self._given
            before = step if self._step is None else self._step
            self._step = before + _LAST * (min(step, _PAUSE * before) - before)

    def give(self, now: float) -> None:
        """Note that the trainer gets a result."""
        self._given = now

    def made(self, seconds: float) -> None:
        """Note the seconds of a job of a local worker. The first job of each, which opens files, does not count."""
        self._jobs += 1
        if self._jobs <= self._local:
            return
        before = seconds if self._job is None else self._job
        self._job = before + _LAST * (seconds - before)

    @property
    def is_short(self) -> bool:
        """True if local workers cannot keep up with the trainer."""
        if not self._local:
            return True
        if self._step is None or self._job is None:
            return False
        return self._job > _BUSY * self._step * self._local


class JobTimes:
    """Expected seconds of jobs, from the mean seconds of a sample of each data set, by its number. Jobs are measured as
    a whole: each corrects the means of its data sets, in proportion to its samples of them."""

    def __init__(self) -> None:
        self._of_sample: dict[int, float] = defaultdict(float)

    def expected(self, job: Job) -> float:
        """Return the seconds that a job should take; too few if its data sets are new."""
        return self._seconds(_samples(job))

    def made(self, job: Job, seconds: float) -> None:
        """Note the seconds of a job."""
        counts = _samples(job)
        change = _LAST_JOB * (seconds - self._seconds(counts)) / max(1, sum(count**2 for count in counts.values()))
        for leaf, count in counts.items():
            self._of_sample[leaf] = max(0.0, self._of_sample[leaf] + change * count)

    def _seconds(self, counts: Counter[int]) -> float:
        return sum(count * self._of_sample[leaf] for leaf, count in counts.items())


def _samples(job: Job) -> Counter[int]:
    """Return the number of samples of each data set in a job."""
    return Counter(leaf for leaf, *_ in job.addresses)


class HostLoad:
    """Comparison of the share of this machine's processors that is in use with a limit.

    Args:
        limit: share from which on the load is high, 0 to 1.
    """

    def __init__(self, limit: float):
        self._limit = limit
        self._at = 0.0
        self._counted = (0, 0)
        self._share = 0.0

    def is_high(self) -> bool:
        """Return whether the share is above the limit; False on systems without counters."""
        now = time.monotonic()
        if now - self._at >= _EVERY:
            self._at = now
            before, self._counted = self._counted, _busy_and_all()
            busy, total = (later - earlier for later, earlier in zip(self._counted, before, strict=True))
            self._share = busy / total if before != (0, 0) and total else 0.0
        return self._share > self._limit


def _busy_and_all() -> tuple[int, int]:
    """Return the ticks in which processors were busy, and all ticks."""
    try:
        _, *ticks = _COUNTERS.read_text().partition("\n")[0].split()
    except OSError:
        return 0, 0
    numbers = [int(tick) for tick in ticks[:8]]
    return sum(numbers) - numbers[3] - numbers[4], sum(numbers)


class MixedPool(WorkerPool):
    """Pool whose further workers come from a source, and may leave at any time.

    Args:
        request: arguments of the pool, from its loader.
        source: source of the workers elsewhere.
        host_load: share of this machine's processors above which local workers begin no further jobs; None: any.
    """

    def __init__(self, request: PoolRequest, source: WorkerSource, host_load: float | None = None):
        self._source = source
        self._pace = Pace(request.num_workers)
        self._load = None if host_load is None else HostLoad(host_load)
        self._longest = 0.0  # seconds of the longest recent job
        self._mean = _UNKNOWN  # moving average of the seconds of a job, which the end of a worker does not change
        self._times = JobTimes()
        self._expected: dict[int, float] = {}  # seconds of jobs, when they were first seen waiting
        super().__init__(request.runner, request.num_workers, request.options, request.work)
        weakref.finalize(self, source.close)
        self._poll.register(source.joined.fileno(), select.POLLIN)
        source.start()

    @property
    def more_ahead(self) -> int:
        return self._base_depth * (len(self._workers) - self._num_workers) if self._pace.is_short else 0

    def ahead(self, jobs: int) -> int:
        return super().ahead(jobs + self.more_ahead)

    def result(self, ticket: int) -> Result:
        self._pace.ask(time.monotonic())
        try:
            return super().result(ticket)
        finally:
            self._pace.give(time.monotonic())

    def cancel(self) -> None:
        if not self._whole and self._is_open:
            elsewhere = [worker for worker in self._workers if isinstance(worker, RemoteHandle)]
            end_workers(elsewhere, 0.0)
            for worker in elsewhere:
                self._forget(worker)
        super().cancel()
        self._expected.clear()
        if self._is_open:
            self._poll.register(self._source.joined.fileno(), select.POLLIN)

    def close(self) -> None:
        self._source.close()
        super().close()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _free_worker(self, most: int) -> WorkerHandle | None:
        """Return a local worker; or one elsewhere, if local ones cannot keep up. A job in which a worker ended is left
        to local ones, whose end says more; but one that the trainer waits for is begun by whoever can."""
        local, elsewhere = self._workers[: self._num_workers], self._workers[self._num_workers :]
        elsewhere = [worker for worker in elsewhere if not worker.is_silent]
        spares = bool(elsewhere) and self._load is not None and self._load.is_high()
        if not spares and (worker := fewest_jobs(local, most)) is not None:
            return worker
        first = self._waiting[0]
        is_left = first != self._awaited and (not self._pace.is_short or first in self._deaths)
        if local and not spares and is_left:
            return None
        return fewest_jobs(elsewhere, most)

    def _next_jobs(self, wanted: int) -> list[int]:
        if self._waiting[0] != self._awaited:
            for ticket in self._waiting:
                if ticket not in self._expected:
                    self._expected[ticket] = self._times.expected(self._jobs[ticket])
            slowest = max(self._waiting, key=self._expected.__getitem__)
            if self._expected[slowest] > _SLOW * self._mean:
                self._waiting.remove(slowest)
                self._waiting.appendleft(slowest)
        return super()._next_jobs(wanted)

    def _collect(self, timeout: float | None) -> bool:
        hedge = self._hedge()
        self._source.is_short = self._pace.is_short
        waits = [timeout] if hedge is None else [timeout, hedge[1]]
        found = super()._collect(min((seconds for seconds in waits if seconds is not None), default=None))
        if hedge is not None and not hedge[1] and self._hedge() == hedge:  # its answer was not there yet
            self._send(hedge[0], [self._awaited])
        spare = self._source.spare()
        self._source.is_short = False
        for joined in self._source.take():
            self._workers.append(joined)
            self._poll.register(joined.channel.fileno(), select.POLLIN)
        if not self._workers and (refusal := self._source.refusal()) is not None:
            raise refusal
        for worker in spare:
            if worker in self._workers and not worker.tickets:
                self._poll.unregister(worker.channel.fileno())
                worker.close()
                self._forget(worker)
        return found

    def _take_answers(self, worker: WorkerHandle) -> None:
        before, since, jobs = self._work.busy, worker.since, len(worker.tickets)
        had = {ticket: self._jobs[ticket] for ticket in worker.tickets if ticket in self._jobs}
        super()._take_answers(worker)
        made = [ticket for ticket in had if ticket not in self._jobs]
        for ticket in made:
            self._expected.pop(ticket, None)
            if ticket in self._waiting:  # the worker was silent, and has answered after all
                self._waiting.remove(ticket)
        was_silent = worker.is_silent
        if isinstance(worker, RemoteHandle):
            worker.look()
        if worker.is_silent and not was_silent:
            lost = self._lost_with(worker)
            self._waiting.extendleft(reversed(lost))
            logger.warning("%s is silent; %d of its jobs are given to others", worker, len(lost))
        done = jobs - len(worker.tickets)
        if not done:  # a part of an answer, or the report of a failure
            worker.since = since
            return
        if not made:  # others were faster: the worker may have been stopped meanwhile
            return
        seconds = (self._work.busy - before) / done
        self._longest = max(seconds, _FADES * self._longest)
        self._mean += _LAST_JOB * (seconds - self._mean)
        for ticket in made:
            self._times.made(had[ticket], seconds)
        if isinstance(worker, LocalHandle):
            self._pace.made(seconds)

    def _hedge(self) -> tuple[WorkerHandle, float] | None:
        """Return the second worker for the job that the trainer waits for, and the seconds until the job is late; None:
        there is none before the next event. The first answer counts: jobs are pure.

        A job that has run for long is given to an idle worker; one that has run for twice as long, or that waits behind
        another job, to any.
        """
        ticket = self._awaited
        holders = [worker for worker in self._workers if ticket in worker.tickets and not worker.is_silent]
        if ticket not in self._jobs or len(holders) != 1:
            return None
        runs = holders[0].tickets[0] == ticket
        others = [worker for worker in self._workers if worker is not holders[0] and not worker.is_silent]
        late = max(_LATE, _LATE_JOBS * self._mean, _LATE_LONGEST * self._longest if runs else 0.0)
        second = fewest_jobs(others, 0 if runs else self._base_depth)
        if second is None:
            second, late = fewest_jobs(others, self._base_depth), _LATE_BUSY * late
        if second is None:
            return None
        return second, max(0.0, holders[0].since + late - time.monotonic())

    def _lost_with(self, worker: WorkerHandle) -> list[int]:
        others = [other for other in self._workers if other is not worker and not other.is_silent]
        held = {ticket for other in others for ticket in other.tickets} | {*self._waiting}
        return [ticket for ticket in super()._lost_with(worker) if ticket not in held]

    def _put_in_place(self, worker: WorkerHandle) -> str:
        if not isinstance(worker, RemoteHandle):
            return super()._put_in_place(worker)
        self._forget(worker)
        return "others do its work"

    def _forget(self, worker: RemoteHandle) -> None:
        if worker in self._workers:
            self._workers.remove(worker)
        self._source.left(worker)
