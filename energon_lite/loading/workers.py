"""Who runs the jobs: this process, or worker processes that may die.

A worker owns nothing: no shard, no buffer, no position. It gets a job, sends back a batch, and forgets both. Therefore
which worker runs a job, how many there are, and whether one dies half-way cannot change a batch: the job is run again.

Workers ignore SIGINT and SIGTERM (the trainer decides when to stop, and may want to save first) and leave when they are
told to, when their pipe closes, or when their parent is gone.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import select
import shutil
import signal
import sys
import time
import traceback
import weakref
from collections import deque
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import NamedTuple, Protocol

from energon_lite.errors import EnergonLiteError, FatalSampleError, WorkerError
from energon_lite.loading.pipeline import Job, Pipeline, Result
from energon_lite.loading.segments import SegmentReader, Segments, SegmentWriter
from energon_lite.loading.transport import Message, pack, receive, send

__all__ = ["Executor", "InlineExecutor", "Load", "WorkerPool"]

logger = logging.getLogger(__name__)

#: A job during which so many workers died is not tried again.
MAX_DEATHS = 3
#: Jobs larger than this (in bytes) are sent to idle workers only, so that both sides never wait to be read.
_SMALL_JOB = 32 << 10
#: Bytes of results that may wait for their turn, unless the user says otherwise.
DEFAULT_BYTES_IN_FLIGHT = 1 << 30
#: Seconds between two looks at whether the parent is still there.
_PARENT_CHECK = 2.0

# The trainer's ends of all pipes, and its views of all segments. A forked worker inherits them and closes them at once:
# as long as anyone else holds such an end, a worker would not notice that its trainer is gone.
_trainer_ends: weakref.WeakSet[Connection | SegmentReader] = weakref.WeakSet()


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

    def cancel(self) -> None:
        """Forget all jobs whose results were not asked for."""

    def close(self) -> None:
        """Let go of everything; may be called twice."""


class InlineExecutor:
    """Runs each job in this process, when its result is asked for."""

    def __init__(self, pipeline: Pipeline):
        self._pipeline = pipeline
        self._jobs: dict[int, Job] = {}
        self._tickets = 0

    def submit(self, job: Job) -> int:
        self._tickets += 1
        self._jobs[self._tickets] = job
        return self._tickets

    def result(self, ticket: int) -> Result:
        return self._pipeline.run(self._jobs.pop(ticket))

    def load(self) -> Load:
        return Load(pending=len(self._jobs))

    def cancel(self) -> None:
        self._jobs.clear()

    def close(self) -> None:
        self._jobs.clear()


@dataclass(eq=False)
class _Worker:
    number: int
    process: BaseProcess
    connection: Connection
    segments: SegmentReader
    tickets: deque[int] = field(default_factory=deque)  # jobs sent and not answered, oldest first

    def close(self) -> None:
        """Let go of the pipe and of the segments."""
        self.connection.close()
        self.segments.close()


class WorkerPool:
    """Runs jobs in worker processes.

    Args:
        pipeline: what runs a job; it is copied into each worker.
        num_workers: number of processes.
        start_method: ``fork``, ``forkserver`` or ``spawn``; the latter two need a pipeline (and hooks) that can be
            pickled.
        watchdog_seconds: warn when one job takes longer; None: never.
        fail_on_timeout: raise instead.
        max_bytes_in_flight: no further job is begun while the results that wait for their turn, and those that are
            expected of the jobs at work, are larger than this. One job at a time is always at work.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        num_workers: int,
        *,
        start_method: str = "fork",
        watchdog_seconds: float | None = 60.0,
        fail_on_timeout: bool = False,
        max_bytes_in_flight: int = DEFAULT_BYTES_IN_FLIGHT,
    ):
        self._pipeline = pipeline
        self._max_bytes = max_bytes_in_flight
        self._sizes: dict[int, int] = {}  # of results that wait for their turn
        self._largest = 0
        self._poll = select.poll()
        self._context = multiprocessing.get_context(start_method)
        self._watchdog_seconds = watchdog_seconds
        self._fail_on_timeout = fail_on_timeout
        self._tickets = 0
        self._waiting: deque[int] = deque()  # submitted, not sent
        self._jobs: dict[int, Job] = {}  # submitted, not answered
        self._done: dict[int, Result | BaseException] = {}
        self._deaths: dict[int, int] = {}
        self.total_deaths = 0
        self._closed = False
        self._owner = os.getpid()
        self._workers = [self._start(number) for number in range(num_workers)]

    def submit(self, job: Job) -> int:
        self._tickets += 1
        self._jobs[self._tickets] = job
        self._waiting.append(self._tickets)
        self._dispatch()
        return self._tickets

    def result(self, ticket: int) -> Result:
        deadline = None if self._watchdog_seconds is None else time.monotonic() + self._watchdog_seconds
        while ticket not in self._done:
            self._dispatch()
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._collect(timeout) and deadline is not None and time.monotonic() >= deadline:
                self._report_slow(ticket)
                deadline = None
        outcome = self._done.pop(ticket)
        self._sizes.pop(ticket, None)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def load(self) -> Load:
        while self._collect(0.0):
            self._dispatch()
        return Load(len(self._done), len(self._jobs), sum(self._sizes.values()))

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
            worker.close()
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
        segments = Segments()
        reader = SegmentReader(segments)
        forked = self._context.get_start_method() == "fork"
        inherited = [*_trainer_ends, ours] if forked else []
        _trainer_ends.update((ours, reader))
        process = self._context.Process(  # type: ignore[attr-defined]
            target=_serve,
            args=(theirs, segments, self._pipeline, os.getpid(), inherited),
            name=f"energon-lite-worker-{number}",
            daemon=True,
        )
        process.start()
        theirs.close()
        worker = _Worker(number, process, ours, reader)
        for handle in (ours.fileno(), process.sentinel):
            self._poll.register(handle, select.POLLIN)
        return worker

    def _forget(self, worker: _Worker) -> None:
        for handle in (worker.connection.fileno(), worker.process.sentinel):
            self._poll.unregister(handle)
        worker.close()

    def _dispatch(self) -> None:
        """Send waiting jobs: each worker has one to work on and one to go on with."""
        for depth in (0, 1):
            for worker in self._workers:
                while self._waiting and len(worker.tickets) <= depth and self._has_room():
                    ticket = self._waiting[0]
                    message = pack((ticket, self._jobs[ticket], worker.segments.take_released()))
                    if worker.tickets and message.size > _SMALL_JOB:
                        break
                    self._waiting.popleft()
                    worker.tickets.append(ticket)
                    try:
                        send(worker.connection, message)
                    except OSError:
                        self._replace(worker)
                        return

    def _has_room(self) -> bool:
        """Whether the result of one more job may be awaited."""
        at_work = sum(len(worker.tickets) for worker in self._workers)
        return not at_work or sum(self._sizes.values()) + (at_work + 1) * self._largest <= self._max_bytes

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
        (ticket, ok, value), size = receive(worker.connection, worker.segments)
        worker.tickets.remove(ticket)
        if self._jobs.pop(ticket, None) is None:
            return
        self._done[ticket] = Result(*value) if ok else value
        self._sizes[ticket] = size
        self._largest = max(size, self._largest - (self._largest >> 4))  # forgets what was long ago

    def _replace(self, worker: _Worker) -> None:
        """A worker died: start another one and run its jobs again."""
        self._forget(worker)
        worker.process.join(1.0)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
        self.total_deaths += 1
        lost = [ticket for ticket in worker.tickets if ticket in self._jobs]
        if lost:
            running = lost[0]
            self._deaths[running] = self._deaths.get(running, 0) + 1
            if self._deaths[running] >= MAX_DEATHS:
                error = self._gave_up(self._jobs.pop(running), worker)
                self._done[running] = error
                lost.remove(running)
        self._waiting.extendleft(reversed(lost))
        logger.warning(
            "worker %d (pid %s) ended with %s; it is replaced, and %d of its jobs run again",
            worker.number,
            worker.process.pid,
            _exit_text(worker.process.exitcode),
            len(lost),
        )
        self._workers[self._workers.index(worker)] = self._start(worker.number)

    def _gave_up(self, job: Job, worker: _Worker) -> WorkerError:
        names = [f"{self._pipeline.leaves[leaf].name}[{index}]" for leaf, index, _ in job.addresses]
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        return WorkerError(
            f"{MAX_DEATHS} workers died while making the same micro-batch, the last one with "
            f"{_exit_text(worker.process.exitcode)}",
            where=f"micro-batch {job.number} of pass {job.pass_number}: samples {shown}",
            fix="look for a crash or for too much memory in the decoding or the hooks of these samples; "
            "restore_sample makes the same batch in this process",
        )

    def _report_slow(self, ticket: int) -> None:
        owner = next((worker for worker in self._workers if ticket in worker.tickets), None)
        job = self._jobs.get(ticket)
        at = f"worker {owner.number} (pid {owner.process.pid})" if owner is not None else "no worker has begun it"
        what = f"a micro-batch has been waited for longer than {self._watchdog_seconds:g} s ({at})"
        number = "?" if job is None else job.number
        if self._fail_on_timeout:
            raise WorkerError(
                what,
                where=f"micro-batch {number}",
                fix="look at the worker with py-spy dump; raise watchdog_timeout_seconds if this is normal",
            )
        logger.warning("%s: micro-batch %s; still waiting", what, number)


