"""Workers that are actors of Ray: started where their resources are, and replaced, by Ray.

An actor gets the runner of jobs once, and returns a batch as one flat array of bytes, so a batch is one object of the
store. The trainer copies it into memory of its own: arrays can be written, and the store holds nothing.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np

from energon_lite.errors import UsageError
from energon_lite.extras.remote_workers.described import RayWorkers, connect_to_ray
from energon_lite.extras.remote_workers.mixed_pool import MixedPool, RemoteHandle, WorkerSource
from energon_lite.loading.executors.executor_handle import PoolRequest
from energon_lite.loading.executors.transport import Message, WakingChannel, pack, unpack
from energon_lite.loading.executors.worker_process import TrainerEnd, run_jobs
from energon_lite.loading.makers.batch_runner import Job
from energon_lite.loading.makers.job_runner import JobRunner
from energon_lite.loading.makers.observers import StageTimer

logger = logging.getLogger(__name__)

#: Seconds between two looks at the number of actors, and between two changes of it.
_LOOK, _CALM = 0.1, 2.0
#: Seconds of no need after which actors above the minimum are ended.
_IDLE = 30.0
#: Actors that may end at their start, one after the other, before a pool without other workers gives up; and the
#: longest pause between two of them, in seconds.
_FAILED, _LONGEST = 3, 60.0


def open_pool(request: PoolRequest) -> MixedPool:
    """Return the pool of a loader, with actors of Ray.

    Raises:
        UsageError: Ray is not installed; or the text has more than ``ray``, or ``ray://address``.
    """
    try:
        import ray  # noqa: F401
    except ImportError:
        raise UsageError("workers of Ray, which is not installed", fix="pip install 'energon-lite[ray]'") from None
    described = request.described
    if isinstance(described, str):
        described = RayWorkers(address=described if described != "ray" else None)
    assert isinstance(described, RayWorkers)
    return MixedPool(request, RaySource(described, request.runner, request.options.trace), described.host_load)


class _Mailbox(TrainerEnd):
    """A worker's end of the way from Ray's calls: a thread runs the jobs of one call after the other."""

    def __init__(self) -> None:
        self.calls: SimpleQueue[tuple[Sequence[tuple[int, Job]], bool]] = SimpleQueue()
        self.messages: SimpleQueue[bytes | BaseException | None] = SimpleQueue()  # None: the call is done
        self._has_call = False

    def next(self) -> tuple[Sequence[tuple[int, Job]], bool]:
        if self._has_call:
            self.messages.put(None)
        self._has_call = True
        return self.calls.get()

    def pack(self, obj: Any) -> Message:
        return pack(obj)

    def unpack(self, memory: memoryview) -> Any:
        return unpack(memory)

    def send(self, message: Message) -> None:
        self.messages.put(b"".join(message))


class Worker:
    """Actor that runs jobs.

    Args:
        runner: runner of a job.
        number: number of the worker.
        trace: time the stages of each batch.
    """

    def __init__(self, runner: JobRunner, number: int, trace: bool):
        self._mailbox = _Mailbox()
        observers = (StageTimer(runner.leaves, number),) if trace else ()
        threading.Thread(target=self._work, args=(runner, observers), daemon=True).start()

    def ready(self) -> None:
        """Return when the actor has started."""

    def run(self, message: np.ndarray) -> list[np.ndarray]:
        """Return the messages with the answers to the jobs in a message, each as one array of bytes."""
        self._mailbox.calls.put(_object_in(message))
        answers = []
        while (answer := self._mailbox.messages.get()) is not None:
            if isinstance(answer, BaseException):
                raise answer
            answers.append(np.frombuffer(answer, dtype=np.uint8))
        return answers

    def _work(self, runner: JobRunner, observers: tuple[StageTimer, ...]) -> None:
        try:
            run_jobs(self._mailbox, runner, observers)
        except BaseException as error:
            self._mailbox.messages.put(error)


def _object_in(array: np.ndarray) -> Any:
    """Return the object of a message in Ray's store, copied, because what is in the store cannot be written."""
    return unpack(memoryview(np.array(array)))  # type: ignore[arg-type]


class RayChannel(WakingChannel):
    """Channel to an actor. Ray calls back, in a thread of its own, when an answer is in the store.

    Args:
        actor: the actor.
    """

    def __init__(self, actor: Any):
        super().__init__()
        self.actor = actor
        self.error: BaseException | None = None

    def send(self, jobs: Sequence[tuple[int, Any]], *, noted: bool) -> None:
        message = np.frombuffer(b"".join(pack((jobs, noted))), dtype=np.uint8)
        self.actor.run.remote(message).future().add_done_callback(self._take)

    def _take(self, future: Any) -> None:
        """Copy the answers of a call out of the store; called by a thread of Ray."""
        try:
            for array in future.result():
                self._answers.append((_object_in(array), array.nbytes))
        except BaseException as error:
            self.error = error
        if not self.is_closed:
            self.wake()

    def receive(self) -> tuple[Any, int] | None:
        received = super().receive()
        if received is None and self.error is not None:
            raise EOFError from self.error
        return received


