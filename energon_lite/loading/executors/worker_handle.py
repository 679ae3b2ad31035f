"""Handles of workers in their trainer, with the jobs that each was given: processes, and threads of the trainer."""

from __future__ import annotations

import copy
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing import forkserver, get_context, process
from multiprocessing.context import BaseContext
from multiprocessing.util import Finalize
from queue import SimpleQueue
from typing import Any, TypeVar

from energon_lite.errors import UsageError
from energon_lite.loading.executors.segments import SegmentReader, Segments, WorkerCrashLog
from energon_lite.loading.executors.transport import Channel, PipeChannel, WakingChannel
from energon_lite.loading.executors.worker_process import (
    SERVER_FOLDER,
    STOP_SIGNALS,
    Answer,
    answer,
    begin,
    can_kernel_watch,
    serve,
)
from energon_lite.loading.makers.batch_runner import Job
from energon_lite.loading.makers.job_runner import JobRunner
from energon_lite.loading.makers.leaf import leaves_apart, reads_ahead
from energon_lite.loading.makers.observers import JobTimer, StageTimer, Times
from energon_lite.tensors import map_tensors

logger = logging.getLogger(__name__)

Local = TypeVar("Local", bound="LocalHandle")

#: Seconds after which a worker that is still being started counts as hung. It imports torch and the user's modules.
_START_SECONDS = 120.0
#: Seconds to wait for the end of a worker that was killed.
_KILLED = 5.0

#: The trainer's ends of all pipes, with its views of their segments. A forked worker inherits them and closes them at
#: once: a worker would not notice the trainer's end while another process holds such an end open.
trainer_ends: weakref.WeakSet[Channel] = weakref.WeakSet()


class WorkerHandle:
    """Handle of a worker of any kind. A subclass starts it, and knows how it can end.

    Args:
        number: number of the worker in its pool.
        channel: channel to the worker.

    Attributes:
        tickets: tickets of the jobs that were sent and not answered, oldest first.
        together: several of them were sent in one message, so it is not known which one is running.
        since: time from which on the oldest of them has been running; it may have begun earlier.
        blame: number that the end of this worker adds to the deaths of its job, which is given up after several.
        is_silent: it sends nothing, so other workers get its jobs.
    """

    blame = 1.0
    is_silent = False

    def __init__(self, number: int, channel: Channel):
        self.number = number
        self.channel = channel
        self.tickets: deque[int] = deque()
        self.together = False
        self.since = 0.0

    def start(self) -> None:
        """Start the worker."""

    @property
    def handles(self) -> list[int]:
        """Descriptors to be polled: for its answers, and, for a process, for its end."""
        return [self.channel.fileno()]

    def busy_seconds(self, now: float) -> float:
        """Return the seconds since its oldest job began."""
        return now - self.since

    def end_text(self) -> str:
        """Return how it ended, for messages."""
        return "ended"

    def last_step(self) -> str:
        """Return the step of its job that was noted last; "" if there is none."""
        return ""

    def stacks(self) -> str:
        """Return the stacks of its threads, or the reason why there are none."""
        return "(its stack cannot be shown here)"

    def close(self) -> None:
        """Release what this process has of it; the worker then ends."""
        self.channel.close()


class LocalHandle(WorkerHandle):
    """Handle of a process or thread of this machine.

    Args:
        number: number of the worker in its pool.
        channel: channel to the worker.
        process: the process or the thread.
    """

    def __init__(self, number: int, channel: Channel, process: Any):
        super().__init__(number, channel)
        self.process = process

    def start(self) -> None:
        self.process.start()


