"""Handles of workers in their trainer: of any kind, with the jobs that it was given; and that of a process."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from multiprocessing import forkserver, process
from multiprocessing.context import BaseContext
from multiprocessing.util import Finalize
from typing import Any, TypeVar

from energon_lite.errors import UsageError, WorkerError, listed
from energon_lite.loading.executors import fork_server
from energon_lite.loading.executors.channels import Channel, PipeChannel
from energon_lite.loading.executors.observation import WorkerCrashLog
from energon_lite.loading.executors.segments import SegmentReader, Segments
from energon_lite.loading.executors.worker_process import STOP_SIGNALS, can_kernel_watch, serve
from energon_lite.loading.makers.batch_runner import Job
from energon_lite.loading.makers.job_runner import JobRunner

__all__ = [
    "LocalHandle",
    "ProcessHandle",
    "WorkerHandle",
    "end_workers",
    "fewest_jobs",
    "gave_up",
    "kill_workers",
    "trainer_ends",
]

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
        together: some of them were sent at once, so it is not known which one is running.
        since: time at which the oldest of them was begun, or later.
        blame: how much its end counts towards the deaths after which a job is given up.
    """

    blame = 1.0

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
        notes: the worker's last step and stacks.
        process: the process or the thread.
    """

    def __init__(self, number: int, channel: Channel, notes: WorkerCrashLog, process: Any):
        super().__init__(number, channel)
        self.notes = notes
        self.process = process

    def start(self) -> None:
        self.process.start()

    def busy_seconds(self, now: float) -> float:
        began = self.notes.began()  # its own start only counts after _START_SECONDS
        return now - self.since - _START_SECONDS if began is None else now - max(self.since, began)

    def last_step(self) -> str:
        return self.notes.last_step()

    def stacks(self) -> str:
        return self.notes.stacks(self.process)

    def close(self) -> None:
        super().close()
        self.notes.close()


class ProcessHandle(LocalHandle):
    """Handle of a worker that is a process.

    Args:
        context: context of the start method: fork, forkserver or spawn.
        number: number of the worker in its pool.
        runner: runner of a job.
        segments: number of large results that may be in shared memory at the same time.
        trace: time the stages of each batch.
        peers: number of workers of this rank.
    """

    def __init__(self, context: BaseContext, number: int, runner: JobRunner, *, segments: int, trace: bool, peers: int):
        ours, self._theirs = context.Pipe(duplex=True)
        memory = Segments(segments)
        notes = WorkerCrashLog()
        channel = PipeChannel(ours, SegmentReader(memory))
        method = context.get_start_method()
        if method == "forkserver":
            _prepare_server(context)
        inherited = [*trainer_ends, ours] if method == "fork" else []
        trainer_ends.add(channel)
        watched = (os.getpid(), can_kernel_watch(method))
        made = context.Process(  # type: ignore[attr-defined]
            target=serve,
            args=(self._theirs, memory, notes, runner, *watched, inherited, trace, peers),
            name=f"energon-lite-worker-{number}",
            daemon=True,
        )
        super().__init__(number, channel, notes, made)

    def start(self) -> None:
        # The signals are blocked until the worker ignores them, which takes a moment.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._theirs.close()

    @property
    def handles(self) -> list[int]:
        return [self.channel.fileno(), self.process.sentinel]

    def end_text(self) -> str:
        code = self.process.exitcode
        if code is None or code >= 0:
            return f"ended with {'an unknown status' if code is None else f'exit code {code}'}"
        try:
            return f"ended with {signal.Signals(-code).name}"
        except ValueError:
            return f"ended with signal {-code}"

    def __str__(self) -> str:
        return f"worker {self.number} (pid {self.process.pid})"


def _prepare_server(context: BaseContext) -> None:
    """Start the fork server, if it is not running, with the modules that workers need, imported once for all of them.

    Its socket is in a separate folder: the default folder may belong to the process that started this one.
    """
    context.set_forkserver_preload(["__main__", fork_server.__name__, serve.__module__, "torch"])
    folder = tempfile.mkdtemp(prefix="pymp-")
    config = process.current_process()._config  # type: ignore[attr-defined]  # read by get_temp_dir(); no public way
    usual = config.get("tempdir")
    config["tempdir"] = os.environ[fork_server.FOLDER] = folder
    try:
        forkserver.ensure_running()
    except ChildProcessError:
        raise UsageError(
            "start_method='forkserver' in a process that was forked from one with a fork server, which serves no other",
            fix="use start_method='fork' or 'spawn' there",
        ) from None
    finally:
        del os.environ[fork_server.FOLDER]
        config["tempdir"] = usual
        if os.listdir(folder):
            Finalize(None, shutil.rmtree, (folder, True), exitpriority=-100)  # in case the server is killed
        else:
            os.rmdir(folder)


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


def gave_up(runner: JobRunner, job: Job, last: WorkerHandle, died: str, end: str) -> WorkerError:
    """Return the error of a job in which workers have died.

    Args:
        died: their number.
        end: end of the last one.
    """
    names = [f"{runner.leaves[address[0]].name}[{address[1]}]" for address in job.addresses]
    step = last.last_step()
    return WorkerError(
        f"{died} died while making the same micro-batch; the last one {end}" + (f" in {step}" if step else ""),
        where=f"micro-batch {job.number} of pass {job.pass_number}: samples {listed(names)}",
        fix="look for a crash or for too much memory in the decoding or the hooks of these samples; "
        "restore_sample makes the same batch in this process",
    )
