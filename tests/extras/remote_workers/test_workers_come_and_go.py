"""Servers that are killed, stopped, cut off and started during a run: nothing is lost, doubled or moved, or late."""

from __future__ import annotations

import logging
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from energon_lite import SavableDataset, TaskEncoder, WorkerConfig, get_savable_loader, get_train_dataset
from energon_lite.errors import FatalSampleError
from energon_lite.extras.remote_workers import TcpWorkers, mixed_pool
from energon_lite.extras.remote_workers.mixed_pool import MixedPool, Pace, RemoteHandle
from energon_lite.loading.executors.channels import PipeChannel
from energon_lite.loading.executors.executor import PoolOptions
from energon_lite.loading.executors.segments import mapped_at
from tests.extras.remote_workers.served import Served, serving
from tests.testing import ALONE, in_time, take, until


class Slow(TaskEncoder):
    """Takes its time, and makes batches that are larger than a packet."""

    def __init__(self, seconds: float = 0.002):
        self.seconds = seconds

    def encode_sample(self, sample: Any) -> dict[str, Any]:
        time.sleep(self.seconds)
        numbers = torch.full((20_000,), float(self.rng.random()))
        return {"__key__": sample.__key__, "__restore_key__": sample.__restore_key__, "x": numbers}


def _dataset(leaf: Path, config: WorkerConfig, seconds: float = 0.002, **options: Any) -> SavableDataset:
    arguments = {"batch_size": 2, "repeat": False} | options
    return get_train_dataset(leaf, worker_config=config, task_encoder=Slow(seconds), **arguments)


def _digest(batch: Any) -> tuple[Any, ...]:
    return (*batch["__key__"], float(batch["x"].double().sum()))


def _expected(leaf: Path, **options: Any) -> list[Any]:
    with get_savable_loader(_dataset(leaf, ALONE, 0.0, **options)) as loader:
        return [_digest(batch) for batch in loader]


@pytest.mark.parametrize("local", [0, 1])
def test_an_epoch_under_fire(leaf_of: Any, tmp_path: Path, local: int, caplog: pytest.LogCaptureFixture) -> None:
    """Two of three servers are hit every 0.2 s; one lives, so that a batch comes within a second."""
    caplog.set_level(logging.ERROR, logger="energon_lite")
    leaf, addresses = leaf_of(400), tmp_path / "servers"
    servers = [Served(_dataset(leaf, ALONE), 1) for _ in range(3)]
    addresses.write_text("\n".join(served.address for served in servers))
    draw, over = random.Random(local), threading.Event()

    def fire() -> None:
        while not over.wait(0.2):
            place = draw.randrange(2)
            served = servers[place]
            served.signal(signal.SIGCONT)
            if draw.random() < 0.5:
                served.signal(signal.SIGSTOP)
            else:
                served.kill()
                servers[place] = Served(_dataset(leaf, ALONE), 1)
                addresses.write_text("\n".join(served.address for served in servers))

    config = WorkerConfig(0, 1, local, workers=TcpWorkers(file=addresses))
    found, waits, shooter = [], [], threading.Thread(target=fire)
    try:
        with get_savable_loader(_dataset(leaf, config)) as loader:
            iterator = iter(loader)
            found.append(_digest(next(iterator)))
            began = time.monotonic()
            for batch in iterator:
                waits.append(time.monotonic() - began)
                if len(waits) == 40:
                    shooter.start()
                found.append(_digest(batch))
                time.sleep(0.005)
                began = time.monotonic()
    finally:
        over.set()
        if shooter.ident:
            shooter.join()
        for served in servers:
            served.signal(signal.SIGCONT)
            served.kill()
    assert found == _expected(leaf)
    assert max(waits) < 1.5 + 10 * max(waits[20:40])  # a second, and what this machine needs without the fire


