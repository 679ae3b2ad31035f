"""Worker processes that die, hang, or lose their trainer: no batch changes, nothing hangs, nothing stays behind."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from energon_lite import (
    SavableDataLoader,
    TaskEncoder,
    WorkerConfig,
    WorkerError,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
)

ALONE = WorkerConfig(rank=0, world_size=1)


def _loader(path: Any, workers: int, **kwargs: Any) -> SavableDataLoader:
    encoder = kwargs.pop("task_encoder", None)
    config = WorkerConfig(rank=0, world_size=1, num_workers=workers)
    dataset = get_train_dataset(path, batch_size=4, task_encoder=encoder, worker_config=config)
    return get_savable_loader(dataset, **kwargs)


def _pids(loader: SavableDataLoader) -> list[int]:
    return [worker.process.pid for worker in loader._crew.executor()._workers]  # type: ignore[attr-defined]


class Slow(TaskEncoder):
    def encode_sample(self, sample: Any) -> Any:
        time.sleep(0.002)
        return sample


@pytest.mark.parametrize("start_method", ["fork", "forkserver", "spawn"])
def test_every_start_method_gives_the_same_batches(leaf_of: Any, start_method: str) -> None:
    with _loader(leaf_of(50, "a"), 0) as alone, _loader(leaf_of(50, "a"), 2, start_method=start_method) as two:
        for _, one, other in zip(range(10), alone, two, strict=False):
            assert one.__key__ == other.__key__


def test_killed_workers_are_replaced_and_nothing_changes(leaf_of: Any, caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(0)
    with _loader(leaf_of(200, "a"), 0) as alone:
        expected = [batch.__key__ for _, batch in zip(range(100), alone, strict=False)]
    found = []
    with _loader(leaf_of(200, "a"), 3, task_encoder=Slow()) as loader:
        for step, batch in zip(range(100), loader, strict=False):
            found.append(batch.__key__)
            if step % 10 == 3:
                os.kill(rng.choice(_pids(loader)), signal.SIGKILL)
        assert loader.stats()["worker_deaths"] >= 8
    assert found == expected
    assert "ended with SIGKILL; it is replaced" in caplog.text


def test_all_workers_killed_at_once(leaf_of: Any) -> None:
    with _loader(leaf_of(200, "a"), 0) as alone, _loader(leaf_of(200, "a"), 3) as loader:
        for step, one, other in zip(range(30), alone, loader, strict=False):
            assert one.__key__ == other.__key__
            if step in (5, 6, 20):
                for pid in _pids(loader):
                    os.kill(pid, signal.SIGKILL)


def test_a_sample_that_kills_its_worker_is_named(leaf_of: Any) -> None:
    class Poison(TaskEncoder):
        def encode_sample(self, sample: Any) -> Any:
            if sample.text == "a-7":
                os.kill(os.getpid(), signal.SIGKILL)
            return sample

    with _loader(leaf_of(20, "a"), 2, task_encoder=Poison()) as loader:
        with pytest.raises(WorkerError, match="3 workers died while making the same micro-batch") as caught:
            for _, _ in zip(range(10), loader, strict=False):
                pass
    assert "a-20[train][7]" in str(caught.value) and "SIGKILL" in str(caught.value)


def test_workers_ignore_the_signals_that_stop_a_trainer(leaf_of: Any) -> None:
    with _loader(leaf_of(50, "a"), 2) as loader:
        iterator = iter(loader)
        next(iterator)
        before = _pids(loader)
        for pid in before:
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGINT)
        for _ in range(20):
            next(iterator)
        assert _pids(loader) == before and loader.stats()["worker_deaths"] == 0


class Stuck(TaskEncoder):
    def encode_sample(self, sample: Any) -> Any:
        if sample.text == "a-7":
            time.sleep(1.0)
        return sample


def test_a_slow_batch_is_reported(leaf_of: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with _loader(leaf_of(20, "a"), 1, task_encoder=Stuck(), watchdog_timeout_seconds=0.2) as loader:
        for _ in zip(range(5), loader, strict=False):
            pass
    assert "waited for longer than 0.2 s (worker 0 (pid" in caplog.text


def test_a_slow_batch_may_end_the_run(leaf_of: Any) -> None:
    with _loader(
        leaf_of(20, "a"), 1, task_encoder=Stuck(), watchdog_timeout_seconds=0.2, fail_on_timeout=True
    ) as loader:
        with pytest.raises(WorkerError, match="waited for longer than"):
            for _ in zip(range(5), loader, strict=False):
                pass


def test_close_leaves_no_process_and_the_loader_can_go_on(leaf_of: Any) -> None:
    loader = _loader(leaf_of(50, "a"), 3)
    keys = [batch.__key__ for _, batch in zip(range(4), loader, strict=False)]
    pids = _pids(loader)
    loader.close()
    loader.close()
    assert not [pid for pid in pids if _alive(pid)]
    keys += [batch.__key__ for _, batch in zip(range(4), loader, strict=False)]
    loader.close()
    with _loader(leaf_of(50, "a"), 0) as alone:
        assert keys == [batch.__key__ for _, batch in zip(range(8), alone, strict=False)]


def test_a_forgotten_loader_takes_its_workers_along(leaf_of: Any) -> None:
    loader = _loader(leaf_of(50, "a"), 2)
    next(iter(loader))
    pids = _pids(loader)
    del loader
    assert _gone(pids, seconds=5)


@pytest.mark.parametrize(
    "start_method, big", [("fork", False), ("fork", True), ("forkserver", True), ("spawn", False), ("spawn", True)]
)
def test_nothing_stays_when_the_trainer_is_killed(tmp_path: Path, leaf_of: Any, start_method: str, big: bool) -> None:
    """No process, also when it is blocked, sending batches larger than a pipe holds; no file, no folder."""
    program = tmp_path / "trainer.py"
    program.write_text(
        textwrap.dedent(
            f"""
            import sys, time, torch
            from energon_lite import *

            class Big(TaskEncoder):
                def encode_sample(self, sample):
                    return {{"x": torch.zeros({3_000_000 if big else 1})}}

            if __name__ == "__main__":
                loaders = []
                for _ in range(2):  # two pools: the later workers inherit the ends of the earlier ones' pipes
                    dataset = get_train_dataset({str(leaf_of(50, "a"))!r}, batch_size=2, task_encoder=Big(),
                                                worker_config=WorkerConfig(rank=0, world_size=1, num_workers=2))
                    loaders.append(get_savable_loader(dataset, start_method={start_method!r}))
                    next(iter(loaders[-1]))
                pids = [w.process.pid for l in loaders for w in l._crew.executor()._workers]
                print(*pids, flush=True)
                time.sleep(60)
            """
        )
    )
    shm_before = set(os.listdir("/dev/shm"))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary)}
    command = [sys.executable, str(program)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as trainer:
        assert trainer.stdout is not None
        pids = [int(pid) for pid in trainer.stdout.readline().split()]
        assert len(pids) == 4
        time.sleep(0.3)
        trainer.kill()
    assert _gone(pids, seconds=10)
    assert set(os.listdir("/dev/shm")) <= shm_before
    assert not list(temporary.iterdir())


def test_validation_with_workers_survives_deaths_too(leaf_of: Any) -> None:
    config = WorkerConfig(rank=0, world_size=1, num_workers=2)
    dataset = get_val_dataset(leaf_of(50, "a"), batch_size=4, task_encoder=Slow(), worker_config=config)
    with get_savable_loader(dataset) as loader:
        texts = []
        for step, batch in enumerate(loader):
            texts += batch.text
            if step == 3:
                os.kill(_pids(loader)[0], signal.SIGKILL)
    assert texts == [f"a-{i}" for i in range(50)]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _gone(pids: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(_alive, pids))