class ProcessHandle(LocalHandle):
    """Handle of a worker that is a process.

    Args:
        method: start method: fork, forkserver or spawn.
        segments: number of large results that may be in shared memory at the same time.
        number: number of the worker in its pool.
        runner: runner of a job.
        trace: time the stages of each batch.
        peers: number of workers of this rank.
    """

    def __init__(self, method: str, segments: int, number: int, runner: JobRunner, trace: bool, peers: int):
        context = get_context(method)
        ours, self._theirs = context.Pipe(duplex=True)
        memory = Segments(segments)
        self._notes = WorkerCrashLog()
        channel = PipeChannel(ours, SegmentReader(memory))
        if method == "forkserver":
            _prepare_server(context)
        inherited = [*trainer_ends, ours] if method == "fork" else []
        trainer_ends.add(channel)
        watched = (os.getpid(), can_kernel_watch(method))
        made = context.Process(  # type: ignore[attr-defined]
            target=serve,
            args=(self._theirs, memory, self._notes, runner, *watched, inherited, trace, peers),
            name=f"energon-lite-worker-{number}",
            daemon=True,
        )
        super().__init__(number, channel, made)

    def start(self) -> None:
        # The signals are blocked until the worker ignores them, which takes a moment.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            super().start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._theirs.close()

    @property
    def handles(self) -> list[int]:
        return [self.channel.fileno(), self.process.sentinel]

    def busy_seconds(self, now: float) -> float:
        began = self._notes.began()  # its own start only counts after _START_SECONDS
        return now - self.since - _START_SECONDS if began is None else now - max(self.since, began)

    def end_text(self) -> str:
        code = self.process.exitcode
        if code is None or code >= 0:
            return f"ended with {'an unknown status' if code is None else f'exit code {code}'}"
        try:
            return f"ended with {signal.Signals(-code).name}"
        except ValueError:
            return f"ended with signal {-code}"

    def last_step(self) -> str:
        return self._notes.last_step()

    def stacks(self) -> str:
        return self._notes.stacks(self.process)

    def close(self) -> None:
        super().close()
        self._notes.close()

    def __str__(self) -> str:
        return f"worker {self.number} (pid {self.process.pid})"


def _prepare_server(context: BaseContext) -> None:
    """Start the fork server, if it is not running, with the modules that workers need, imported once for all of them.

    Its socket is in a separate folder: the default folder may belong to the process that started this one.
    """
    context.set_forkserver_preload(["__main__", serve.__module__, "torch"])
    folder = tempfile.mkdtemp(prefix="pymp-")
    config = process.current_process()._config  # type: ignore[attr-defined]  # read by get_temp_dir(); no public way
    usual = config.get("tempdir")
    config["tempdir"] = os.environ[SERVER_FOLDER] = folder
    try:
        forkserver.ensure_running()
    except ChildProcessError:
        raise UsageError(
            "start_method='forkserver' in a process that was forked from one with a fork server, which serves no other",
            fix="use start_method='fork' or 'spawn' there",
        ) from None
    finally:
        del os.environ[SERVER_FOLDER]
        config["tempdir"] = usual
        if os.listdir(folder):
            Finalize(None, shutil.rmtree, (folder, True), exitpriority=-100)  # in case the server is killed
        else:
            os.rmdir(folder)


# Reads, and decoding in C, run in parallel with each other and with the trainer. Python code in hooks does not: it
# holds the interpreter's lock and slows down the trainer.


def check_threads(runner: JobRunner) -> None:
    """Check that threads can run jobs; warn if its hooks will have to wait for each other.

    Raises:
        UsageError: threads cannot run them.
    """
    if runner.seeded_hooks:
        logger.warning(
            "start_method='thread': %s of %s are run one at a time, with the global generators (random, numpy.random, "
            "torch on the CPU) lent to the one that runs; the trainer should not draw from these meanwhile. Mark hooks "
            "that do not draw from them @stateless(restore_seeds=False), or use processes.",
            ", ".join(sorted(runner.seeded_hooks)),
            type(runner.encoder).__name__,
        )
    if reads_ahead(runner.leaves):
        raise UsageError("start_method='thread' with read_ahead: its cache belongs to one thread", fix="use processes")


class ThreadHandle(LocalHandle):
    """Handle of a worker that is a thread; all of them share the hooks. Arguments as for :class:`ProcessHandle`."""

    def __init__(self, number: int, runner: JobRunner, trace: bool, peers: int):
        channel = _ThreadChannel()
        name = f"energon-lite-thread-{number}"
        args = (channel, _own(runner), number, trace, peers)
        thread = threading.Thread(target=_work, args=args, name=name, daemon=True)
        super().__init__(number, channel, thread)

    def stacks(self) -> str:
        frame = sys._current_frames().get(self.process.ident)
        return "" if frame is None else "".join(traceback.format_stack(frame)).rstrip()

    def __str__(self) -> str:
        return f"thread {self.process.name}"


