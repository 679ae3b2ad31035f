"""Workers that are threads of this process: no start, no pickling, no copies; for work that releases Python's lock.

Reads, and decoding in C, run in parallel with each other and with the trainer. Python code in hooks does not: it holds
the interpreter's lock and slows down the trainer.
"""

from __future__ import annotations

import copy
import logging
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import Pipe
from queue import SimpleQueue
from typing import Any

from energon_lite.errors import UsageError
from energon_lite.loading.executors import torch_worker_info
from energon_lite.loading.executors.executor import JobRunner
from energon_lite.loading.executors.observation import WorkerCrashLog
from energon_lite.loading.executors.transport import Channel
from energon_lite.loading.executors.worker_handle import WorkerHandle
from energon_lite.loading.executors.worker_process import Answer, answer
from energon_lite.loading.makers.leaf import leaves_apart, reads_ahead
from energon_lite.loading.makers.observers import JobTimer, StageTimer, Times
from energon_lite.loading.makers.pipeline import Job
from energon_lite.tensors import map_tensors
from energon_lite.worker_config import set_worker_number

__all__ = ["ThreadHandle", "check_threads"]

logger = logging.getLogger(__name__)


def check_threads(pipeline: JobRunner) -> None:
    """Check that threads can run a pipeline; warn if its hooks will have to wait for each other.

    Raises:
        UsageError: threads cannot run it.
    """
    if pipeline.samples.seeded_hooks:
        logger.warning(
            "start_method='thread': %s of %s are run one at a time, with the global generators (random, numpy.random, "
            "torch on the CPU) lent to the one that runs; the trainer should not draw from these meanwhile. Mark hooks "
            "that do not draw from them @stateless(restore_seeds=False), or use processes.",
            ", ".join(sorted(pipeline.samples.seeded_hooks)),
            type(pipeline.samples.encoder).__name__,
        )
    if reads_ahead(pipeline.samples.leaves):
        raise UsageError("start_method='thread' with read_ahead: its cache belongs to one thread", fix="use processes")


class ThreadHandle(WorkerHandle):
    """Handle of a worker that is a thread; all of them share the hooks."""

    def __init__(self, number: int, pipeline: JobRunner, *, trace: bool, peers: int):
        channel = _ThreadChannel()
        name = f"energon-lite-thread-{number}"
        args = (channel, _own(pipeline), number, trace, peers)
        thread = threading.Thread(target=_work, args=args, name=name, daemon=True)
        super().__init__(number, channel, _ThreadCrashLog(), thread)

    def __str__(self) -> str:
        return f"thread {self.process.name}"


class _ThreadChannel(Channel):
    """Channel to a thread without pickling; its pipe only wakes the trainer, which polls, when there are answers."""

    def __init__(self) -> None:
        # The writing end is never closed: its descriptor must not be reused while a thread may still write.
        self._connection, self._writer = Pipe(duplex=False)
        os.set_blocking(self.fileno(), False)
        self._unsent = []
        self.jobs: SimpleQueue[Sequence[tuple[int, Job]] | None] = SimpleQueue()
        self._answers: deque[tuple[Any, int]] = deque()

    def send(self, jobs: Sequence[tuple[int, Job]], *, noted: bool) -> None:
        self.jobs.put(jobs)

    def receive(self) -> tuple[Any, int] | None:
        with suppress(BlockingIOError):
            os.read(self.fileno(), 1 << 16)  # an answer is in the queue before its byte is in the pipe
        return self._answers.popleft() if self._answers else None

    def answer(self, answers: list[Answer], seconds: float, said: list[Times]) -> None:
        """Send answers; called by the thread."""
        ((_, ok, value),) = answers
        self._answers.append(((answers, seconds, said), _size_of(value[0]) if ok else 0))
        self._tell()

    @property
    def is_closed(self) -> bool:
        """True if the trainer has closed the channel."""
        return self._connection.closed

    def close(self) -> None:
        self.jobs.put(None)
        self._tell()
        self._connection.close()

    def _tell(self) -> None:
        with suppress(BrokenPipeError):  # the pool is closed
            os.write(self._writer.fileno(), b"\0")


class _ThreadCrashLog(WorkerCrashLog):
    """Crash log of a thread. The trainer can see its stack; threads do not die alone, so no steps are noted."""

    def __init__(self) -> None:
        self._is_possible = False

    def stacks(self, worker: Any) -> str:
        frame = sys._current_frames().get(worker.ident)
        return "" if frame is None else "".join(traceback.format_stack(frame)).rstrip()

    def close(self) -> None:
        pass


def _work(channel: _ThreadChannel, pipeline: JobRunner, number: int, trace: bool, peers: int) -> None:
    """Run the jobs of a thread until its channel is closed."""
    set_worker_number(number, thread=True)
    torch_worker_info.tell(number, peers, thread=True)
    if trace:
        pipeline.samples.observers = (StageTimer(pipeline.samples.leaves, number),)
    said: list[Times] = []
    timer = JobTimer(said.append)
    while (jobs := channel.jobs.get()) is not None:
        for ticket, job in jobs:
            if channel.is_closed:
                return
            began = time.monotonic()
            made = answer(pipeline, ticket, job, timer if began >= timer.due else None)
            channel.answer([made], time.monotonic() - began, said.copy())
            said.clear()


def _own(pipeline: JobRunner) -> JobRunner:
    """Return a copy of a pipeline for one thread that does not share open files and plans of leaves."""
    own = copy.copy(pipeline)
    own.samples = copy.copy(pipeline.samples)
    own.samples.worker_config = pipeline.samples.worker_config  # the same object: a copy would have no process groups
    own.samples.leaves = leaves_apart(pipeline.samples.leaves)
    return own


def _size_of(batch: Any) -> int:
    """Return the size of the tensors in a batch, in bytes."""
    sizes = [0]

    def add(tensor: Any) -> Any:
        sizes.append(tensor.nbytes)
        return tensor

    map_tensors(add, batch)
    return sum(sizes)
