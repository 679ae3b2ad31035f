"""Main loop of a worker process: take a job, make the batch, send it.

Workers ignore SIGINT and SIGTERM (the trainer decides when to stop, and may want to save first). They end when their
pipe is closed, or when their trainer has ended. On SIGUSR1 they write their stacks.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import multiprocessing
import os
import select
import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Protocol

from energon_lite.errors import FatalSampleError
from energon_lite.hooks import LendingScope
from energon_lite.loading.executors.segments import Segments, SegmentWriter, WorkerCrashLog
from energon_lite.loading.executors.transport import (
    Channel,
    Message,
    pack,
    receiving,
    send,
    unpack,
    unsendable,
)
from energon_lite.loading.makers.batch_runner import Job
from energon_lite.loading.makers.hook_errors import hook_traceback, shows_more
from energon_lite.loading.makers.job_runner import JobRunner
from energon_lite.loading.makers.observers import JobTimer, Observer, StageTimer, Times
from energon_lite.storage.files.shard_store import COUNTS
from energon_lite.worker_config import set_worker_number

logger = logging.getLogger(__name__)

# A fork copies the locks inside of file objects in their present state. If a thread of the parent is writing at that
# moment, the lock of its stream stays locked in the child for ever, and the first line that the child logs blocks it.
# (Python renews the locks of logging itself, but not those of the underlying streams.) The fix is a new file object on
# the same descriptor. It also drops the parent's unflushed data, which the parent will write.

#: The parent's file objects. If they were collected, they would write unflushed data and close the descriptor.
_left_behind: list[Any] = []


def renew_streams() -> None:
    """Give this process's standard streams and log handlers file objects of their own."""
    renewed: dict[int, Any] = {}
    sys.stdout = _renewed(sys.stdout, renewed)
    sys.stderr = _renewed(sys.stderr, renewed)
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    for handler in (handler for logger in loggers for handler in getattr(logger, "handlers", ())):
        if isinstance(handler, logging.StreamHandler) and "stream" in vars(handler):
            handler.stream = _renewed(handler.stream, renewed)


def _renewed(stream: Any, renewed: dict[int, Any]) -> Any:
    """Return a new file object for a stream's descriptor; the stream itself if it has none."""
    if id(stream) not in renewed:
        try:
            settings = {"encoding": stream.encoding, "errors": stream.errors}
            renewed[id(stream)] = open(stream.fileno(), "w", buffering=1, closefd=False, **settings)  # noqa: SIM115
            _left_behind.append(stream)
        except (AttributeError, OSError, ValueError):  # no stream, a closed one, or one in memory
            renewed[id(stream)] = stream
    return renewed[id(stream)]


# A worker between two jobs sees its pipe close. A worker in a hook that takes minutes, or never returns, does not look.

#: ``PR_SET_PDEATHSIG`` of Linux: sets the signal that a process gets when the thread that started it has ended.
_SET_PARENT_DEATH_SIGNAL = 1
#: Seconds between two checks for the trainer, on systems that cannot wait for a process.
_LOOK = 1.0


def end_with_trainer(trainer: int, *, by_kernel: bool) -> None:
    """End this process when the trainer process has ended.

    Args:
        trainer: process id of the trainer.
        by_kernel: the kernel may kill this process (see :func:`can_kernel_watch`), also while a hook holds Python's
            lock. Otherwise, or if this is not a child of the trainer, a thread waits for the trainer's end.
    """
    if by_kernel:
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if not by_kernel or os.getppid() != trainer:
        threading.Thread(target=_wait_and_end, args=(trainer,), name="energon-lite-parent-watch", daemon=True).start()


def can_kernel_watch(start_method: str) -> bool:
    """Return whether the kernel can end a process that the calling thread is about to start.

    The signal is sent when the *thread* that started the process ends, so that has to be the main thread. With a fork
    server it is the server's thread; the server ends shortly after its trainer, unless other processes use it, too.
    """
    in_main_thread = start_method == "forkserver" or threading.get_native_id() == os.getpid()
    return sys.platform == "linux" and in_main_thread


def _wait_and_end(trainer: int) -> None:
    try:
        ended = select.poll()
        ended.register(os.pidfd_open(trainer), select.POLLIN)
        ended.poll()
    except ProcessLookupError:
        pass
    except (AttributeError, OSError):  # not Linux, or forbidden
        while _is_there(trainer):
            time.sleep(_LOOK)
    os._exit(1)