def _exit_text(code: int | None) -> str:
    if code is None:
        return "an unknown status"
    if code < 0:
        try:
            return signal.Signals(-code).name
        except ValueError:
            return f"signal {-code}"
    return f"exit code {code}"


# -- in the worker --------------------------------------------------------------------------------------------------


def _serve(
    connection: Connection,
    segments: Segments,
    pipeline: Pipeline,
    trainer: int,
    inherited: list[Connection | SegmentReader],
) -> None:
    """A worker's life: take a job, make the batch, send it."""
    for end in inherited:
        end.close()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    import torch

    torch.set_num_threads(1)
    try:
        writer = SegmentWriter(segments)
        poll = select.poll()
        poll.register(connection.fileno(), select.POLLIN)
        while _wait_for_job(poll, trainer):
            (ticket, job, released), _ = receive(connection)
            writer.release(released)
            send(connection, _run(pipeline, ticket, job), writer)
    except (EOFError, OSError):
        pass  # the trainer closed the pipe, or is gone
    _clean_up_after_trainer()
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip the interpreter's shutdown: it would run the trainer's exit handlers in a forked copy of it.
    os._exit(0)


def _wait_for_job(poll: select.poll, trainer: int) -> bool:
    while not poll.poll(1000 * _PARENT_CHECK):
        if not _is_there(trainer):
            return False
    return True


