"""Server of workers, ``energon-lite serve``: processes that run jobs of trainers on other machines, a connection each.

A worker process shakes hands with a trainer, runs its jobs until the connection ends, and ends; the server then forks
another one. So no state is left of a trainer, and a job that hangs or dies costs a connection only. An actor of Ray is
such a process, too: it has a listener of its own.
"""

from __future__ import annotations

import inspect
import logging
import mmap
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from queue import Empty, Queue
from types import ModuleType
from typing import Any

import click

from energon_lite.cli import parse_bytes
from energon_lite.errors import UsageError
from energon_lite.extras import wire
from energon_lite.extras.remote_workers.described import TlsFiles, host_and_port, is_loopback, secret_in
from energon_lite.extras.remote_workers.protocol import (
    BEAT,
    MESSAGE,
    Card,
    FrameConnection,
    FrameError,
    RefusedError,
    frame,
    greet,
    keep_alive,
)
from energon_lite.extras.remote_workers.run_card import check_card, run_card
from energon_lite.imports import find_named
from energon_lite.loading.executors.transport import Message
from energon_lite.loading.executors.worker_process import (
    TrainerEnd,
    can_kernel_watch,
    end_with_trainer,
    prefetch,
    renew_streams,
    run_jobs,
)
from energon_lite.loading.iterators.dataset import SavableDataset
from energon_lite.loading.makers.batch_runner import Job
from energon_lite.loading.makers.chunk_job import ChunkJob
from energon_lite.loading.makers.job_runner import JobRunner
from energon_lite.loading.makers.observers import StageTimer
from energon_lite.loading.makers.outcomes import FailureLog
from energon_lite.topology import usable_cores
from energon_lite.worker_config import WorkerConfig, set_worker_number

logger = logging.getLogger(__name__)

#: Seconds between two signs of life.
_BEAT = 0.15
#: Answers that wait to be sent, at most.
_WAITING = 2
#: Seconds of each step of TLS in a handshake, and for the end of a worker that was killed, at most.
_PATIENCE = 5.0
#: Seconds that a restart of a worker is delayed if workers end at once.
_CALM = 0.05


class TrainerListener:
    """Socket at which workers wait for their trainers.

    Args:
        host, port: address to listen at; port 0: any free one.
        runner: runner of the trainers' jobs.
        check: refuses what a trainer runs, with an error.
        codec: module whose ``pack`` and ``unpack`` are those of jobs and answers.
        workers, secret, tls, max_bytes: see :class:`JobServer`.

    Attributes:
        address: ``host:port``.
    """

    def __init__(
        self,
        host: str,
        port: int,
        runner: JobRunner,
        check: Callable[[Card], None],
        codec: ModuleType,
        *,
        workers: int = 1,
        secret: bytes | None,
        tls: TlsFiles | None = None,
        max_bytes: int,
    ):
        self._runner = runner
        self._check = check
        self._codec = codec
        self._workers = workers
        self._secret = secret
        self._tls = None if tls is None else tls.context(server=True)
        self._max_bytes = max_bytes
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family)
        self.address = f"{f'[{host}]' if ':' in host else host}:{self._listener.getsockname()[1]}"
        self._bad = memoryview(mmap.mmap(-1, 8 * workers)).cast("Q")  # refused connections of each worker

    @property
    def refused(self) -> int:
        """Number of connections that were closed because of their handshake or their frames."""
        return sum(self._bad)

    def serve(self, number: int, place: int = 0) -> None:
        """Accept connections until one is a trainer's; run its jobs until it ends. Called in a worker.

        Args:
            number: number of the worker in traces.
            place: its place among those that wait here.
        """
        runner = self._runner
        while True:
            connection, peer = self._listener.accept()
            with connection:
                try:
                    connection, card = self._greeted(connection)
                except (RefusedError, EOFError, OSError) as error:
                    self._count(place, peer[0], error)
                    continue
                try:
                    end = _Connection(connection, runner, min(int(card["max_bytes"]), self._max_bytes), self._codec)
                    run_jobs(end, runner, (StageTimer(runner.leaves, number),) if card.get("trace") else ())
                except FrameError as error:
                    self._count(place, peer[0], error)
                except (EOFError, OSError):
                    pass  # the trainer has closed the connection, or has ended
                except Exception:
                    logger.exception("a worker ends because of an error outside of its jobs")
                return

    def _count(self, place: int, peer: str, error: BaseException) -> None:
        """Count a connection that is closed because of what came through it."""
        self._bad[place] += 1
        reason = str(error).split("\n")[0] or type(error).__name__
        logger.warning("a connection of %s is closed: %s (%d until now)", peer, reason, self.refused)

    def _greeted(self, connection: socket.socket) -> tuple[socket.socket, dict[str, Any]]:
        """Shake hands with a trainer. Return the connection, with TLS if it is used, and what the trainer runs.

        Raises:
            RefusedError, EOFError, OSError: the other side is no trainer of this run.
        """
        keep_alive(connection)
        connection.settimeout(_PATIENCE)
        if self._tls is not None:
            connection = self._tls.wrap_socket(connection, server_side=True)
        return connection, greet(connection, self._secret, self._check, {"workers": self._workers})