def _is_there(trainer: int) -> bool:
    try:
        os.kill(trainer, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


#: Environment variable of a fork server that was started for loaders: the folder of its socket. The process that
#: started the server removes the folder when it ends, unless it is killed. The server ends shortly after that process
#: in any case, so it removes the folder, too.
SERVER_FOLDER = "ENERGON_LITE_FORK_SERVER_FOLDER"

if SERVER_FOLDER in os.environ:  # only in that server, which imports this module when it starts
    atexit.register(shutil.rmtree, os.environ.pop(SERVER_FOLDER), ignore_errors=True)

#: Signals that end a trainer, but not its workers.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
#: Seconds that answers are collected before they are sent together, at most.
_TOGETHER = 1e-3


#: A ticket, whether the job succeeded, and the parts of the result, or the error. In addition to answers, a worker
#: sends each failure immediately: a message without answers, with a Failure in place of the seconds. Fallbacks are sent
#: in the same way, before the answers of their jobs.
Answer = tuple[int, bool, Any]


def serve(
    connection: Connection,
    segments: Segments,
    notes: WorkerCrashLog,
    runner: JobRunner,
    trainer: int,
    by_kernel: bool,
    inherited: Sequence[Channel | Connection],
    trace: bool,
    peers: int,
) -> None:
    """Run the jobs of a worker process until its pipe is closed.

    Args:
        connection: connection to the trainer.
        segments: memory for large results.
        notes: memory that the trainer reads if this process dies, or hangs.
        runner: runner of a job.
        trainer: process id of the trainer.
        by_kernel: the kernel ends this process with the trainer.
        inherited: the trainer's ends of pipes, which a forked process inherits and must close.
        trace: time the stages of each batch.
        peers: number of workers of this rank.
    """
    for stop in STOP_SIGNALS:
        signal.signal(stop, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    if inherited:
        renew_streams()
    for end in inherited:
        end.close()
    end_with_trainer(trainer, by_kernel=by_kernel)
    notes.install()
    own_number = int(multiprocessing.current_process().name.rpartition("-")[2])
    begin(own_number, peers)
    observers: tuple[Observer, ...] = (StageTimer(runner.leaves, own_number),) if trace else ()
    try:
        run_jobs(_Pipe(connection, segments, runner), runner, observers, notes)
    except (EOFError, ConnectionError):
        code = 0  # the trainer closed the pipe, or has ended
    except Exception:
        logger.exception("a worker ends because of an error outside of its jobs")
        code = 1
    if runner.services.cache_pool is not None:
        runner.services.cache_pool.close()
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip the interpreter's shutdown: it would run the exit handlers that a fork copies from the trainer.
    os._exit(code)


#: Called in each worker when it begins, with the arguments of :func:`begin`; None: nothing is called.
on_begin: Callable[[int, int, bool], None] | None = None


def begin(number: int, peers: int, thread: bool = False) -> None:
    """Note that this process, or this thread, is a worker.

    Args:
        number: number of this worker.
        peers: number of workers of this rank.
        thread: the worker is this thread.
    """
    set_worker_number(number, thread=thread)
    if on_begin is not None:
        on_begin(number, peers, thread)


class TrainerEnd(Protocol):
    """A worker's end of the connection to its trainer: it takes jobs, and sends answers."""

    def next(self) -> tuple[Sequence[tuple[int, Job]], bool]:
        """Wait for jobs. Return them with their tickets, and whether to note each step before it begins, because a
        worker died, or hung, in these jobs before.

        Raises:
            EOFError, OSError: the trainer has closed the connection, or has ended.
        """

    def pack(self, obj: Any) -> Message:
        """Return the message of an object."""

    def unpack(self, memory: memoryview) -> Any:
        """Return the object of a message."""

    def send(self, message: Message) -> None:
        """Send a message.

        Raises:
            OSError: the trainer has closed the connection, or has ended.
        """


def run_jobs(
    end: TrainerEnd, runner: JobRunner, observers: tuple[Observer, ...] = (), notes: WorkerCrashLog | None = None
) -> None:
    """Run the jobs of a worker, until its end of the connection raises an error.

    Args:
        end: the worker's end of the connection.
        runner: runner of a job.
        observers: observers of all jobs.
        notes: a further observer of jobs in which a worker died, or hung.

    Raises:
        EOFError, OSError: the trainer has closed the connection, or has ended.
    """
    import torch

    torch.set_num_threads(1)
    services = runner.services
    log = services.failures
    if log is not None:
        services.failures = log = log.sending(lambda failure: end.send(end.pack(((), failure, ()))))
    LendingScope().__enter__()  # only hooks draw random numbers in this process, so the scope never ends
    COUNTS.take()  # drop the counts that the trainer had before the fork
    said = list[Times]()
    timer = JobTimer(said.append)
    while True:
        jobs, observe = end.next()
        services.observers = (*observers, notes) if observe and notes is not None else observers
        for message in _run(end, runner, jobs, timer, said):
            if log is not None and (fallbacks := log.take_fallbacks()):
                end.send(end.pack(((), fallbacks, ())))
            end.send(message)


class _Pipe:
    """A worker's end of its pipe. Slow storage is asked to fetch jobs as soon as they arrive."""

    def __init__(self, connection: Connection, segments: Segments, runner: JobRunner):
        self._connection = connection
        self._received = receiving(connection.fileno())
        self._writer = SegmentWriter(segments)
        self._runner = runner
        self._here: deque[tuple[Sequence[tuple[int, Job]], bool]] = deque()
        self.pack = pack
        self.unpack = unpack

    def next(self) -> tuple[Sequence[tuple[int, Job]], bool]:
        while not self._here or (self._runner.reads_ahead and self._connection.poll()):
            # The message also has the segments that the trainer has released.
            received = next(self._received)
            assert received is not None  # because the pipe blocks
            jobs, released, observe = received[0]
            self._writer.release(released)
            self._here.append((jobs, observe))
            if self._runner.reads_ahead and not observe:
                prefetch(self._runner, jobs)
        return self._here.popleft()

    def send(self, message: Message) -> None:
        send(self._connection, message, self._writer)


def prefetch(runner: JobRunner, jobs: Sequence[tuple[int, Job]]) -> None:
    """Ask slow storage to fetch the samples of jobs. Errors are left to the jobs, which will report them."""
    with suppress(Exception):
        for _, job in jobs:
            runner.prefetch(job.addresses)


def _run(
    end: TrainerEnd, runner: JobRunner, jobs: Sequence[tuple[int, Job]], timer: JobTimer, said: list[Times]
) -> Iterator[Message]:
    """Yield messages with answers. Very short jobs are answered together, because each message wakes the trainer.

    Args:
        timer: timer of some of the jobs.
        said: times reported by the timer; they are sent with the answers.
    """
    answers: list[Answer] = []
    began = now = time.monotonic()
    for ticket, job in jobs:
        answers.append(answer(runner, ticket, job, timer if now >= timer.due else None))
        now = time.monotonic()
        if now - began > _TOGETHER or ticket == jobs[-1][0]:
            yield _pack_answers(end, answers, now - began, said)
            said.clear()
            answers = []
            began = time.monotonic()
            timer.sent += began - now


def answer(runner: JobRunner, ticket: int, job: Job, timer: JobTimer | None = None) -> Answer:
    """Run a job, with a timer if given; return its result or its error."""
    try:
        result = runner.run(job) if timer is None else timer.run(runner.services, lambda: runner.run(job))
        return ticket, True, (result.batch, result.outcomes, result.tokens, result.trace, result.digest)
    except SystemExit as error:
        what = f"a hook ended its worker with sys.exit({error.code!r})"
        details = hook_traceback(error)
        return ticket, False, FatalSampleError(what, fix="raise FatalSampleError to end the run", details=details)
    except BaseException as error:
        return ticket, False, error


def _pack_answers(end: TrainerEnd, answers: Sequence[Answer], seconds: float, said: list[Times]) -> Message:
    """Return a message of all answers; a result that cannot be sent is replaced by an error."""
    sent = [(ticket, ok, value if ok else _sendable(end, value)) for ticket, ok, value in answers]
    try:
        return end.pack((sent, seconds, said))
    except Exception:
        return end.pack(([_packed_alone(end, answer) for answer in sent], seconds, said))


def _packed_alone(end: TrainerEnd, answer: Answer) -> Answer:
    try:
        end.pack(answer)
        return answer
    except Exception as error:
        return answer[0], False, unsendable(answer[2], error, end.pack)


def _sendable(end: TrainerEnd, error: BaseException) -> BaseException:
    """Return an error that can be sent: the exception itself if it can be packed, else one with its text."""
    text = hook_traceback(error)
    if shows_more(error):
        error.__notes__ = [f"in a worker process:\n{text}"]  # add_note needs Python 3.11
    error.__cause__ = error.__context__ = None
    try:
        end.unpack(memoryview(b"".join(end.pack(error))))
        return error
    except Exception:
        return FatalSampleError(f"a worker failed with {type(error).__name__}: {error}\n{text}")
