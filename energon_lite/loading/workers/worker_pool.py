"""Worker processes that run jobs, and may die.

A worker owns nothing: no shard, no buffer, no position. It gets a job, sends back a batch, and forgets both. Therefore
which worker runs a job, how many there are, and whether one dies half-way cannot change a batch: the job is run again.
One that hangs is as good as dead, if the user says so.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import select
import signal
import time
import weakref
from collections import deque
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from energon_lite.errors import WorkerError
from energon_lite.loading.jobs.pipeline import Job, Pipeline, Result
from energon_lite.loading.jobs.stage_timer import note_transfer
from energon_lite.loading.workers.executor import Load
from energon_lite.loading.workers.observation import Notes
from energon_lite.loading.workers.pool_options import PoolOptions
from energon_lite.loading.workers.segments import SegmentReader, Segments
from energon_lite.loading.workers.transport import pack, receive, send
from energon_lite.loading.workers.worker_process import STOP_SIGNALS, Request, serve

__all__ = ["WorkerPool"]

logger = logging.getLogger(__name__)

#: A job during which so many workers died, or hung, is not tried again.
MAX_DEATHS = 3
#: A worker that has not begun to work after so long hangs, too. It imports torch and the user's modules, maybe slowly.
_START_SECONDS = 120.0
#: Jobs that a worker has: one to work on, one to go on with. Of very short ones so many at most, that give results of
#: so many bytes, as many as take so many seconds: to wake a sleeping process up takes longer than to copy such a batch.
_DEPTH, _MAX_DEPTH, _SMALL_RESULTS, _WORTH_WAKING = 2, 16, 1 << 20, 4e-3
#: Seconds that a job may take as long as nobody knows better: the first ones, and those after a death, go one by one.
_UNKNOWN = 1.0
#: Jobs larger than this (in bytes) are sent to idle workers only, so that both sides never wait to be read.
_SMALL_JOB = 32 << 10

# The trainer's ends of all pipes, and its views of all segments. A forked worker inherits them and closes them at once:
# as long as anyone else holds such an end, a worker would not notice that its trainer is gone.
_trainer_ends: weakref.WeakSet[Connection | SegmentReader] = weakref.WeakSet()


@dataclass(eq=False)
class _Worker:
    number: int
    process: BaseProcess
    connection: Connection
    segments: SegmentReader
    notes: Notes
    tickets: deque[int] = field(default_factory=deque)  # jobs sent and not answered, oldest first
    together: bool = False  # some of them were sent at once, so that it is not known which one it works on
    since: float = 0.0  # when it began the oldest of them, or later

    @property
    def pid(self) -> int:
        return self.process.pid or 0

    def busy_seconds(self, now: float) -> float:
        """How long it has been at its oldest job; its own start does not count, unless that takes very long."""
        began = self.notes.began()
        return now - self.since - _START_SECONDS if began is None else now - max(self.since, began)

    def dismiss(self) -> None:
        """Tell it to leave."""
        self.notes.dismiss()
        self.close()

    def close(self) -> None:
        """Let go of the pipe and of the memory."""
        self.connection.close()
        self.segments.close()
        self.notes.close()


class WorkerPool:
    """Runs jobs in worker processes.

    Args:
        pipeline: what runs a job; it is copied into each worker.
        num_workers: number of processes.
        options: how they are started, watched and bounded; None: the defaults.
    """

    def __init__(self, pipeline: Pipeline, num_workers: int, options: PoolOptions | None = None):
        self._pipeline, self._options = pipeline, options or PoolOptions()
        self._sizes: dict[int, int] = {}  # of results that wait for their turn
        self._largest = 0
        self._seconds = _UNKNOWN  # that a job takes, lately
        self._poll = select.poll()
        self._context = multiprocessing.get_context(self._options.start_method)
        if self._options.start_method == "forkserver":
            # The server imports torch once; else each worker, and each replacement, would do it for itself.
            self._context.set_forkserver_preload(["__main__", serve.__module__, "torch"])
        self._tickets = 0
        self._waiting: deque[int] = deque()  # submitted, not sent
        self._jobs: dict[int, Job] = {}  # submitted, not answered
        self._done: dict[int, Result | BaseException] = {}
        self._deaths: dict[int, int] = {}
        self._awaited = 0  # the ticket that somebody waits for
        self.total_deaths = 0
        self._closed = False
        self._owner = os.getpid()
        self._workers = [self._start(number) for number in range(num_workers)]

    def submit(self, job: Job) -> int:
        self._tickets += 1
        self._jobs[self._tickets] = job
        self._waiting.append(self._tickets)
        if self._depth == _DEPTH or not all(worker.tickets for worker in self._workers):
            self._dispatch()  # else many are sent together, when a result is asked for
        return self._tickets

    def result(self, ticket: int) -> Result:
        limit = self._options.watchdog_seconds
        deadline = None if limit is None else time.monotonic() + limit
        self._awaited = ticket
        if ticket in self._waiting and self._waiting[0] != ticket:
            self._waiting.remove(ticket)
            self._waiting.appendleft(ticket)
        self._dispatch()
        while ticket not in self._done:
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._collect(timeout) and deadline is not None and time.monotonic() >= deadline:
                deadline = self._too_slow(ticket)
            self._dispatch()
        outcome = self._done.pop(ticket)
        self._sizes.pop(ticket, None)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def load(self) -> Load:
        while self._collect(0.0):
            pass  # answers that have come are taken; to look must not begin any work
        return Load(len(self._done), len(self._jobs), sum(self._sizes.values()))

    def ahead(self, jobs: int) -> int:
        return jobs if self._depth == _DEPTH else max(jobs, 2 * self._depth * len(self._workers))

    def cancel(self) -> None:
        # Jobs already sent are run to their end; their results are dropped when they come, because no one knows them.
        self._waiting.clear()
        self._jobs.clear()
        self._done.clear()
        self._sizes.clear()
        self._deaths.clear()

    def close(self) -> None:
        if self._closed or os.getpid() != self._owner:  # a forked copy of the trainer must not touch its workers
            return
        self._closed = True
        for worker in self._workers:
            worker.dismiss()
        deadline = time.monotonic() + 2.0
        for worker in self._workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.is_alive():  # in the middle of a long job
                worker.process.kill()
                worker.process.join()
        self.cancel()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _start(self, number: int) -> _Worker:
        ours, theirs = self._context.Pipe(duplex=True)
        segments, notes = Segments(), Notes()
        reader = SegmentReader(segments)
        forked = self._context.get_start_method() == "fork"
        inherited = [*_trainer_ends, ours] if forked else []
        _trainer_ends.update((ours, reader))
        process = self._context.Process(  # type: ignore[attr-defined]
            target=serve,
            args=(theirs, segments, notes, self._pipeline, os.getpid(), inherited, self._options.trace),
            name=f"energon-lite-worker-{number}",
            daemon=True,
        )
        # Until it ignores them, which takes a moment, signals wait.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        worker = _Worker(number, process, ours, reader, notes)
        for handle in (ours.fileno(), process.sentinel):
            self._poll.register(handle, select.POLLIN)
        return worker

    def _forget(self, worker: _Worker) -> None:
        for handle in (worker.connection.fileno(), worker.process.sentinel):
            self._poll.unregister(handle)
        worker.close()

    @property
    def _depth(self) -> int:
        """Jobs that a worker may have: one to work on and one to go on with; more where waking it up costs more."""
        small = _SMALL_RESULTS // (1 + self._largest * len(self._workers))
        short = _MAX_DEPTH if self._seconds * _MAX_DEPTH <= _WORTH_WAKING else int(_WORTH_WAKING / self._seconds)
        return max(_DEPTH, min(short, small))

    def _dispatch(self) -> None:
        """Send waiting jobs, to idle workers first."""
        depth = self._depth
        for most in (0, depth // 2):
            for worker in self._workers:
                if self._waiting and len(worker.tickets) <= most:
                    wanted = 1 if depth == _DEPTH else depth - len(worker.tickets)
                    if not self._send(worker, self._next_jobs(wanted)):
                        return self._dispatch()  # the jobs wait again, and there is another worker in its place

    def _next_jobs(self, wanted: int) -> list[int]:
        """Tickets that are sent together, taken from those that wait. One in which a worker died goes alone."""
        found: list[int] = []
        while self._waiting and len(found) < wanted and self._has_room(self._waiting[0], len(found)):
            if found and self._waiting[0] in self._deaths:
                break
            found.append(self._waiting.popleft())
            if found[0] in self._deaths:
                break
        return found

    def _send(self, worker: _Worker, tickets: list[int]) -> bool:
        """Send jobs, if there are any and they are not too large for a worker that is busy. False: it is dead."""
        while tickets:
            jobs = [(ticket, self._jobs[ticket]) for ticket in tickets]
            request = Request(jobs, worker.segments.take_released(), tickets[0] in self._deaths)
            message = pack((request.jobs, request.released, request.observe))
            if message.size <= _SMALL_JOB or (len(tickets) == 1 and not worker.tickets):
                break
            self._waiting.extendleft(reversed(tickets[1:] or tickets))
            worker.segments.put_back(request.released)
            tickets = tickets[:1] if len(tickets) > 1 else []
        if not tickets:
            return True
        worker.since = worker.since if worker.tickets else time.monotonic()
        worker.together = len(tickets) > 1 or (worker.together and bool(worker.tickets))
        worker.tickets.extend(tickets)
        try:
            send(worker.connection, message)
        except OSError:
            self._replace(worker)
            return False
        return True

    def _has_room(self, ticket: int, taken: int) -> bool:
        """Whether the result of one more job may be expected, beside those at work and ``taken`` ones."""
        at_work = sum(len(worker.tickets) for worker in self._workers) + taken
        needed = not at_work and (ticket == self._awaited or not self._done)
        expected = sum(self._sizes.values()) + (at_work + 1) * self._largest
        return needed or expected <= self._options.max_bytes_in_flight

    def _collect(self, timeout: float | None) -> bool:
        """Wait for something to happen; take an answer of each worker that has one. False: nothing happened in time."""
        events = self._poll.poll(None if timeout is None else 1000 * timeout)
        handles = [handle for handle, _ in events]
        for worker in [worker for worker in self._workers if worker.connection.fileno() in handles]:
            try:
                self._take_answer(worker)
            except (EOFError, OSError):
                self._replace(worker)
        for worker in [worker for worker in self._workers if worker.process.sentinel in handles]:
            if not worker.connection.poll():  # what it said before its end is heard first
                self._replace(worker)
        return bool(handles)

    def _take_answer(self, worker: _Worker) -> None:
        began = time.monotonic()
        (answers, seconds), size = receive(worker.connection, worker.segments)
        size, seconds = size // len(answers), seconds / len(answers)
        for _ in answers:
            self._seconds += 0.2 * (seconds - self._seconds)
        worker.since = time.monotonic()
        for ticket, ok, value in answers:
            worker.tickets.remove(ticket)
            self._deaths.pop(ticket, None)
            if self._jobs.pop(ticket, None) is None:
                continue
            outcome = Result(*value) if ok else value
            if self._options.trace and isinstance(outcome, Result):
                note_transfer(outcome, began, worker.since)
            self._done[ticket] = outcome
            self._sizes[ticket] = size
            self._largest = max(size, self._largest - (self._largest >> 4))  # forgets what was long ago

    def _replace(self, worker: _Worker, *, hung: bool = False) -> None:
        """A worker died, or is killed because it hangs: start another one and run its jobs again."""
        if hung:
            worker.process.kill()
        worker.process.join(1.0)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
        end = "was stuck" if hung else f"ended with {_exit_text(worker.process.exitcode)}"
        self.total_deaths += 1
        self._seconds = _UNKNOWN
        lost = [ticket for ticket in worker.tickets if ticket in self._jobs]
        if worker.together and len(lost) > 1 and lost[0] not in self._deaths:
            self._deaths.update(dict.fromkeys(lost, 0))  # nobody knows which it was; each goes alone from now on
        elif lost:
            running = lost[0]
            self._deaths[running] = self._deaths.get(running, 0) + 1
            if self._deaths[running] >= MAX_DEATHS:
                self._done[running] = self._gave_up(self._jobs.pop(running), worker, end)
                lost.remove(running)
        self._forget(worker)
        self._waiting.extendleft(reversed(lost))
        logger.warning(
            "worker %d (pid %s) %s; it is replaced, and %d of its jobs run again",
            worker.number,
            worker.pid,
            end,
            len(lost),
        )
        self._workers[self._workers.index(worker)] = self._start(worker.number)

    def _gave_up(self, job: Job, worker: _Worker, end: str) -> WorkerError:
        names = [f"{self._pipeline.leaves[one[0]].name}[{one[1]}]" for one in job.addresses]
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        step = worker.notes.last_step()
        return WorkerError(
            f"{MAX_DEATHS} workers died while making the same micro-batch; the last one {end}"
            + (f" in {step}" if step else ""),
            where=f"micro-batch {job.number} of pass {job.pass_number}: samples {shown}",
            fix="look for a crash or for too much memory in the decoding or the hooks of these samples; "
            "restore_sample makes the same batch in this process",
        )

    def _too_slow(self, ticket: int) -> float | None:
        """A result was waited for too long. Returns when to look again; None: not for this one."""
        limit = self._options.watchdog_seconds
        assert limit is not None
        now = time.monotonic()
        owner = next((worker for worker in self._workers if ticket in worker.tickets), None)
        hung = [worker for worker in self._workers if worker.tickets and worker.busy_seconds(now) >= limit]
        job = self._jobs.get(ticket)
        at = f"worker {owner.number} (pid {owner.pid})" if owner is not None else "no worker has begun it"
        what = f"a micro-batch has been waited for longer than {limit:g} s ({at})"
        number = "?" if job is None else job.number
        suspects = hung or ([] if owner is None else [owner])
        stacks = "".join(f"\nworker {one.number} (pid {one.pid}):\n{one.notes.stacks(one.pid)}" for one in suspects)
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


def _exit_text(code: int | None) -> str:
    if code is None:
        return "an unknown status"
    if code < 0:
        try:
            return signal.Signals(-code).name
        except ValueError:
            return f"signal {-code}"
    return f"exit code {code}"
