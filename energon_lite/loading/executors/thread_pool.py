"""Workers that are threads of this process: no start, no pickling, no copies; for work that gives up Python's lock.

Reading, and decoding in C, run beside each other and beside the trainer. Python code in hooks does not: it holds the
interpreter's lock, and takes its time from the trainer.
"""

from __future__ import annotations

import copy
import logging
import sys
import threading
import time
import traceback
from collections import deque
from dataclasses import replace
from typing import Any

from energon_lite.errors import UsageError, WorkerError
from energon_lite.loading.executors.executor import JobRunner, Load
from energon_lite.loading.executors.pool_options import PoolOptions
from energon_lite.loading.makers.outcomes import Result
from energon_lite.loading.makers.pipeline import Job
from energon_lite.loading.makers.stage_timer import StageTimer

__all__ = ["ThreadPool", "check_threads"]

logger = logging.getLogger(__name__)


def check_threads(pipeline: JobRunner) -> None:
    """Whether threads can run a pipeline; hooks that will have to wait for each other are told.

    Raises:
        UsageError: they cannot.
    """
    if pipeline.samples.seeded_hooks:
        logger.warning(
            "start_method='thread': %s of %s are run one at a time, with the global generators (random, numpy.random, "
            "torch on the CPU) lent to the one that runs; the trainer should not draw from these meanwhile. Mark hooks "
            "that do not draw from them @stateless(restore_seeds=False), or use processes.",
            ", ".join(sorted(pipeline.samples.seeded_hooks)),
            type(pipeline.samples.encoder).__name__,
        )
    if any(leaf.source.read_ahead is not None for leaf in pipeline.samples.leaves):
        raise UsageError("start_method='thread' with read_ahead: its cache belongs to one thread", fix="use processes")


class ThreadPool:
    """Runs jobs in threads.

    Args:
        pipeline: what runs a job. The hooks are shared by all threads.
        num_workers: number of threads.
        options: how they are watched and bounded.
    """

    def __init__(self, pipeline: JobRunner, num_workers: int, options: PoolOptions):
        self._options = options
        self._changed = threading.Condition()
        self._tickets = 0
        self._waiting: deque[tuple[int, Job]] = deque()
        self._running: dict[int, threading.Thread] = {}
        self._done: dict[int, Result | BaseException] = {}
        self._sizes: dict[int, int] = {}
        self._largest = 0
        self._awaited = 0  # the ticket that somebody waits for
        self._wanted = 0  # a cancelled job's ticket is below it
        self._closed = False
        self._threads = [
            threading.Thread(
                target=self._work, args=(_own(pipeline),), name=f"energon-lite-thread-{number}", daemon=True
            )
            for number in range(num_workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> int:
        with self._changed:
            self._tickets += 1
            self._waiting.append((self._tickets, job))
            self._changed.notify_all()
            return self._tickets

    def result(self, ticket: int) -> Result:
        limit = self._options.watchdog_seconds
        deadline = None if limit is None else time.monotonic() + limit
        with self._changed:
            self._awaited = ticket
            self._waiting = deque(sorted(self._waiting, key=lambda waiting: waiting[0] != ticket))  # it goes first
            self._changed.notify_all()
            while ticket not in self._done:
                if self._closed:
                    raise WorkerError("the loader was closed while another thread waited for a batch")
                timeout = None if deadline is None else deadline - time.monotonic()
                if timeout is not None and timeout <= 0:
                    self._too_slow(ticket)
                    deadline = None
                    continue
                self._changed.wait(timeout)
            outcome = self._done.pop(ticket)
            self._sizes.pop(ticket, None)
            self._changed.notify_all()  # there is room again
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def load(self) -> Load:
        with self._changed:
            return Load(len(self._done), len(self._waiting) + len(self._running), sum(self._sizes.values()))

    def ahead(self, jobs: int) -> int:
        return jobs

    def cancel(self) -> None:
        with self._changed:
            self._wanted = self._tickets + 1
            self._waiting.clear()
            self._done.clear()
            self._sizes.clear()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.cancel()
        deadline = time.monotonic() + 2.0
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    # -- inside ---------------------------------------------------------------------------------------------------

    def _work(self, pipeline: JobRunner) -> None:
        """The body of a thread."""
        if self._options.trace:
            pipeline.samples.observers = (StageTimer(pipeline.samples.leaves),)
        while True:
            with self._changed:
                while not self._closed and not (self._waiting and self._has_room(self._waiting[0][0])):
                    self._changed.wait()
                if self._closed:
                    return
                ticket, job = self._waiting.popleft()
                self._running[ticket] = threading.current_thread()
            outcome: Result | BaseException
            try:
                outcome = pipeline.run(job)
                size = _size_of(outcome.batch)
            except BaseException as error:
                outcome, size = error, 0
            with self._changed:
                del self._running[ticket]
                if ticket >= self._wanted:
                    self._done[ticket], self._sizes[ticket] = outcome, size
                    self._largest = max(size, self._largest - (self._largest >> 4))
                self._changed.notify_all()
            del outcome

    def _has_room(self, ticket: int) -> bool:
        """Whether the result of one more job may be expected."""
        at_work = len(self._running)
        needed = not at_work and (ticket == self._awaited or not self._done)
        expected = sum(self._sizes.values()) + (at_work + 1) * self._largest
        return needed or expected <= self._options.max_bytes_in_flight

    def _too_slow(self, ticket: int) -> None:
        thread = self._running.get(ticket)
        frame = None if thread is None or thread.ident is None else sys._current_frames().get(thread.ident)
        at = "no thread has begun it" if thread is None else f"thread {thread.name}"
        stack = "" if frame is None else "\n" + "".join(traceback.format_stack(frame)).rstrip()
        what = f"a micro-batch has been waited for longer than {self._options.watchdog_seconds:g} s ({at})"
        if self._options.on_timeout == "raise":
            raise WorkerError(what + stack, fix="see what the thread does there, or raise watchdog_timeout_seconds")
        logger.warning("%s; still waiting%s", what, stack)


def _own(pipeline: JobRunner) -> JobRunner:
    """A pipeline for one thread: open files, and what is planned per leaf, are not shared."""
    own = copy.copy(pipeline)
    own.samples = copy.copy(pipeline.samples)
    own.samples.leaves = tuple(replace(leaf, source=copy.copy(leaf.source)) for leaf in pipeline.samples.leaves)
    return own


def _size_of(value: Any) -> int:
    """Bytes of the tensors and arrays in a batch."""
    from energon_lite.tensors import map_tensors

    found = 0

    def add(tensor: Any) -> Any:
        nonlocal found
        found += tensor.nbytes
        return tensor

    map_tensors(add, value)
    return found
