"""Local workers come first; others get what these cannot do in time, and what is late."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from energon_lite import SavableDataset, WorkerConfig, get_train_dataset
from energon_lite.extras.remote_workers import mixed_pool
from energon_lite.extras.remote_workers.mixed_pool import HostLoad, JobTimes, MixedPool, Pace, RemoteHandle
from energon_lite.loading.executors.executor import PoolOptions
from energon_lite.loading.executors.transport import PipeChannel
from tests.extras.remote_workers.served import pool_with, served_loader
from tests.extras.remote_workers.slow_samples import Slow, dataset_of, digest, expected_of
from tests.testing import ALONE, batches_of, blend_of, in_time, take, text_dataset


def _makers(leaf: Path, local: int, seconds: float, step: float, batches: int = 60, **tcp: Any) -> list[str]:
    """The kind of worker that made each batch, in a run whose jobs and steps take so long; batches are as alone."""
    makers, found, options = list[str](), list[Any](), {"batch_size": 1, "repeat": True}
    with served_loader(lambda config: dataset_of(leaf, config, seconds, **options), local, **tcp) as loader:
        pool: Any = loader._workers.executor()
        send: Callable[..., None] = pool._send

        def noting(worker: Any, tickets: Any) -> None:
            makers.extend([type(worker).__name__] * len(tickets))
            send(worker, tickets)

        pool._send = noting
        pool_with(loader, 2 + local)
        for batch in islice(loader, batches):
            found.append(digest(batch))
            time.sleep(step)
    assert found == expected_of(leaf, batches, **options)
    assert 0 < pool._mean < 5 * mixed_pool._UNKNOWN
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


def test_the_load_of_a_machine_is_the_share_of_its_busy_ticks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ticks of users, nice ones, the system, none, waits for disks, interrupts of two kinds, other guests."""
    clock, load = [7.0], HostLoad(0.5)
    monkeypatch.setattr(mixed_pool, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(mixed_pool, "_COUNTERS", tmp_path / "stat")
    for seconds, ticks, is_high in (
        (0.5, "70 0 0 10 10 0 0 0", False),  # it is known from the second look on
        (0.5, "74 1 1 16 14 1 1 2", False),  # half of them
        (0.25, "99 1 1 16 14 1 1 2", False),  # too early
        (0.25, "77 2 2 19 15 1 1 2", True),  # 5 of 9
        (0.25, "77 2 2 99 15 1 1 2", True),
        (0.25, "77 2 2 19 15 1 1 2", False),  # no ticks at all
        (0.5, "77 2 2 19 15 1 1 3", True),
    ):
        (tmp_path / "stat").write_text(f"cpu  {ticks} {clock[0]:.0f}00 0\ncpu0 1 1 1 1\n")
        clock[0] += seconds
        assert load.is_high() == is_high, ticks


def test_times_of_jobs_correct_those_of_their_data_sets() -> None:
    times, every = JobTimes(), ((0, 0, 1), (0,), (1,), ())
    jobs: list[Any] = [SimpleNamespace(addresses=[(leaf, 5, 0) for leaf in leaves]) for leaves in every]
    for job, seconds in zip(jobs, (5.0, 0.2), strict=False):
        times.made(job, seconds)
    times.made(jobs[3], 3.0)
    assert [times.expected(job) for job in jobs] == pytest.approx([0.92, 0.36, 0.2, 0.0])


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
    with served_loader(lambda config: dataset_of(leaf, config, task_encoder=encoder)) as loader:
        assert [digest(batch) for batch in loader] == expected_of(leaf)
    assert not (tmp_path / "has slept").exists()


def test_a_local_worker_that_is_stopped_holds_nobody_up(leaf_of: Any) -> None:
    """Neither with the jobs that it has, nor with those that are left to local workers."""
    leaf = leaf_of(50)
    with served_loader(lambda config: dataset_of(leaf, config), 1, workers=1) as loader:
        iterator, found = iter(loader), list[Any]()

        def step() -> None:
            time.sleep(0.02)  # the local worker keeps up
            found.append(digest(next(iterator)))

        for _ in range(8):
            step()
        os.kill(pool_with(loader, 2)._workers[0].process.pid, signal.SIGSTOP)
        in_time(lambda: [step() for _ in range(17)])
    assert found == expected_of(leaf)


def test_a_trainer_that_waits_is_woken_by_events_only(leaf_of: Any) -> None:
    """Not by looks for workers that are silent, late or new."""
    leaf = leaf_of(50)
    with served_loader(lambda config: dataset_of(leaf, config, 0.6), workers=1) as loader:
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
    pool._workers, pool._options, pool._mean, pool._longest = [first, second], PoolOptions(), 0.04, 1.0
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
    assert late(7) == pytest.approx(1.2)  # an idle worker gets a job that runs; another one only after twice the time
    assert late(8) == 0.0


class SlowData(Slow):
    """Samples of one of the data sets take ten times as long."""

    def encode_sample(self, sample: Any) -> dict[str, Any]:
        time.sleep(9 * self.seconds if sample.__key__.startswith("b") else 0.0)
        return super().encode_sample(sample)


def test_jobs_of_a_slow_data_set_begin_before_their_turn(leaf_of: Any, tmp_path: Path) -> None:
    """As soon as it is known to be slow; the batches stay in order."""
    blend = blend_of([(leaf_of(50), 9), (text_dataset(tmp_path / "slow", 50, prefix="b-"), 1)])

    def dataset(config: WorkerConfig, seconds: float) -> SavableDataset:
        return get_train_dataset(blend, worker_config=config, task_encoder=SlowData(seconds), batch_size=1)

    sent = list[int]()
    with served_loader(lambda config: dataset(config, 0.005)) as loader:
        pool: Any = loader._workers.executor()
        next_jobs: Callable[..., list[int]] = pool._next_jobs
        pool._next_jobs = lambda wanted: sent.extend(tickets := next_jobs(wanted)) or tickets
        found = [digest(batch) for batch in islice(loader, 150)]
        early = {ticket for at, ticket in enumerate(sent) if min(sent[at:]) < ticket}
        names = [names[0] for names in found]
    assert found == [digest(batch) for batch in batches_of(dataset(ALONE, 0.0), 150)]
    assert early and all(names[ticket - 1].startswith("b") for ticket in early if ticket <= 150)