class RayHandle(RemoteHandle):
    """Handle of an actor."""

    channel: RayChannel

    def end_text(self) -> str:
        reason = str(self.channel.error or "").strip()
        return f"is gone ({reason})" if reason else "is gone"

    def close(self) -> None:
        import ray

        super().close()
        with suppress(Exception):  # it has ended, or Ray has
            ray.kill(self.channel.actor)


class RaySource(WorkerSource):
    """Source of workers that are actors of Ray. An actor joins the pool, and gets jobs, when it has answered once.

    Args:
        workers: their description.
        runner: runner of a job.
        trace: time the stages of each batch.
    """

    def __init__(self, workers: RayWorkers, runner: JobRunner, trace: bool):
        super().__init__()
        self._workers = workers
        self._runner = runner
        self._trace = trace
        self._live: list[RemoteHandle] = []
        self._wanted = workers.minimum
        self._numbers = itertools.count(2000)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._starting = set[RemoteHandle]()
        self._problem: BaseException | None = None
        self._failed = 0  # actors that ended at their start since the last one that did not
        self._again = 0.0  # time of the next start
        self._short_at = self._ended_at = 0.0  # times at which more were needed, and one was ended, last

    def start(self) -> None:
        connect_to_ray(self._workers.address)  # only now, because local workers are forked
        threading.Thread(target=self._look, name="energon-lite-actors", daemon=True).start()

    def refusal(self) -> UsageError | None:
        if self._failed < _FAILED:
            return None
        return UsageError(
            f"no actor of Ray can be started: {self._failed} in a row ended at their start, the last one with: "
            f"{self._problem}",
            fix="install the trainer's packages and code on the machines of the cluster, with memory for the data "
            "set; see `ray logs` for what an actor printed, and `ray status`",
        )

    def left(self, worker: RemoteHandle) -> None:
        with self._lock, suppress(ValueError):
            self._live.remove(worker)

    def spare(self) -> Sequence[RemoteHandle]:
        now, least = time.monotonic(), self._workers.minimum
        self._short_at = now if self.is_short else self._short_at
        if now - max(self._short_at, self._ended_at) < _IDLE or len(self._live) <= least:
            return ()
        self._ended_at = now
        self._wanted = max(least, self._wanted - 1)
        with self._lock:
            return [worker for worker in self._live[self._wanted :] if not worker.tickets]

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            starting, self._starting = self._starting, set()
        for worker in starting:
            worker.close()
        super().close()

    def _look(self) -> None:
        """Start actors while they are needed, until the source is closed."""
        import ray

        reference = None
        remote = ray.remote(Worker)
        began = 0.0
        while not self._closed.wait(_LOOK):
            now = time.monotonic()
            if now < self._again or (now - began < _CALM and len(self._live) >= self._wanted):
                continue
            if len(self._live) >= self._wanted and (self.is_short or now - self._short_at < _CALM):
                self._wanted = min(self._workers.maximum, self._wanted + 1)
            if len(self._live) >= self._wanted:
                continue
            try:
                reference = reference or ray.put(self._runner)
                resources = dict(self._workers.resources)
                number, cpus = next(self._numbers), resources.pop("CPU", 1.0)
                actor = remote.options(num_cpus=cpus, resources=resources).remote(reference, number, self._trace)
                handle = RayHandle(number, RayChannel(actor), "actor of Ray")
                with self._lock:
                    self._live.append(handle)
                    self._starting.add(handle)
                if self._closed.is_set():
                    self.close()
                actor.ready.remote().future().add_done_callback(partial(self._started, handle))
                began = now
            except Exception as error:
                self._note(error)

    def _started(self, handle: RemoteHandle, answer: Any) -> None:
        """Let an actor join that has answered, or take note that it has ended; called by a thread of Ray."""
        error = answer.exception()
        with self._lock:
            is_awaited = handle in self._starting
            self._starting.discard(handle)
            if is_awaited and error is None:
                self._failed = 0
                self.joined.put(handle, 0)
        if is_awaited and error is not None:
            self.left(handle)
            handle.channel.close()  # not ray.kill(), which waits for this thread
            self._note(error)

    def _note(self, error: BaseException) -> None:
        """Take note of an actor that cannot be started, and wait longer before the next one."""
        self._again = time.monotonic() + min(_LONGEST, _CALM * 2 ** min(5, self._failed))
        self._problem = error
        self._failed += 1
        self.joined.wake()
        if self._failed == _FAILED:
            logger.warning(
                "%d actors of Ray in a row ended at their start; further ones are tried less often: %s", _FAILED, error
            )
