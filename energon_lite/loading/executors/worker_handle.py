"""A worker as its trainer sees it: a process, a pipe, memory, and the jobs that it was given."""

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
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any

from energon_lite.errors import UsageError
from energon_lite.loading.executors import fork_server
from energon_lite.loading.executors.executor import JobRunner
from energon_lite.loading.executors.observation import Notes
from energon_lite.loading.executors.parent_watch import can_kernel_watch
from energon_lite.loading.executors.segments import SegmentReader, Segments
from energon_lite.loading.executors.transport import Channel
from energon_lite.loading.executors.worker_process import STOP_SIGNALS, serve

__all__ = ["ProcessHandle", "WorkerHandle", "end_workers", "kill_workers"]

logger = logging.getLogger(__name__)

#: A worker that has not begun to work after so long hangs, too. It imports torch and the user's modules, maybe slowly.
_START_SECONDS = 120.0
#: Seconds that a worker that was killed may take to be gone.
_KILLED = 5.0

# The trainer's ends of all pipes, with its views of their segments. A forked worker inherits them and closes them at
# once: as long as anyone else holds such an end, a worker would not notice that its trainer is gone.
_trainer_ends: weakref.WeakSet[Channel] = weakref.WeakSet()


class WorkerHandle:
    """A worker that :meth:`start` starts.

    Args:
        number: of the worker in its pool.
        channel: to it.
        notes: what it was doing, and what it is doing.
        process: what it is: a process, or a thread.

    Attributes:
        tickets: jobs sent and not answered, oldest first.
        together: some of them were sent at once, so that it is not known which one it works on.
        since: when it began the oldest of them, or later.
    """

    def __init__(self, number: int, channel: Channel, notes: Notes, process: Any):
        self.number = number
        self.channel = channel
        self.notes = notes
        self.process = process
        self.tickets: deque[int] = deque()
        self.together = False
        self.since = 0.0

    def start(self) -> None:
        """Start it."""
        self.process.start()

    @property
    def handles(self) -> list[int]:
        """What can be polled: its answers, and its end, if it may come."""
        return [self.channel.fileno(), *([self.process.sentinel] if isinstance(self.process, BaseProcess) else ())]

    def busy_seconds(self, now: float) -> float:
        """How long it has been at its oldest job; its own start does not count, unless that takes very long."""
        began = self.notes.began()
        return now - self.since - _START_SECONDS if began is None else now - max(self.since, began)

    def close(self) -> None:
        """Let go of the pipe and of the memory."""
        self.channel.close()
        self.notes.close()


class ProcessHandle(WorkerHandle):
    """A worker that is a process of its own.

    Args:
        context: how it is started: fork, forkserver or spawn.
        number: see above.
        pipeline: what runs a job.
        segments: large results that may be in shared memory at the same time.
        trace: time the stages of each batch.
        peers: workers of this rank.
    """

    def __init__(
        self, context: BaseContext, number: int, pipeline: JobRunner, *, segments: int, trace: bool, peers: int
    ):
        ours, self._theirs = context.Pipe(duplex=True)
        memory = Segments(segments)
        notes = Notes()
        channel = Channel(ours, SegmentReader(memory))
        method = context.get_start_method()
        if method == "forkserver":
            _prepare_server(context)
        inherited = [*_trainer_ends, ours] if method == "fork" else []
        _trainer_ends.add(channel)
        watched = (os.getpid(), can_kernel_watch(method))
        made = context.Process(  # type: ignore[attr-defined]
            target=serve,
            args=(self._theirs, memory, notes, pipeline, *watched, inherited, trace, peers),
            name=f"energon-lite-worker-{number}",
            daemon=True,
        )
        super().__init__(number, channel, notes, made)

    def start(self) -> None:
        # Until it ignores them, which takes a moment, signals wait.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._theirs.close()

    def __str__(self) -> str:
        return f"worker {self.number} (pid {self.process.pid})"


def _prepare_server(context: BaseContext) -> None:
    """Have the fork server, if it is not there yet, import what workers need, once for all of them.

    Its socket is in a folder of its own: the usual one may be that of the process that started this one.
    """
    context.set_forkserver_preload(["__main__", fork_server.__name__, serve.__module__, "torch"])
    folder = tempfile.mkdtemp(prefix="pymp-")
    config = process.current_process()._config  # type: ignore[attr-defined]  # where get_temp_dir() looks; no public way
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
            Finalize(None, shutil.rmtree, (folder, True), exitpriority=-100)  # should the server be killed
        else:
            os.rmdir(folder)


def end_workers(workers: Sequence[WorkerHandle], seconds: float) -> None:
    """Tell workers to leave, and kill those that have not left after so many seconds."""
    for worker in workers:
        worker.close()
    kill_workers(workers, seconds)


def kill_workers(workers: Sequence[WorkerHandle], patience: float) -> None:
    """Wait so many seconds for workers to leave, then kill them; threads that stay are left to themselves."""
    left = [worker for worker in _outlasting(workers, patience) if isinstance(worker.process, BaseProcess)]
    for worker in left:
        worker.process.kill()
    for worker in _outlasting(left, _KILLED):
        logger.warning(
            "%s was killed, and is not gone: it waits for the system (a file server that does not answer?); it is left "
            "to itself",
            worker,
        )
        # multiprocessing would wait for it when this process ends, and has no public way to be told otherwise.
        getattr(process, "_children", set()).discard(worker.process)


def _outlasting(workers: Sequence[WorkerHandle], seconds: float) -> list[WorkerHandle]:
    """Those that are still there after so many seconds."""
    deadline = time.monotonic() + seconds
    for worker in workers:
        # Not started, it cannot be waited for; and a thread may be the one that collects what nobody needs any more.
        if worker.process.is_alive() and worker.process is not threading.current_thread():
            worker.process.join(max(0.0, deadline - time.monotonic()))
    return [worker for worker in workers if worker.process.is_alive()]