class JobServer(TrainerListener):
    """Workers that run the jobs of a data set for trainers.

    Args:
        dataset: data set of the jobs; trainers have the same one.
        host, port: address to listen at; port 0: any free one.
        workers: number of worker processes.
        secret: secret that trainers know.
        tls: certificates, in place of the secret, or with it.
        max_bytes: size of a message of a trainer, at most.

    Attributes:
        address: ``host:port``.

    Raises:
        UsageError: other machines can reach the address, and there is neither a secret nor TLS.

    Example:
        >>> with JobServer(dataset, "127.0.0.1", 0, workers=4) as server:
        ...     server.run()
    """

    def __init__(
        self,
        dataset: SavableDataset,
        host: str,
        port: int,
        *,
        workers: int = 1,
        secret: bytes | None = None,
        tls: TlsFiles | None = None,
        max_bytes: int = 1 << 30,
    ):
        if secret is None and tls is None and not is_loopback(host):
            raise UsageError(
                f"a server at {host}, which other machines can reach, without a secret or TLS",
                fix="give --secret-file (openssl rand -hex 32 > secret), or --tls-...; or listen at 127.0.0.1",
            )
        runs = dataset.resolved
        self._identity = runs.identity
        runner = runs.runner()
        check = partial(check_card, ours=run_card(runs.identity.to_plain(), runner), identity=runs.identity)
        super().__init__(host, port, runner, check, wire, workers=workers, secret=secret, tls=tls, max_bytes=max_bytes)
        self._config = dataset.worker_config
        self._processes: dict[int, BaseProcess] = {}

    def run(self) -> None:
        """Run workers, and replace those that end, until an interrupt or :meth:`close`."""
        logger.info("%d workers at %s, fingerprint %s", self._workers, self.address, self._identity.fingerprint)
        try:
            while self._listener.fileno() >= 0:
                self._tend()
                wait([process.sentinel for process in self._processes.values()], 0.5)
        finally:
            self.close()

    def _tend(self) -> None:
        """Start the workers that are missing."""
        context = multiprocessing.get_context("fork")
        for number in range(self._workers):
            process = self._processes.get(number)
            if process is not None and process.is_alive():
                continue
            if process is not None and process.exitcode:
                logger.warning("worker %d ended with status %s; it is replaced", number, process.exitcode)
                time.sleep(_CALM)
            name = f"energon-lite-server-{number}"
            made = context.Process(target=self._work, args=(number, os.getpid()), name=name, daemon=True)
            made.start()
            self._processes[number] = made

    def close(self) -> None:
        """End all workers; may be called twice."""
        self._listener.close()
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.join(_PATIENCE)  # one that waits for the system does not end
        self._processes.clear()

    def __enter__(self) -> JobServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- in a worker ----------------------------------------------------------------------------------------------

    def _work(self, number: int, server: int) -> None:
        """Run the jobs of a trainer."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        renew_streams()
        set_worker_number(number)
        end_with_trainer(server, by_kernel=can_kernel_watch("fork"))
        self._runner.services.failures = FailureLog()
        self._runner.services.worker_config = self._config
        self.serve(number, number)
        os._exit(0)


def jobs_in(body: memoryview, codec: ModuleType = wire) -> tuple[list[tuple[int, Job]], bool]:
    """Return the jobs in a message of a trainer, with their tickets, and whether to note each step of them.

    Raises:
        FrameError: the message has no jobs.
    """
    try:
        jobs, noted = codec.unpack(body)
        if not jobs or not all(type(ticket) is int and isinstance(job, (Job, ChunkJob)) for ticket, job in jobs):
            raise TypeError("there are no jobs in it")
        return jobs, bool(noted)
    except Exception as error:
        raise FrameError(f"a message that cannot be read: {error}") from None


class _Connection(TrainerEnd):
    """A worker's end of a connection. One thread receives and works; another one sends answers, and signs of life.

    Args:
        connection: the connection, after the handshake.
        runner: runner of the jobs.
        max_bytes: size of a message, at most.
        codec: see :class:`TrainerListener`.
    """

    def __init__(self, connection: socket.socket, runner: JobRunner, max_bytes: int, codec: ModuleType):
        self._connection = FrameConnection(connection, max_bytes)
        self._runner = runner
        self._max_bytes = max_bytes
        self._codec = codec
        self._answers: Queue[memoryview] = Queue(_WAITING)
        threading.Thread(target=self._send_all, name="energon-lite-answers", daemon=True).start()

    def next(self) -> tuple[Sequence[tuple[int, Job]], bool]:
        got = self._connection.receive()
        if got.kind != MESSAGE:
            raise FrameError("a frame out of turn")
        jobs, noted = jobs_in(got.body, self._codec)
        if self._runner.reads_ahead:
            prefetch(self._runner, jobs)
        return jobs, noted

    def pack(self, obj: Any) -> Message:
        message: Message = self._codec.pack(obj)
        size = sum(part.nbytes for part in message)
        if size > self._max_bytes:
            raise ValueError(f"{size:,} bytes; max_bytes of TcpWorkers and of the server allows {self._max_bytes:,}")
        return message

    def unpack(self, memory: memoryview) -> Any:
        return self._codec.unpack(memory)

    def send(self, message: Message) -> None:
        # A copy, because a hook may use the memory of its tensors again.
        self._answers.put(memoryview(b"".join(frame(MESSAGE, message))))

    def _send_all(self) -> None:
        """Send what waits; and a sign of life from time to time. End the process if the trainer is gone."""
        try:
            while True:
                try:
                    parts = [self._answers.get(timeout=_BEAT)]
                except Empty:
                    parts = frame(BEAT)
                self._connection.send(parts)
        except (OSError, ValueError):
            os._exit(0)


# -- the command ------------------------------------------------------------------------------------------------------


@click.command(name="serve", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("dataset", metavar="MODULE:FUNCTION")
@click.option("--listen", required=True, metavar="HOST:PORT", help="Address to listen at.")
@click.option("--workers", type=click.IntRange(min=1), help="Worker processes.  [default: one for each core]")
@click.option("--secret-file", type=click.Path(), help="File with the secret that trainers know.")
@click.option("--tls-certificate", type=click.Path(), help="Certificate of this server, PEM.")
@click.option("--tls-key", type=click.Path(), help="Its key, PEM.")
@click.option("--tls-authority", type=click.Path(), help="Authority that has signed the trainers' certificates, PEM.")
@click.option("--seed-offset", type=int, default=0, show_default=True, help="As in the trainer's WorkerConfig.")
@click.option("--max-bytes", default="1GiB", show_default=True, help="Size of a message of a trainer, at most.")
def command(dataset: str, listen: str, workers: int | None, secret_file: str | None, **given: Any) -> None:
    """Run workers for trainers on other machines.

    MODULE:FUNCTION returns the data set that the trainer loads. If it takes an argument, it gets a WorkerConfig.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    host, port = host_and_port(listen)
    files = [given[f"tls_{name}"] for name in ("certificate", "key", "authority")]
    if any(files) and not all(files):
        raise UsageError("some files of TLS are missing", fix="give --tls-certificate, --tls-key and --tls-authority")
    tls = TlsFiles(certificate=files[0], key=files[1], authority=files[2]) if all(files) else None
    secret = secret_in(secret_file)
    server = JobServer(
        _made(dataset, given["seed_offset"]),
        host,
        port,
        workers=workers or usable_cores(),
        secret=secret,
        tls=tls,
        max_bytes=parse_bytes(given["max_bytes"]),
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with suppress(KeyboardInterrupt):
        server.run()


def _made(text: str, seed_offset: int) -> SavableDataset:
    """Return the data set that a function makes."""
    make: Any = find_named(
        text, option="the argument", form="MODULE:FUNCTION", example="my_train:make_dataset", wanted="the function"
    )
    wire.SCRIPTS.append(text.partition(":")[0])
    config = WorkerConfig(0, 1, seed_offset=seed_offset)
    made = make(config) if inspect.signature(make).parameters else make()
    if not isinstance(made, SavableDataset):
        raise UsageError(
            f"{text} returned a {type(made).__name__}", fix="return what get_train_dataset or get_val_dataset returned"
        )
    return made