def test_jobs_of_a_stopped_worker_run_elsewhere(leaf_of: Any, caplog: pytest.LogCaptureFixture) -> None:
    leaf = leaf_of(50)
    with serving(_dataset(leaf, ALONE), 1) as one, serving(_dataset(leaf, ALONE), 1) as other:
        config = WorkerConfig(0, 1, workers=TcpWorkers([one.address, other.address]))
        with get_savable_loader(_dataset(leaf, config)) as loader:
            iterator = iter(loader)
            found = [_digest(batch) for batch in take(iterator, 6)]
            pool: Any = loader._workers.executor()
            assert until(lambda: (pool.load(), len(pool._workers) == 2)[1])
            one.signal(signal.SIGSTOP)
            found += [_digest(batch) for batch in take(iterator, 6)]
            assert loader.stats()["worker_deaths"] == 0  # it is not yet dropped
            assert until(lambda: (pool.load(), "is silent" in caplog.text)[1], 60)
            one.signal(signal.SIGCONT)
            found += [_digest(batch) for batch in iterator]
    assert sorted(found) == sorted(_expected(leaf))


def test_all_are_killed_in_the_middle_and_the_run_goes_on_elsewhere(leaf_of: Any) -> None:
    leaf, options = leaf_of(50), {"repeat": True}
    with serving(_dataset(leaf, ALONE, **options)) as served:
        loader = get_savable_loader(_dataset(leaf, WorkerConfig(0, 1, workers=served.tcp()), **options))
        found = [_digest(batch) for batch in take(loader, 40)]
        state = loader.save_state_rank()
        served.kill()
        loader.close()
    with serving(_dataset(leaf, ALONE, **options)) as served:
        config = WorkerConfig(0, 1, workers=served.tcp())
        with get_savable_loader(_dataset(leaf, config, **options)) as loader:
            loader.restore_state_rank(state)
            found += [_digest(batch) for batch in take(loader, 10)]
    with get_savable_loader(_dataset(leaf, ALONE, 0.0, **options)) as loader:
        assert found == [_digest(batch) for batch in take(loader, 50)]


class Fails(Slow):
    def encode_sample(self, sample: Any) -> dict[str, Any]:
        if sample.__key__ == "a-7":
            raise FatalSampleError("seven")
        return super().encode_sample(sample)


class Dies(Slow):
    def encode_sample(self, sample: Any) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGKILL)
        return {}


def _with(encoder: TaskEncoder, leaf: Path, config: WorkerConfig) -> SavableDataset:
    return get_train_dataset(leaf, worker_config=config, task_encoder=encoder, batch_size=2, repeat=False)


def test_errors_of_hooks_arrive(leaf_of: Any) -> None:
    leaf = leaf_of(50)
    with serving(_with(Fails(), leaf, ALONE)) as served:
        with get_savable_loader(_with(Fails(), leaf, WorkerConfig(0, 1, workers=served.tcp()))) as loader:
            with pytest.raises(FatalSampleError, match="seven"):
                list(loader)


def test_a_job_in_which_workers_die_ends_the_run(leaf_of: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, logger="energon_lite")
    leaf = leaf_of(7)
    with serving(_with(Dies(), leaf, ALONE)) as served:
        with get_savable_loader(_with(Dies(), leaf, WorkerConfig(0, 1, workers=served.tcp()))) as loader:
            with pytest.raises(Exception, match="workers died while making the same micro-batch"):
                list(loader)


# -- who gets what ----------------------------------------------------------------------------------------------------


def _makers(leaf: Path, local: int, seconds: float, step: float, batches: int = 60, **tcp: Any) -> list[str]:
    """The kind of worker that made each batch, in a run whose jobs and steps take so long; batches are as alone."""
    makers, found = list[str](), list[Any]()
    with serving(_dataset(leaf, ALONE, seconds, batch_size=1, repeat=True)) as served:
        config = WorkerConfig(0, 1, local, workers=served.tcp(**tcp))
        with get_savable_loader(_dataset(leaf, config, seconds, batch_size=1, repeat=True)) as loader:
            pool: Any = loader._workers.executor()
            send: Callable[..., None] = pool._send

            def noting(worker: Any, tickets: Any) -> None:
                makers.extend([type(worker).__name__] * len(tickets))
                send(worker, tickets)

            pool._send = noting
            assert until(lambda: (pool.load(), len(pool._workers) == 2 + local)[1])
            for batch in islice(loader, batches):
                found.append(_digest(batch))
                time.sleep(step)
    with get_savable_loader(_dataset(leaf, ALONE, 0.0, batch_size=1, repeat=True)) as loader:
        assert found == [_digest(batch) for batch in take(loader, batches)]
    return makers


def test_local_workers_that_keep_up_do_all(leaf_of: Any) -> None:
    runs = ((0.04, 60), (0.4, 20))  # longer steps where others work on this machine
    assert any(set(_makers(leaf_of(50), 2, 0.002, *run)) == {"ProcessHandle"} for run in runs)


