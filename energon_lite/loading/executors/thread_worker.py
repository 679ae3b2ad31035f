"""Workers that are threads of the trainer process, and their handle."""

from __future__ import annotations

import copy
import logging
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

from energon_lite.errors import UsageError
from energon_lite.loading.executors import torch_worker_info
from energon_lite.loading.executors.channels import WakingChannel
from energon_lite.loading.executors.observation import WorkerCrashLog
from energon_lite.loading.executors.worker_handle import LocalHandle
from energon_lite.loading.executors.worker_process import Answer, answer
from energon_lite.loading.makers.batch_runner import Job
from energon_lite.loading.makers.job_runner import JobRunner
from energon_lite.loading.makers.leaf import leaves_apart, reads_ahead
from energon_lite.loading.makers.observers import JobTimer, StageTimer, Times
from energon_lite.tensors import map_tensors
from energon_lite.worker_config import set_worker_number

__all__ = ["ThreadHandle", "check_threads"]

logger = logging.getLogger(__name__)

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
    """Handle of a worker that is a thread; all of them share the hooks."""

    def __init__(self, number: int, runner: JobRunner, *, trace: bool, peers: int):
        channel = _ThreadChannel()
        name = f"energon-lite-thread-{number}"
        args = (channel, _own(runner), number, trace, peers)
        thread = threading.Thread(target=_work, args=args, name=name, daemon=True)
        super().__init__(number, channel, _ThreadCrashLog(), thread)

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


class _ThreadCrashLog(WorkerCrashLog):
    """Crash log of a thread. The trainer can see its stack; threads do not die alone, so no steps are noted."""

    def __init__(self) -> None:
        self._is_possible = False

    def stacks(self, worker: Any) -> str:
        frame = sys._current_frames().get(worker.ident)
        return "" if frame is None else "".join(traceback.format_stack(frame)).rstrip()

    def close(self) -> None:
        pass


def _work(channel: _ThreadChannel, runner: JobRunner, number: int, trace: bool, peers: int) -> None:
    """Run the jobs of a thread until its channel is closed."""
    set_worker_number(number, thread=True)
    torch_worker_info.tell(number, peers, thread=True)
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
    own.services = runner.services.for_thread()
    own.leaves = leaves_apart(runner.leaves)
    return own


def _size_of(batch: Any) -> int:
    """Return the size of the tensors in a batch, in bytes."""
    sizes = [0]

    def add(tensor: Any) -> Any:
        sizes.append(tensor.nbytes)
        return tensor

    map_tensors(add, batch)
    return sum(sizes)