def _is_there(trainer: int) -> bool:
    if os.getppid() == trainer:
        return True
    parent = multiprocessing.parent_process()  # with forkserver the parent is the server, not the trainer
    return os.getppid() != 1 and parent is not None and parent.pid == trainer and parent.is_alive()


def _clean_up_after_trainer() -> None:
    """Remove the temporary folder in which multiprocessing keeps the socket of the fork server.

    The trainer does that itself, unless it was killed.
    """
    folder = multiprocessing.current_process()._config.get("tempdir")  # type: ignore[attr-defined]
    parent = multiprocessing.parent_process()
    if folder is None or parent is None:
        return
    parent.join(0.2)  # its pipes may close a moment before it is gone
    if not parent.is_alive():
        shutil.rmtree(folder, ignore_errors=True)


def _run(pipeline: Pipeline, ticket: int, job: Job) -> Message:
    try:
        result = pipeline.run(job)
        return pack((ticket, True, (result.batch, result.outcomes, result.tokens)))
    except BaseException as error:
        return _pack_error(ticket, error)


def _pack_error(ticket: int, error: BaseException) -> Message:
    """An error that can be sent: the exception itself if it survives pickling, else its text."""
    error.__cause__ = error.__context__ = None
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    if not isinstance(error, EnergonLiteError):
        logger.error("a worker ends the iteration:\n%s", text)
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = FatalSampleError(f"a worker failed with {type(error).__name__}: {error}\n{text}")
    return pack((ticket, False, error))