def test_the_pace_decides_by_rates() -> None:
    def pace(jobs: list[float], steps: list[float]) -> Pace:
        found, now = Pace(2), 0.0
        for seconds in [9.0, 9.0, *jobs]:  # the first job of each worker opens files
            found.made(seconds)
        for step in steps:
            found.give(now)
            now += step
            found.ask(now)
        return found

    assert not pace([], [1.0]).is_short and not pace([1.0], []).is_short
    assert not pace([1.8], [1.0]).is_short and pace([2.0], [1.0]).is_short
    assert pace([2.6] * 9, [1.0] * 9 + [60.0]).is_short  # a save is no step
    assert not pace([2.0] * 9, [1.0] * 9 + [3.0] * 9).is_short
    assert Pace(0).is_short


def test_what_local_workers_cannot_do_in_time_goes_out(leaf_of: Any) -> None:
    for scale in (1, 5):  # longer jobs where others work on this machine
        makers = _makers(leaf_of(50), 1, 0.02 * scale, 0.01 * scale, 120)
        if makers.count("TcpHandle") > len(makers) // 5 and makers.count("ProcessHandle") > len(makers) // 4:
            return
    raise AssertionError(makers)


def test_a_host_that_is_busy_is_spared(leaf_of: Any) -> None:
    makers = _makers(leaf_of(50), 1, 0.002, 0.02, 60, host_load=0.0)
    assert makers[20:].count("TcpHandle") > 10


class SlowHere(Slow):
    """Takes minutes for a batch in the process that has the number."""

    def __init__(self, folder: str):
        super().__init__(0.005)
        self.folder = folder

    def encode_sample(self, sample: Any) -> dict[str, Any]:
        try:
            Path(self.folder, sample.__key__).mkdir()
        except FileExistsError:  # the second one who tries
            return super().encode_sample(sample)
        if sample.__key__ == "a-7":
            time.sleep(200)
            Path(self.folder, "has slept").mkdir()
        return super().encode_sample(sample)


def test_a_late_job_is_given_to_a_second_worker(leaf_of: Any, tmp_path: Path) -> None:
    leaf, encoder = leaf_of(50), SlowHere(str(tmp_path))
    with serving(_with(encoder, leaf, ALONE)) as served:
        with get_savable_loader(_with(encoder, leaf, WorkerConfig(0, 1, workers=served.tcp()))) as loader:
            assert [_digest(batch) for batch in loader] == _expected(leaf)
        assert not (tmp_path / "has slept").exists()


def test_a_name_in_a_file_is_looked_up_again(leaf_of: Any, tmp_path: Path) -> None:
    leaf, addresses = leaf_of(50), tmp_path / "servers"
    addresses.write_text("# none yet\n")
    config = WorkerConfig(0, 1, workers=TcpWorkers(file=addresses))
    with get_savable_loader(_dataset(leaf, config)) as loader, serving(_dataset(leaf, ALONE)) as served:
        threading.Timer(0.3, addresses.write_text, [f"localhost:{served.port}  # here\n"]).start()
        assert [_digest(batch) for batch in loader] == _expected(leaf)


