"""Pool of workers that run jobs: processes, or threads. Workers may die.

A worker keeps no shard, no buffer and no position. It gets a job, sends back a batch, and forgets both. So the batches
do not depend on which worker runs a job, on the number of workers, or on the death of a worker: its job is run again.
A worker that hangs is treated like one that died, if the user asks for it.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import select
import time
from collections import deque
from multiprocessing.util import Finalize

from energon_lite.errors import UsageError, WorkerError, listed
from energon_lite.loading.executors.executor import Executor, Load, PoolOptions, WorkSeconds
from energon_lite.loading.executors.transport import raise_unpicklable
from energon_lite.loading.executors.worker_handle import (
    ProcessHandle,
    ThreadHandle,
    WorkerHandle,
    end_workers,
    fewest_jobs,
    kill_workers,
)
from energon_lite.loading.makers.batch_runner import Job
from energon_lite.loading.makers.hook_errors import raise_of_worker
from energon_lite.loading.makers.job_runner import JobRunner
from energon_lite.loading.makers.observers import note_transfer
from energon_lite.loading.makers.outcomes import Failure, Result

logger = logging.getLogger(__name__)

#: Number of dead or hung workers in one job after which it is not run again.
MAX_DEATHS = 3
#: Jobs that a worker has at least: one running, one waiting. There are no more until the size of a result is known.
_DEPTH = 2
# To wake a sleeping process takes longer than to copy a small batch, so workers get several very short jobs.
#: Very short jobs that a worker has at most.
_MAX_DEPTH = 16
#: Bytes that the results of these jobs have together, at most.
_SMALL_RESULTS = 1 << 20
#: Seconds that these jobs take together, at most.
_WORTH_WAKING = 4e-3
#: Results that a worker can have in shared memory in addition to those that wait for their turn.
_WITH_USER = 4
#: Seconds that workers have to finish their job when the pool is closed.
_LEAVE = 2.0
#: Most additional jobs to submit before their turn, for each usual one, where some jobs take long.
_MOST_AHEAD = 16
#: Share of these additional jobs that each result leaves.
_LEFT = 0.999
#: Assumed seconds of a job while none has been measured: the first jobs, and those after a death, are sent one by one.
_UNKNOWN = 1.0


class WorkerPool(Executor):
    """Executor that runs jobs in worker processes, or in threads.

    An interrupt of a call (Ctrl-C may come between any two steps, also in the middle of a message) leaves the pool
    marked as incomplete: :meth:`cancel` then starts new workers.

    Args:
        runner: runner of a job; each worker has a copy of it.
        num_workers: number of processes, or of threads.
        options: options for starting, watching and limiting the workers; None: the defaults.
        work: record of the workers' time.
    """

    def __init__(
        self,
        runner: JobRunner,
        num_workers: int,
        options: PoolOptions | None = None,
        work: WorkSeconds | None = None,
    ):
        self._runner = runner
        self._options = options or PoolOptions()
        self._work = work or WorkSeconds()
        self._sizes: dict[int, int] = {}  # bytes of the results that wait for their turn
        self._largest = 0
        self._seconds = _UNKNOWN  # moving average of the seconds of a job
        self._poll = select.poll()
        method = self._options.start_method
        if num_workers and method != "thread" and multiprocessing.current_process().daemon:
            raise UsageError(
                "worker processes of a process that is a daemon (daemon=True, or of a multiprocessing.Pool): Python "
                "lets it have none",
                fix="give the loader start_method='thread', or its WorkerConfig num_workers=0; or start this process "
                "with daemon=False",
            )
        self._tickets = 0
        self._waiting: deque[int] = deque()  # submitted, not sent
        self._jobs: dict[int, Job] = {}  # submitted, not answered
        self._done: dict[int, Result | BaseException] = {}
        self._deaths: dict[int, float] = {}
        self._awaited = 0  # the ticket whose result is requested
        self._more = 0.0  # additional jobs to submit before their turn, because workers were idle during a long one
        self.total_deaths = 0
        self._closing = False
        self._workers: list[WorkerHandle] = []
        # Workers end when the pool is deleted, and when this process ends: multiprocessing, which then waits for all
        # processes, runs this finalizer before, whatever was imported first.
        self._owner = os.getpid()
        self._end = Finalize(self, end_workers, (self._workers, _LEAVE), exitpriority=10)
        self._whole = False  # no call is running, and none was interrupted
        self._num_workers = num_workers
        for number in range(num_workers):
            self._start(number)
        self._whole = True

    @property
    def _is_open(self) -> bool:
        """True if the pool is neither closed nor being closed."""
        return not self._closing and self._end.still_active()

    def _begin(self) -> None:
        """Begin a call that needs the workers."""
        if os.getpid() != self._owner:
            raise UsageError(
                "a loader is used in a process that was forked after its workers were started: they answer to the "
                "process that started them",
                fix="make a loader in the new process, and restore its state there",
            )
        self._whole = False

    def submit(self, job: Job) -> int:
        self._begin()
        self._tickets += 1
        self._jobs[self._tickets] = job
        self._waiting.append(self._tickets)
        if self._depth <= self._base_depth or not all(worker.tickets for worker in self._workers):
            self._dispatch()  # otherwise a request for a result sends many jobs together
        self._whole = True
        return self._tickets

    def result(self, ticket: int) -> Result:
        self._begin()
        limit = self._options.watchdog_seconds
        deadline = None if limit is None else time.monotonic() + limit
        self._awaited = ticket
        if ticket in self._waiting:
            self._waiting.remove(ticket)
            self._waiting.appendleft(ticket)
        self._dispatch()
        began, usual, is_idle = time.monotonic(), self._seconds, False
        try:
            while ticket not in self._done:
                if self._closing:  # close() sets this first; then it closes the pipes, which wakes this thread
                    raise OSError("the pool is closed")
                is_idle = is_idle or (not self._waiting and not all(worker.tickets for worker in self._workers))
                timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
                if not self._collect(timeout) and deadline is not None and time.monotonic() >= deadline:
                    deadline = self._too_slow(ticket)
                self._dispatch()
        except OSError:
            if self._is_open:
                raise
            raise WorkerError("the loader was closed while another thread waited for a batch") from None
        self._more *= _LEFT
        if is_idle:
            self._more += (time.monotonic() - began) / usual * len(self._workers)
        outcome = self._done.pop(ticket)
        self._sizes.pop(ticket, None)
        self._whole = True
        if isinstance(outcome, BaseException):
            raise_of_worker(outcome)
        return outcome

    def load(self, alone: bool = True) -> Load:
        if alone and self._whole and os.getpid() == self._owner:
            self._whole = False
            while self._collect(0.0):
                pass  # only take answers that have come; this must not start any work
            self._whole = True
        return Load(len(self._done), len(self._jobs), sum(self._sizes.values()))

    def ahead(self, jobs: int) -> int:
        depth = self._depth
        self._more = min(self._more, _MOST_AHEAD * jobs)
        return max(jobs + int(self._more), 0 if depth <= self._base_depth else 2 * depth * len(self._workers))

    def cancel(self) -> None:
        # Jobs that were sent are finished; their results are dropped when they come, because their tickets are unknown.
        for forgotten in (self._waiting, self._jobs, self._done, self._sizes, self._deaths):
            forgotten.clear()
        if not self._whole and self._is_open:
            end_workers(self._workers, 0.0)
            self._poll = select.poll()
            for number in range(self._num_workers):
                self._start(number)
            self._whole = True

    def close(self) -> None:
        if not self._end.still_active() or os.getpid() != self._owner:  # a forked trainer must not touch the workers
            return
        self._closing = True
        end_workers(self._workers, _LEAVE)
        self._end.cancel()
        self.cancel()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _start(self, number: int) -> None:
        """Start a worker. It is stored before it is started, so that it is known even after an interrupt."""
        method = self._options.start_method
        work = number, self._runner, self._options.trace, self._num_workers
        segments = self._base_depth + _WITH_USER
        worker = ThreadHandle(*work) if method == "thread" else ProcessHandle(method, segments, *work)
        self._workers[number : number + 1] = [worker]
        try:
            worker.start()
        except (AttributeError, TypeError, ValueError, RecursionError, pickle.PicklingError) as error:
            if method in ("spawn", "forkserver"):
                raise_unpicklable(self._runner.encoder, method, error)
            raise
        for handle in worker.handles:
            self._poll.register(handle, select.POLLIN)

    @property
    def _base_depth(self) -> int:
        """Jobs that a worker has at the same time, unless they are tiny."""
        return max(_DEPTH, self._options.prefetch_factor)

    @property
    def _depth(self) -> int:
        """Jobs that a worker may have now: more if they take less time than to wake the worker."""
        small = _SMALL_RESULTS // (1 + self._largest * len(self._workers))
        short = _MAX_DEPTH if self._seconds * _MAX_DEPTH <= _WORTH_WAKING else int(_WORTH_WAKING / self._seconds)
        return max(self._base_depth if self._largest else _DEPTH, min(short, small))

    def _dispatch(self) -> None:
        """Send waiting jobs, each to the worker with the fewest jobs."""
        while self._waiting:
            depth = self._depth
            together = depth > self._base_depth
            worker = self._free_worker(depth // 2 if together else depth - 1)
            if worker is None:
                return
            tickets = self._next_jobs(depth - len(worker.tickets) if together else 1)
            if not tickets:
                return
            self._send(worker, tickets)

    def _free_worker(self, most: int) -> WorkerHandle | None:
        """Return the worker for the next job, the one with the fewest, at most ``most``; None: there is none."""
        return fewest_jobs(self._workers, most)

    def _next_jobs(self, wanted: int) -> list[int]:
        """Take the tickets to be sent together from the waiting ones. A job in which a worker died is sent alone."""
        tickets: list[int] = []
        while self._waiting and len(tickets) < wanted and self._has_room(self._waiting[0], len(tickets)):
            if tickets and self._waiting[0] in self._deaths:
                break
            tickets.append(self._waiting.popleft())
            if tickets[0] in self._deaths:
                break
        return tickets

    def _send(self, worker: WorkerHandle, tickets: list[int]) -> None:
        """Send jobs; if the worker is dead, they wait again, and the worker is replaced."""
        jobs = [(ticket, self._jobs[ticket]) for ticket in tickets]
        worker.since = worker.since if worker.tickets else time.monotonic()
        worker.together = len(tickets) > 1 or (worker.together and bool(worker.tickets))
        worker.tickets.extend(tickets)
        try:
            worker.channel.send(jobs, noted=tickets[0] in self._deaths)
            self._watch(worker)
        except OSError:
            self._replace(worker)

    def _watch(self, worker: WorkerHandle) -> None:
        """Poll for answers, and for space in a pipe that was full."""
        self._poll.modify(worker.channel.fileno(), select.POLLIN | (select.POLLOUT if worker.channel.is_full else 0))

    def _has_room(self, ticket: int, taken: int) -> bool:
        """Return whether there is memory for the result of one more job, after the running ones and ``taken`` ones."""
        at_work = sum(len(worker.tickets) for worker in self._workers if not worker.is_silent) + taken
        needed = not at_work and (ticket == self._awaited or not self._done)
        expected = sum(self._sizes.values()) + (at_work + 1) * self._largest
        return needed or expected <= self._options.max_bytes_in_flight

    def _collect(self, timeout: float | None) -> bool:
        """Wait for an event and take the answers that have come; return False if the time ran out."""
        events = dict(self._poll.poll(None if timeout is None else 1000 * timeout))
        for worker in list(self._workers):
            event = events.get(worker.channel.fileno(), 0)
            try:
                if event & select.POLLOUT:
                    worker.channel.flush()
                    self._watch(worker)
                if event & ~select.POLLOUT:
                    self._take_answers(worker)
                elif events.keys() & worker.handles[1:]:  # answers sent before its end are taken first
                    self._replace(worker)
            except (EOFError, OSError):
                self._replace(worker)
        return bool(events)

    def _take_answers(self, worker: WorkerHandle) -> None:
        began = worker.since = time.monotonic()
        while (received := worker.channel.receive()) is not None:
            (answers, seconds, said), size = received
            before = worker.since
            worker.since = time.monotonic()
            self._work.received += worker.since - before
            if not answers:
                log = self._runner.services.failures
                if log is not None:
                    log.tell(seconds) if isinstance(seconds, Failure) else log.add_fallbacks(seconds)
                continue
            for times in said:
                self._work.add(times)
            self._work.busy += seconds
            size = size // len(answers)
            seconds = seconds / len(answers)
            for ticket, ok, value in answers:
                self._seconds += 0.2 * (seconds - self._seconds)
                worker.tickets.remove(ticket)
                self._deaths.pop(ticket, None)
                if self._jobs.pop(ticket, None) is None:
                    continue
                outcome = Result(*value) if ok else value
                if self._options.trace and self._options.start_method != "thread" and isinstance(outcome, Result):
                    note_transfer(outcome, began, worker.since)
                self._done[ticket] = outcome
                self._sizes[ticket] = size
                self._largest = max(size, self._largest - (self._largest >> 4))  # decays, so old results are forgotten

    def _replace(self, worker: WorkerHandle, *, hung: bool = False) -> None:
        """Replace a worker that died, or kill and replace one that hangs, and run its jobs again."""
        kill_workers([worker], 0.0 if hung else 1.0)
        end = "was stuck" if hung else worker.end_text()
        self.total_deaths += 1
        self._seconds = _UNKNOWN
        lost = self._lost_with(worker)
        if worker.together and len(lost) > 1 and lost[0] not in self._deaths:
            self._deaths.update(dict.fromkeys(lost, 0))  # it is not known which one failed; each is sent alone now
        elif lost:
            running = lost[0]
            self._deaths[running] = self._deaths.get(running, 0) + worker.blame
            if self._deaths[running] >= MAX_DEATHS:
                self._done[running] = self._gave_up(self._jobs.pop(running), worker, end)
                lost.remove(running)
        for handle in worker.handles:
            self._poll.unregister(handle)
        self._waiting.extendleft(reversed(lost))
        worker.close()
        logger.warning("%s %s; %s, and %d of its jobs run again", worker, end, self._put_in_place(worker), len(lost))

    def _lost_with(self, worker: WorkerHandle) -> list[int]:
        """Return the tickets of the jobs that have to run again if a worker has ended."""
        return [ticket for ticket in worker.tickets if ticket in self._jobs]

    def _put_in_place(self, worker: WorkerHandle) -> str:
        """Start a worker in place of one that has ended; return a text on that."""
        self._start(worker.number)
        return "it is replaced"

    def _gave_up(self, job: Job, worker: WorkerHandle, end: str) -> WorkerError:
        names = [f"{self._runner.leaves[address[0]].name}[{address[1]}]" for address in job.addresses]
        step = worker.last_step()
        return WorkerError(
            f"{MAX_DEATHS} workers died while making the same micro-batch; the last one {end}"
            + (f" in {step}" if step else ""),
            where=f"micro-batch {job.number} of pass {job.pass_number}: samples {listed(names)}",
            fix="look for a crash or for too much memory in the decoding or the hooks of these samples; "
            "restore_sample makes the same batch in this process",
        )

    def _too_slow(self, ticket: int) -> float | None:
        """Handle a result that is overdue. Return the time of the next check; None: no further check."""
        limit = self._options.watchdog_seconds
        assert limit is not None
        now = time.monotonic()
        owner = next((worker for worker in self._workers if ticket in worker.tickets), None)
        hung = [worker for worker in self._workers if worker.tickets and worker.busy_seconds(now) >= limit]
        job = self._jobs.get(ticket)
        what = f"a micro-batch has been waited for longer than {limit:g} s ({owner or 'no worker has begun it'})"
        number = "?" if job is None else job.number
        suspects = hung or ([] if owner is None else [owner])
        stacks = "".join(f"\n{suspect}:\n{suspect.stacks()}" for suspect in suspects)
        match self._options.on_timeout:
            case "raise":
                raise WorkerError(
                    what + stacks,
                    where=f"micro-batch {number}",
                    fix="see what the worker does there; raise watchdog_timeout_seconds if this is normal",
                )
            case "replace":
                logger.warning("%s: micro-batch %s%s", what, number, stacks)
                for worker in hung:
                    self._replace(worker, hung=True)
                return time.monotonic() + limit
        logger.warning("%s: micro-batch %s; still waiting%s", what, number, stacks)
        return None