class _ThreadChannel(WakingChannel):
    """Channel to a thread, without pickling."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs: SimpleQueue[Sequence[tuple[int, Job]] | None] = SimpleQueue()

    def send(self, jobs: Sequence[tuple[int, Job]], *, noted: bool) -> None:
        self.jobs.put(jobs)

    def answer(self, answers: list[Answer], seconds: float, said: list[Times]) -> None:
        """Send answers; called by the thread."""
        ((_, ok, value),) = answers
        self.put((answers, seconds, said), _size_of(value[0]) if ok else 0)

    def close(self) -> None:
        self.jobs.put(None)
        super().close()


def _work(channel: _ThreadChannel, runner: JobRunner, number: int, trace: bool, peers: int) -> None:
    """Run the jobs of a thread until its channel is closed."""
    begin(number, peers, thread=True)
    if trace:
        runner.services.observers = (StageTimer(runner.leaves, number),)
    said: list[Times] = []
    timer = JobTimer(said.append)
    while (jobs := channel.jobs.get()) is not None:
        for ticket, job in jobs:
            if channel.is_closed:
                return
            began = time.monotonic()
            made = answer(runner, ticket, job, timer if began >= timer.due else None)
            channel.answer([made], time.monotonic() - began, said.copy())
            said.clear()


def _own(runner: JobRunner) -> JobRunner:
    """Return a copy of a runner for one thread that does not share open files and plans of leaves."""
    own = copy.copy(runner)
    own.services = replace(runner.services)
    own.leaves = leaves_apart(runner.leaves)
    return own


def _size_of(batch: Any) -> int:
    """Return the size of the tensors in a batch, in bytes."""
    sizes = [0]

    def add(tensor: Any) -> Any:
        sizes.append(tensor.nbytes)
        return tensor

    with suppress(Exception):  # of what has no bytes, or cannot be copied; an error would end the thread
        map_tensors(add, batch)
    return sum(sizes)


def end_workers(workers: Sequence[WorkerHandle], seconds: float) -> None:
    """Ask workers to end, and kill those that have not ended after ``seconds``."""
    for worker in workers:
        worker.close()
    kill_workers(workers, seconds)


def kill_workers(workers: Sequence[WorkerHandle], patience: float) -> None:
    """Wait ``patience`` seconds for workers of this machine to end, then kill the rest; threads cannot be killed and
    keep running."""
    local = [worker for worker in workers if isinstance(worker, LocalHandle)]
    left = [worker for worker in _outlasting(local, patience) if isinstance(worker, ProcessHandle)]
    for worker in left:
        worker.process.kill()
    for worker in _outlasting(left, _KILLED):
        logger.warning(
            "%s was killed but has not ended: it waits for the system (a file server that does not answer?); it is "
            "abandoned",
            worker,
        )
        # multiprocessing would wait for it at the end of this process, and has no public way to prevent that.
        getattr(process, "_children", set()).discard(worker.process)


def _outlasting(workers: Sequence[Local], seconds: float) -> list[Local]:
    """Return the workers that are still running after ``seconds``."""
    deadline = time.monotonic() + seconds
    for worker in workers:
        # A worker that was not started cannot be joined; and the garbage collector may run in a worker thread.
        if worker.process.is_alive() and worker.process is not threading.current_thread():
            worker.process.join(max(0.0, deadline - time.monotonic()))
    return [worker for worker in workers if worker.process.is_alive()]


def fewest_jobs(workers: Sequence[WorkerHandle], most: int) -> WorkerHandle | None:
    """Return the worker with the fewest jobs; None: all have more than ``most``."""
    worker = min(workers, key=lambda worker: len(worker.tickets), default=None)
    return worker if worker is not None and len(worker.tickets) <= most else None
