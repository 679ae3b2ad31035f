"""How far ahead workers work, and that nothing they do, or do not do, holds their trainer up; forks of busy ones."""

from __future__ import annotations

import ctypes
import errno
import itertools
import logging
import multiprocessing
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from energon_lite import TaskEncoder
from energon_lite.errors import UsageError, WorkerError
from energon_lite.loading.executors import worker_handle, worker_process
from energon_lite.loading.executors.worker_process import renew_streams
from tests.testing import is_alive, nightly_but, take, told_of, train_loader, until

_loader = partial(train_loader, batch_size=2)


class Sized(TaskEncoder):
    """Batches of so many bytes, that take a worker long enough not to be tiny."""

    def __init__(self, size: int):
        self.size = size

    def batch(self, samples: list[Any]) -> Any:
        time.sleep(0.01)
        return torch.zeros(self.size, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("factor", "size"), nightly_but({0, 4, 8, 9}, itertools.product([1, 2, 5, 20], [100, 10_000, 300_000]))
)
def test_batches_are_ready_as_far_ahead_as_was_asked_for(leaf_of: Any, factor: int, size: int) -> None:
    with _loader(leaf_of(50), 2, task_encoder=Sized(size), prefetch_factor=factor) as loader:
        next(iter(loader))
        # The trainer computes; nobody talks to the workers in the meantime.
        assert until(lambda: loader.stats()["queue"]["ready"] >= 2 * factor)
        assert loader.stats()["queue"]["pending"] <= 2


class SometimesLong(Sized):
    """Some batches take as long as many others."""

    def encode_batch(self, batch: Any) -> Any:
        time.sleep(0.3 if self.current_batch_index % 10 == 9 else 0)
        return batch


def test_while_a_long_job_is_waited_for_others_do_more_ahead(leaf_of: Any) -> None:
    size = 300_000
    with _loader(leaf_of(50), 2, task_encoder=SometimesLong(size), max_bytes_in_flight=40 * size) as loader:
        take(loader, 25)
        queue = loader.stats()["queue"]
        assert queue["ready"] + queue["pending"] >= 8  # not four
        for _ in zip(range(40), loader, strict=False):
            assert loader.stats()["queue"]["bytes_in_flight"] <= 40 * size


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", nightly_but({1}, [2, 20_000]))
def test_a_stopped_worker_is_replaced_also_where_a_job_does_not_fit_into_its_pipe(
    leaf_of: Any, batch_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    """It has no stack to show."""
    options: dict[str, Any] = {"watchdog_timeout_seconds": 3.0, "on_timeout": "replace", "prefetch_factor": 1}
    with _loader(leaf_of(50), 1, batch_size=batch_size, **options) as loader:
        take(loader, 1)
        assert until(lambda: not loader.stats()["queue"]["pending"])
        (worker,) = loader._workers.executor()._workers
        os.kill(worker.process.pid, signal.SIGSTOP)
        with caplog.at_level(logging.WARNING):
            assert [len(batch.__key__) for batch in take(loader, 3)] == [batch_size] * 3
        assert loader.stats()["worker_deaths"] >= 1  # a new one may be slow, too
    assert "it does not answer" in caplog.text


class Stays(TaskEncoder):
    """Never returns, and may keep Python's lock."""

    def __init__(self, started: str, *, lock: bool):
        self.started, self.lock = started, lock

    def encode_batch(self, batch: Any) -> Any:
        if self.current_batch_index:
            Path(self.started, str(os.getpid())).touch()
            (ctypes.PyDLL if self.lock else ctypes.CDLL)(None).sleep(1000)
        return batch


@pytest.mark.slow
@pytest.mark.parametrize("method", nightly_but({0, 2}, ["fork", "forkserver", "spawn"]))
def test_a_worker_ends_with_its_trainer_in_a_hook_that_never_returns(leaf_of: Any, tmp_path: Path, method: Any) -> None:
    def train() -> None:
        forkserver._forkserver.__init__()  # type: ignore[misc]  # the tests' own, if there is one, serves no other
        encoder = Stays(str(tmp_path), lock=method != "forkserver")
        list(_loader(leaf_of(50), 2, task_encoder=encoder, start_method=method))

    trainer = multiprocessing.get_context("fork").Process(target=train)
    trainer.start()
    assert until(lambda: len(list(tmp_path.iterdir())) == 2)
    workers = [int(one.name) for one in tmp_path.iterdir()]
    assert all(map(is_alive, workers))
    trainer.kill()
    trainer.join()
    assert until(lambda: not any(map(is_alive, workers)))


@pytest.mark.slow
def test_a_fork_server_serves_no_forked_process(leaf_of: Any) -> None:
    with _loader(leaf_of(50), 1, start_method="forkserver") as loader:
        next(iter(loader))

    def train() -> None:
        with pytest.raises(UsageError, match="use start_method='fork' or 'spawn'"):
            next(iter(_loader(leaf_of(50), 1, start_method="forkserver")))
        os._exit(5)

    assert _exit_code(train) == 5


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True])
def test_the_fork_server_of_a_forked_process_takes_nothing_with_it(leaf_of: Any, killed: bool) -> None:
    """Both processes would keep their sockets in the same folder."""
    folder = multiprocessing.util.get_temp_dir()

    def train() -> None:
        forkserver._forkserver.__init__()  # type: ignore[misc]  # as if the tests had none
        loader = _loader(leaf_of(50), 1, start_method="forkserver")
        next(iter(loader))
        send.send((forkserver._forkserver._forkserver_pid, forkserver._forkserver._forkserver_address))
        if killed:
            os.kill(os.getpid(), signal.SIGKILL)

    receive, send = multiprocessing.Pipe(duplex=False)
    trainer = multiprocessing.get_context("fork").Process(target=train)
    trainer.start()
    server, address = receive.recv()
    trainer.join()
    assert until(lambda: not is_alive(server))
    assert not Path(address).parent.exists()
    assert Path(folder).exists()
    with _loader(leaf_of(50), 1, start_method="forkserver") as loader:
        next(iter(loader))