def test_a_refusal_is_forgotten_when_a_worker_joins(
    leaf_of: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A server of other code comes, and is replaced by one of ours. When that ends, too, the trainer waits."""
    leaf, addresses, servers = leaf_of(50), tmp_path / "servers", list[Served]()

    def serve(batch_size: int = 2) -> None:
        servers.append(Served(_dataset(leaf, ALONE, batch_size=batch_size), 1))
        addresses.write_text("\n".join(served.address for served in servers))

    try:
        serve()
        config = WorkerConfig(0, 1, workers=TcpWorkers(file=addresses))
        with get_savable_loader(_dataset(leaf, config)) as loader:
            iterator = iter(loader)
            found = [_digest(next(iterator))]
            serve(batch_size=3)
            assert until(lambda: f"{servers[1].address} is not used" in caplog.text)
            servers.pop().kill()
            serve()
            pool: Any = loader._workers.executor()
            assert until(lambda: bool(pool.load()) and len(pool._workers) == 2)
            servers.pop(0).kill()
            found += [_digest(batch) for batch in take(iterator, 6)]  # the rest of the first, and some of the second
            servers.pop().kill()
            threading.Timer(0.5, serve).start()
            found += [_digest(batch) for batch in iterator]
    finally:
        for served in servers:
            served.kill()
    assert found == _expected(leaf)


def test_a_server_that_never_answers_holds_nobody_up(leaf_of: Any) -> None:
    leaf = leaf_of(50)
    with socket.create_server(("127.0.0.1", 0)) as silent, serving(_dataset(leaf, ALONE)) as served:
        addresses = [f"127.0.0.1:{silent.getsockname()[1]}", served.address]
        config = WorkerConfig(0, 1, workers=TcpWorkers(addresses))
        with get_savable_loader(_dataset(leaf, config)) as loader:
            assert in_time(lambda: [_digest(batch) for batch in loader], 60) == _expected(leaf)


# -- the process that receives ----------------------------------------------------------------------------------------


def test_large_answers_lie_in_shared_memory(leaf_of: Any) -> None:
    """As long as the trainer keeps few batches; those that find no free segment arrive all the same."""
    leaf = leaf_of(50)
    with serving(_dataset(leaf, ALONE)) as served:
        config = WorkerConfig(0, 1, workers=served.tcp())
        with get_savable_loader(_dataset(leaf, config)) as loader:
            places, found = [], []
            for batch in loader:
                places.append(mapped_at(batch["x"].data_ptr()))
                found.append(_digest(batch))
        with get_savable_loader(_dataset(leaf, config)) as loader:
            kept = list(loader)
    assert all(places) and found == _expected(leaf)
    assert [_digest(batch) for batch in kept] == found
    assert None in [mapped_at(batch["x"].data_ptr()) for batch in kept]


@pytest.mark.parametrize("hit", [signal.SIGKILL, signal.SIGSTOP])
def test_a_receiver_that_is_killed_or_stopped_is_replaced(
    leaf_of: Any, caplog: pytest.LogCaptureFixture, hit: int
) -> None:
    leaf = leaf_of(50)
    with serving(_dataset(leaf, ALONE)) as served:
        with get_savable_loader(_dataset(leaf, WorkerConfig(0, 1, workers=served.tcp()))) as loader:
            found = []
            for number, batch in enumerate(loader):
                found.append(_digest(batch))
                if number == 5:
                    pool: Any = loader._workers.executor()
                    receiver = pool._source._process
                    receiver.send_signal(hit)
        assert receiver.wait(60) and pool._source._process.wait(60)  # none is left
    assert found == _expected(leaf)
    assert f"ended with status {-signal.SIGKILL}; it is replaced" in caplog.text


def test_a_trainer_that_waits_is_woken_by_events_only(leaf_of: Any) -> None:
    """Not by looks for workers that are silent, late or new."""
    leaf = leaf_of(50)
    with serving(_dataset(leaf, ALONE, 0.6), 1) as served:
        with get_savable_loader(_dataset(leaf, WorkerConfig(0, 1, workers=served.tcp()), 0.6)) as loader:
            iterator = iter(loader)
            next(iterator)
            pool: Any = loader._workers.executor()
            collect, woken = pool._collect, list[bool]()
            pool._collect = lambda timeout: woken.append(collect(timeout)) or woken[-1]
            take(iterator, 2)
    assert woken and all(woken)


def test_a_job_is_late_only_if_recent_ones_were_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_pool, "time", SimpleNamespace(monotonic=lambda: 100.0))
    pool: Any = object.__new__(MixedPool)
    first, second = (RemoteHandle(number, PipeChannel.__new__(PipeChannel), "here") for number in range(2))
    pool._workers, pool._options, pool._seconds, pool._longest = [first, second], PoolOptions(), 0.04, 1.0
    pool._jobs = dict.fromkeys([7, 8])
    first.tickets.extend([7, 8])
    first.since = 100.0 - 0.8

    def late(ticket: int) -> float:
        pool._awaited = ticket
        worker, seconds = pool._hedge()
        assert worker is second
        return float(seconds)

    assert late(7) == pytest.approx(0.7)  # others have taken a second
    assert late(8) == 0.0  # it waits behind such a job
    first.since -= 1.0
    assert late(7) == 0.0
    second.tickets.append(9)
    pool._awaited = 7
    assert pool._hedge() is None  # only an idle worker gets a job that runs
    assert late(8) == 0.0
