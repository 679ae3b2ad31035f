"""Workers that die, hang, find no memory, or lose their trainer: no batch changes, nothing hangs or stays behind."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import subprocess
import tempfile
import textwrap
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from energon_lite import SavableDataLoader, TaskEncoder, get_savable_loader, get_train_dataset
from energon_lite.errors import UsageError, WorkerError
from energon_lite.storage import SampleDecoder
from tests.fork_server import ForkedProgram
from tests.testing import alone, is_alive, nightly_but, take, train_loader, until

_loader = partial(train_loader, batch_size=4)


def _keys(loader: SavableDataLoader, count: int) -> list[list[str]]:
    return [batch.__key__ for batch in take(loader, count)]


def _pids(loader: SavableDataLoader) -> list[int]:
    return [worker.process.pid for worker in loader._workers.executor()._workers]  # type: ignore[attr-defined]


def test_all_workers_killed_at_once(leaf_of: Any, caplog: pytest.LogCaptureFixture) -> None:
    with _loader(leaf_of(200, "a"), 0) as plain, _loader(leaf_of(200, "a"), 3) as loader:
        for step, one, other in zip(range(30), plain, loader, strict=False):
            assert one.__key__ == other.__key__
            if step in (5, 6, 20):
                for pid in _pids(loader):
                    os.kill(pid, signal.SIGKILL)
    assert "ended with SIGKILL; it is replaced" in caplog.text


@pytest.mark.parametrize("hook", ["decode", "batch"])
def test_the_step_that_kills_a_worker_is_named(leaf_of: Any, hook: str) -> None:
    pid = os.getpid()

    def bomb(data: bytes) -> Any:
        if data == b"a-7" and os.getpid() != pid:
            faulthandler.disable()  # pytest's, which would show the stack
            os.kill(os.getpid(), signal.SIGSEGV)
        return data.decode()

    class Heavy(TaskEncoder):
        def batch(self, samples: list[Any]) -> Any:
            if any(sample.text == "a-7" for sample in samples) and os.getpid() != pid:
                os._exit(9)
            return super().batch(samples)

    encoder = TaskEncoder() if hook == "decode" else Heavy()
    if hook == "decode":
        encoder.decoder = SampleDecoder(handlers={"txt": bomb})
    with _loader(leaf_of(20, "a"), 2, task_encoder=encoder) as loader:
        with pytest.raises(WorkerError, match="3 workers died") as caught:
            take(loader, 10)
    assert ("in decode of a-7 of" if hook == "decode" else "exit code 9 in batch of 4 samples") in str(caught.value)


def test_workers_ignore_the_signals_that_stop_a_trainer(leaf_of: Any) -> None:
    with _loader(leaf_of(50, "a"), 2) as loader:
        take(loader, 1)
        before = _pids(loader)
        for pid in before:
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGINT)
        take(loader, 20)
        assert _pids(loader) == before and loader.stats()["worker_deaths"] == 0


class Stuck(TaskEncoder):
    def encode_sample(self, sample: Any) -> Any:
        if sample.text == "a-7":
            time.sleep(1.5)  # so long that the trainer waits, also one that is late
        return sample


def test_a_slow_batch_is_reported(leaf_of: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with _loader(leaf_of(20, "a"), 1, task_encoder=Stuck(), watchdog_timeout_seconds=0.2) as loader:
        take(loader, 5)
    assert "waited for longer than 0.2 s (worker 0 (pid" in caplog.text


#: Seconds after which a worker counts as stuck: one that works takes a hundredth of that.
PATIENCE = 2.0


class Forever(TaskEncoder):
    """Hangs, in Python, each time; or the first time only."""

    def __init__(self, once: Path | None = None):
        self.once = once

    def encode_sample(self, sample: Any) -> Any:
        if sample.text == "a-7" and not (self.once is not None and self.once.exists()):
            if self.once is not None:
                self.once.touch()
            self.wait_for_nobody()
        return sample

    def wait_for_nobody(self) -> None:
        time.sleep(100)


class Stops(Forever):
    """The worker does not even run any more."""

    def wait_for_nobody(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


def _hanging(leaf: Any, workers: int, encoder: TaskEncoder | None = None, **more: Any) -> SavableDataLoader:
    return _loader(leaf, workers, task_encoder=encoder or Forever(), watchdog_timeout_seconds=PATIENCE, **more)


@pytest.mark.parametrize(
    ("encoder", "said"), [(Forever(), ("in wait_for_nobody", "in encode_sample")), (Stops(), ("worker", "micro-batch"))]
)
def test_a_hung_worker_ends_the_run_and_is_killed(leaf_of: Any, encoder: TaskEncoder, said: tuple[str, ...]) -> None:
    with _hanging(leaf_of(20), 2, encoder, on_timeout="raise") as loader:
        pids = _pids(loader)
        with pytest.raises(WorkerError, match="waited for longer than") as caught:
            take(loader, 5)
    assert all(words in str(caught.value) for words in said)
    assert not any(map(is_alive, pids))


@pytest.mark.parametrize("start_method", nightly_but({0, 1}, ["fork", "forkserver", "spawn"]))
def test_a_hung_worker_is_replaced(
    tmp_path: Path, leaf_of: Any, start_method: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    expected = _keys(_loader(leaf_of(20, "a"), 0), 10)
    more: Any = {"on_timeout": "replace", "start_method": start_method}
    with _hanging(leaf_of(20, "a"), 2, Forever(tmp_path / "hung"), **more) as loader:
        assert _keys(loader, 10) == expected
        assert loader.stats()["worker_deaths"] == 1
    assert "was stuck; it is replaced" in caplog.text and "in wait_for_nobody" in caplog.text


def test_a_job_that_always_hangs_ends_the_run(leaf_of: Any) -> None:
    with _hanging(leaf_of(20, "a"), 1, on_timeout="replace") as loader:
        with pytest.raises(WorkerError, match="the last one was stuck in encode_sample of a-7 of a-20") as caught:
            take(loader, 5)
        assert "a-20[train][7]" in str(caught.value) and loader.stats()["worker_deaths"] == 3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"on_timeout": "replce"}, "did you mean 'replace'"),
        ({"start_method": "forked"}, "did you mean 'fork"),
        ({"start_method": "thread", "on_timeout": "replace"}, "a thread cannot be ended"),
        ({"fail_on_timeout": True, "on_timeout": "warn"}, "give one of the two"),
        ({"max_bytes_in_flight": 0}, "max_bytes_in_flight is 0"),
    ],
)
def test_what_cannot_be_is_refused(leaf_of: Any, wrong: dict[str, Any], message: str) -> None:
    dataset = get_train_dataset(leaf_of(20, "a"), batch_size=4, worker_config=alone(1))
    with pytest.raises(UsageError, match=message):
        get_savable_loader(dataset, **wrong)


class Large(TaskEncoder):
    def encode_sample(self, sample: Any) -> Any:
        return {"x": torch.zeros(1 << 18)}  # 1 MiB, four times in a batch


@pytest.mark.parametrize(("start_method", "limit"), [("fork", 1), ("fork", 9 << 20), ("fork", 1 << 30), ("thread", 1)])
def test_bytes_in_flight_are_bounded(leaf_of: Any, limit: int, start_method: Any) -> None:
    more: Any = {"prefetch_factor": 4, "max_bytes_in_flight": limit, "start_method": start_method}
    with _loader(leaf_of(20, "a"), 2, task_encoder=Large(), **more) as loader:
        iterator = iter(loader)
        for _ in range(4):  # the size of a batch is known after the first one
            next(iterator)
        sizes, batch = [0], 4 << 20

        def grows() -> bool:
            sizes.append(loader.stats()["queue"]["bytes_in_flight"])
            return limit == 1 << 30 and sizes[-1] >= batch

        for _ in range(10):
            next(iterator)
            until(grows, 120 if limit == 1 << 30 else 0.05)
    assert max(sizes) <= max(limit + (1 << 20), batch + (1 << 20))
    assert limit < 1 << 30 or max(sizes) >= batch


def test_a_forgotten_loader_takes_its_workers_along(leaf_of: Any) -> None:
    loader = _loader(leaf_of(50, "a"), 2)
    next(iter(loader))
    pids = _pids(loader)
    del loader
    assert _gone(pids)


@pytest.mark.parametrize(
    "start_method, big",
    nightly_but(
        {0, 1, 2, 4}, [("fork", False), ("fork", True), ("forkserver", True), ("spawn", False), ("spawn", True)]
    ),
)
def test_nothing_stays_when_the_trainer_is_killed(tmp_path: Path, leaf_of: Any, start_method: str, big: bool) -> None:
    """No process, also when it is blocked, sending batches larger than a pipe holds; no file, no folder."""
    pools = 2 if start_method == "fork" else 1  # later workers inherit the ends of the earlier ones' pipes
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
                for _ in range({pools}):
                    dataset = get_train_dataset({str(leaf_of(50, "a"))!r}, batch_size=2, task_encoder=Big(),
                                                worker_config=WorkerConfig(rank=0, world_size=1, num_workers=2))
                    loaders.append(get_savable_loader(dataset, start_method={start_method!r}))
                    next(iter(loaders[-1]))
                pids = [w.process.pid for l in loaders for w in l._workers.executor()._workers]
                print(*pids, flush=True)
                time.sleep(60)
            """
        )
    )
    temporary = Path(tempfile.mkdtemp())  # with a short path: a socket's may have 107 characters
    environment = {**os.environ, "TMPDIR": str(temporary)}
    command = [str(program)]
    with ForkedProgram(command, stdout=subprocess.PIPE, text=True, env=environment) as trainer:
        assert trainer.stdout is not None
        pids = [int(pid) for pid in trainer.stdout.readline().split()]
        assert len(pids) == 2 * pools
        time.sleep(0.3)
        named = {name for pid in [trainer.pid, *pids] for name in _files_of(pid)}
        trainer.kill()
    assert _gone([trainer.pid, *pids])
    # What has no name cannot stay behind (others use /dev/shm, too, so a look at the folder would tell nothing).
    assert any("memfd:energon_lite" in name for name in named)
    assert not [name for name in named if name.startswith("/dev/shm") and "(deleted)" not in name]
    until(lambda: not list(temporary.iterdir()))  # the fork server removes its folder, right behind the workers' end
    temporary.rmdir()


def _files_of(pid: int) -> list[str]:
    """The files that a process has open, or mapped."""
    links = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            links.append(os.readlink(link))
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return links + [line.split(maxsplit=5)[5] for line in maps if len(line.split(maxsplit=5)) == 6]


def _gone(pids: list[int]) -> bool:
    return until(lambda: not any(map(is_alive, pids)))