@pytest.mark.parametrize("middle", [False, True])
def test_a_trainer_that_is_a_process_of_multiprocessing_ends(leaf_of: Any, middle: bool) -> None:
    """Such a process runs no exit functions but those of multiprocessing."""

    def train() -> None:
        batches = iter(_loader(leaf_of(50), 2, task_encoder=Sized(100)))
        next(batches)
        if middle:
            raise SystemExit(7)

    assert _exit_code(train) == (7 if middle else 0)


def _exit_code(work: Callable[[], None]) -> int | None:
    """Do ``work`` in a forked process; its exit code."""
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(120)
    return process.exitcode


def test_a_forked_copy_of_a_loader_is_refused(leaf_of: Any) -> None:
    """It would take the answers of its parent's workers."""
    with _loader(leaf_of(50), 2) as loader:
        batches = iter(loader)
        first = next(batches)

        def use() -> None:
            with pytest.raises(UsageError, match="forked after its workers were started"):
                next(batches)
            os._exit(5)

        assert _exit_code(use) == 5
        assert next(batches).__key__ != first.__key__


class Slow(TaskEncoder):
    """Waits in the second batch until this is told."""

    def __init__(self, caplog: pytest.LogCaptureFixture):
        self.caplog = caplog

    def encode_batch(self, batch: Any) -> Any:
        if self.current_batch_index == 1:
            until(lambda: told_of(self.caplog, "for longer than"))
        return batch


