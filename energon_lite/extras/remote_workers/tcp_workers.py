"""The trainer's side of workers behind TCP: the process that receives for it, their channels and handles."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from types import ModuleType
from typing import Any, ClassVar

from energon_lite.errors import UsageError
from energon_lite.extras import wire
from energon_lite.extras.remote_workers import receiver
from energon_lite.extras.remote_workers.described import TcpWorkers, secret_in
from energon_lite.extras.remote_workers.mixed_pool import MixedPool, RemoteHandle, WorkerSource
from energon_lite.extras.remote_workers.protocol import (
    BEAT,
    MESSAGE,
    RELEASED,
    SILENT,
    FrameError,
    RefusedError,
    frame,
    frames,
)
from energon_lite.extras.remote_workers.receiver import PLACE, Orders, Report
from energon_lite.extras.remote_workers.run_card import run_card
from energon_lite.loading.executors.executor_handle import PoolRequest
from energon_lite.loading.executors.segments import SegmentReader, Segments
from energon_lite.loading.executors.transport import PipeChannel
from energon_lite.loading.executors.worker_handle import trainer_ends
from energon_lite.loading.executors.worker_process import Answer
from energon_lite.loading.makers.observers import Times
from energon_lite.loading.makers.outcomes import Failure

logger = logging.getLogger(__name__)

#: Most segments of a worker beyond those of its jobs, and in all.
_MORE_SEGMENTS, _MOST_SEGMENTS = 6, 256
#: Seconds until another receiver is started.
_AGAIN = 0.5
#: Seconds from a first refusal in which another server may accept the trainer.
_OTHERS = 1.0


def open_pool(request: PoolRequest) -> MixedPool:
    """Return the pool of a loader, with workers behind TCP."""
    described = request.described
    workers = TcpWorkers.from_text(described) if isinstance(described, str) else described
    assert isinstance(workers, TcpWorkers)
    secret = secret_in(workers.secret_file)  # files that cannot be used are noticed here
    if workers.tls is not None:
        workers.tls.context(server=False)
    orders = orders_of(request, workers.max_bytes, secret)._replace(
        addresses=tuple(workers.addresses), file=workers.file, tls=workers.tls, per_server=workers.per_server
    )
    return MixedPool(request, TcpSource(orders), workers.host_load)


def orders_of(request: PoolRequest, max_bytes: int, secret: bytes | None) -> Orders:
    """Return orders to the receiver of a pool, for workers that share a secret; no addresses yet."""
    options = request.options
    card = run_card(request.identity, request.runner) | {"max_bytes": max_bytes, "trace": options.trace}
    return Orders(card, min(_MOST_SEGMENTS, options.prefetch_factor + _MORE_SEGMENTS), secret)


class TcpChannel(PipeChannel):
    """Channel to a worker behind TCP, by way of the receiver.

    Args:
        pair: the trainer's socket of the pair.
        segments: segments for large answers.
        max_bytes: size of an answer, at most.
        codec: module whose ``pack`` and ``unpack`` are those of jobs and answers.
    """

    def __init__(self, pair: socket.socket, segments: Segments, max_bytes: int, codec: ModuleType):
        super().__init__(pair, SegmentReader(segments))
        self._codec = codec
        self._frames = frames(pair, [max_bytes])
        self.tickets: Collection[int] = ()  # of the jobs that the worker has
        self.is_silent = False

    def send(self, jobs: Sequence[tuple[int, Any]], *, noted: bool) -> None:
        if released := self._segments.take_released():
            self._unsent += frame(RELEASED, [memoryview(bytes(released))])
        self._unsent += frame(MESSAGE, self._codec.pack((jobs, noted)))
        self.flush()

    def receive(self) -> tuple[Any, int] | None:
        while (got := next(self._frames)) is not None and got.kind in (BEAT, SILENT):
            self.is_silent = got.kind == SILENT
        if got is None:
            return None
        body = got.body if got.kind == MESSAGE else self._segments.view(*PLACE.unpack(got.body))
        return answers_in(body, self.tickets, self._codec), body.nbytes


def answers_in(
    body: memoryview, tickets: Collection[int], codec: ModuleType = wire
) -> tuple[Sequence[Answer], Any, Sequence[Times]]:
    """Return the answers in a message of a worker, or its report of failures, and times.

    Args:
        body: the message.
        tickets: tickets of the jobs that the worker has.
        codec: see :class:`TcpChannel`.

    Raises:
        FrameError: the message has no answers to these jobs.
        UnknownClassError: see :func:`energon_lite.extras.wire.unpack`.
    """
    try:
        answers, seconds, said = codec.unpack(body)
        answered = [ticket for ticket, _, _ in answers]
        of_jobs = len({*answered}) == len(answered) and all(ticket in tickets for ticket in answered)
        whole = all(len(value) == 5 if ok else isinstance(value, BaseException) for _, ok, value in answers)
        kinds: tuple[type, ...] = (float,) if answers else (Failure, dict)
        if not (of_jobs and whole and isinstance(seconds, kinds) and all(isinstance(one, Times) for one in said)):
            raise TypeError("it answers none of the worker's jobs")
        return answers, seconds, said
    except wire.UnknownClassError:
        raise
    except Exception as error:
        raise FrameError(f"a message that cannot be read: {error}") from None


class TcpHandle(RemoteHandle):
    """Handle of a worker behind TCP."""

    channel: TcpChannel

    def __init__(self, number: int, address: str, pair: socket.socket, channel: TcpChannel):
        super().__init__(number, channel, address)
        channel.tickets = self.tickets
        trainer_ends.add(channel)
        self.address = address
        self._pair = pair

    def look(self) -> None:
        self.is_silent = self.channel.is_silent

    def close(self) -> None:
        with suppress(OSError):
            self._pair.shutdown(socket.SHUT_RDWR)  # a process that was forked may have a copy of it
        super().close()


class TcpSource(WorkerSource):
    """Source of workers behind TCP. A thread keeps a receiver running, and takes its reports.

    Args:
        orders: orders to the receiver.
    """

    #: See :class:`TcpChannel`.
    codec: ClassVar[ModuleType] = wire

    def __init__(self, orders: Orders):
        super().__init__()
        self._orders = orders
        self._control: Connection | None = None  # to the last receiver; closed when that has ended
        self._lock = threading.RLock()
        self._numbers = itertools.count(1000)
        self._closed = threading.Event()
        self._refusal: RefusedError | None = None
        self._refused = 0.0  # time of the first refusal since a worker joined
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        threading.Thread(target=self._run, name="energon-lite-receiver", daemon=True).start()

    def refusal(self) -> UsageError | None:
        refusal, self._refusal = self._refusal, None
        return refusal

    def close(self) -> None:
        self._closed.set()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        super().close()

    def connect_to(self, addresses: Sequence[str]) -> None:
        """Have the receiver connect to these addresses in place of earlier ones; may be called by any thread."""
        with self._lock:
            self._orders = self._orders._replace(addresses=addresses)
            if self._control is not None:
                with suppress(OSError):  # another receiver will be told
                    self._control.send(self._orders)

    # -- in threads -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed.is_set():
            ours, theirs = Pipe()
            try:
                with theirs:
                    self._process = process = _started(theirs)
            except OSError as error:
                self._give_up(RefusedError(f"the process that receives from servers cannot be started: {error}"))
                return
            reports = threading.Thread(target=self._take_reports, args=(ours,), daemon=True)
            reports.start()
            if self._closed.is_set():
                process.kill()
            with suppress(ChildProcessError, AttributeError):  # it is waited for elsewhere; or the system has no waitid
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
                process.kill()  # a receiver that is stopped would stop all workers
            status = process.wait()
            with socket.socket(fileno=os.dup(ours.fileno())) as pipe:
                pipe.shutdown(socket.SHUT_RDWR)  # the thread reads nothing more
            reports.join()
            with self._lock:
                ours.close()
            if not self._closed.wait(_AGAIN):
                text = f"the process that receives from servers ended with status {status}"
                logger.warning("%s; it is replaced", text)
                if status > 0:
                    self._give_up(RefusedError(text))
        self.close()

    def _give_up(self, refusal: RefusedError) -> None:
        self._refusal = refusal
        self.joined.wake()

    def _take_reports(self, control: Connection) -> None:
        with suppress(EOFError, OSError):
            with self._lock:
                control.send(self._orders)
                self._control = control
            while not self._closed.is_set():
                self._take_report(control.recv(), control)

    def _take_report(self, report: Report, control: Connection) -> None:
        descriptors = [recv_handle(control) for _ in range(report.descriptors)]
        if report.refusal is not None:
            self._refused = self._refused or time.monotonic()
            if time.monotonic() - self._refused > _OTHERS:
                self._give_up(report.refusal)
        if descriptors:
            pair, segments = socket.socket(fileno=descriptors[0]), Segments(0, *descriptors[1:])
            channel = TcpChannel(pair, segments, self._orders.card["max_bytes"], self.codec)
            self._refusal, self._refused = None, 0.0
            self._join(TcpHandle(next(self._numbers), report.text, pair, channel))
        elif report.text:
            logger.warning("%s", report.text)

    def _join(self, worker: TcpHandle) -> None:
        """Let a worker join the pool."""
        self.joined.put(worker, 0)


def _started(control: Connection) -> subprocess.Popen[bytes]:
    """Start a receiver. It shares nothing with this process but a pipe, so any process may have one."""
    code = f"import sys; sys.path[:] = {sys.path!r}; from {receiver.__name__} import main; main()"
    command = [sys.executable, "-c", code, str(control.fileno())]
    return subprocess.Popen(command, pass_fds=[control.fileno()], stdin=subprocess.DEVNULL, start_new_session=True)
