"""Servers of workers as processes of their own, on loopback."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from energon_lite import SavableDataset, WorkerConfig, get_savable_loader
from energon_lite.extras.remote_workers import JobServer, TcpWorkers
from tests.testing import ALONE, until


class Served:
    """A server in a process of its own.

    Args:
        dataset: its data set; the process is forked, so it may have any hooks.
        port: 0: any.
    """

    def __init__(
        self, dataset: SavableDataset, workers: int = 2, port: int = 0, host: str = "127.0.0.1", **options: Any
    ):
        server = JobServer(dataset, host, port, workers=workers, **options)
        self.address, self._refused = server.address, server
        self.process = multiprocessing.get_context("fork").Process(target=server.run)
        self.process.start()
        server._listener.close()

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    @property
    def refused(self) -> int:
        """Connections that it has closed because of what came through them."""
        return self._refused.refused

    @property
    def workers(self) -> list[int]:
        """Process ids of its workers."""
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def signal(self, number: int) -> None:
        """Send a signal to the server and its workers."""
        for pid in [*self.workers, self.process.pid or 0]:
            with suppress(ProcessLookupError):  # a worker whose trainer is gone has ended meanwhile
                os.kill(pid, number)

    def kill(self) -> None:
        """Kill the server; its workers end with it."""
        self.process.kill()
        self.process.join()

    def tcp(self, **options: Any) -> TcpWorkers:
        return TcpWorkers([self.address], **options)


@contextmanager
def serving(dataset: SavableDataset, workers: int = 2, **options: Any) -> Iterator[Served]:
    """A server that is killed at the end."""
    served = Served(dataset, workers, **options)
    try:
        yield served
    finally:
        if served.process.is_alive():
            served.signal(signal.SIGCONT)
        served.kill()


@contextmanager
def served_loader(
    dataset: Callable[[WorkerConfig], SavableDataset], local: int = 0, workers: int = 2, **tcp: Any
) -> Iterator[Any]:
    """A loader of what ``dataset`` makes, with workers of a server, and local ones."""
    with serving(dataset(ALONE), workers) as served:
        with get_savable_loader(dataset(WorkerConfig(0, 1, local, workers=served.tcp(**tcp)))) as loader:
            yield loader


def pool_with(loader: Any, workers: int) -> Any:
    """The pool of a loader, when it has so many workers."""
    pool = loader._workers.executor()
    assert until(lambda: (pool.load(), len(pool._workers) == workers)[1])
    return pool