@pytest.mark.parametrize("reaction", ["warn", "replace", "raise"])
def test_without_workers_a_hook_that_takes_long_is_shown(
    leaf_of: Any, reaction: Any, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"watchdog_timeout_seconds": 0.5, "on_timeout": reaction}
    with caplog.at_level(logging.WARNING), _loader(leaf_of(50), 0, task_encoder=Slow(caplog), **options) as loader:
        take(loader, 1)
        told = pytest.raises(WorkerError, match=r"longer than 0\.5 s, in this process")
        with told if reaction == "raise" else nullcontext():
            take(loader, 1)
    (told,) = told_of(caplog, "for longer than 0.5 s")
    assert "in encode_batch" in told and "in until" in told
    assert ("no worker to be replaced" in told) == (reaction == "replace")


@pytest.mark.slow
def test_a_worker_that_outlives_its_kill_holds_nobody_up(
    leaf_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that waits for a file server that is gone cannot be killed; multiprocessing would wait for it at the end."""
    steps: list[tuple[str, int | None]] = []
    join = BaseProcess.join
    monkeypatch.setattr(worker_handle, "_KILLED", 0.1)
    monkeypatch.setattr(BaseProcess, "kill", lambda self: steps.append(("kill", self.pid)))
    monkeypatch.setattr(
        BaseProcess, "join", lambda self, timeout=None: (steps.append(("join", self.pid)), join(self, timeout))[1]
    )
    loader = _loader(leaf_of(50), 2, task_encoder=Stays(str(tmp_path), lock=False))
    next(iter(loader))
    assert until(lambda: len(list(tmp_path.iterdir())) == 2)
    pids = [int(path.name) for path in tmp_path.iterdir()]
    try:
        loader.close()
        own = [step for step, pid in steps if pid in pids]  # not those of loaders that are collected now
        assert own == ["join", "join", "kill", "kill", "join", "join"]  # nobody's end is waited for alone
        assert not {process.pid for process in multiprocessing.active_children()} & set(pids)
        assert all(f"(pid {pid})" in caplog.text for pid in pids)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_why_a_worker_ends_is_said(leaf_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the system in the worker's own work is no sign that its trainer is gone."""

    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(worker_process, "_run", full)
    logger, handler = logging.getLogger("energon_lite"), logging.FileHandler(tmp_path / "log")
    logger.addHandler(handler)
    try:
        logger.warning("parent")
        with _loader(leaf_of(50), 1) as loader, pytest.raises(WorkerError, match="exit code 1"):
            next(iter(loader))
    finally:
        logger.removeHandler(handler)
        handler.close()
    told = (tmp_path / "log").read_text()
    assert told.startswith("parent\n") and "No space left on device" in told


@contextmanager
def held(stream: IO[str]) -> Iterator[None]:
    """Another thread is in the middle of a write, for it writes to a pipe that nobody reads."""

    def write() -> None:
        with suppress(BrokenPipeError):
            stream.buffer.write(b"x" * (1 << 20))  # type: ignore[attr-defined]

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    full = select.poll()
    full.register(stream, select.POLLOUT)
    assert until(lambda: not full.poll(0))
    yield


@pytest.mark.parametrize("renewed", [True, False])
def test_a_child_can_write_where_a_thread_of_its_parent_was_writing(renewed: bool, tmp_path: Path) -> None:
    """Without new streams the child hangs: the test shows both."""
    reading, writing = os.pipe()
    stream = os.fdopen(writing, "w", encoding="utf-8")
    handler = logging.StreamHandler(stream)
    logger = logging.getLogger("test.forked")
    logger.addHandler(handler)
    try:
        with held(stream):
            child = os.fork()
            if not child:
                if renewed:
                    renew_streams()
                    os.dup2(os.open(tmp_path / "log", os.O_CREAT | os.O_WRONLY), writing)
                logger.warning("here")
                os._exit(0)
            done = threading.Event()
            waiting = threading.Thread(target=lambda: (os.waitpid(child, 0), done.set()), daemon=True)
            waiting.start()
            assert done.wait(120 if renewed else 1) == renewed
            if renewed:
                assert (tmp_path / "log").read_text().startswith("here\n")
            else:
                os.kill(child, 9)
            waiting.join()
    finally:
        logger.removeHandler(handler)
        os.close(reading)  # the thread gets EPIPE and ends
