"""Hooks that never come back, or that find no memory: the run says so, and ends as configured."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from energon_lite import SavableDataLoader, TaskEncoder, get_savable_loader, get_train_dataset
from energon_lite.errors import FatalSampleError, WorkerError
from tests.testing import alone, take


def _loader(path: Path, encoder: TaskEncoder, workers: int = 2, **more: Any) -> SavableDataLoader:
    dataset = get_train_dataset(path, batch_size=4, task_encoder=encoder, worker_config=alone(workers))
    return get_savable_loader(dataset, **more)


class Stops(TaskEncoder):
    """At one sample the worker does not even run any more."""

    def encode_sample(self, sample: Any) -> Any:
        if sample.text == "a-7":
            os.kill(os.getpid(), signal.SIGSTOP)
        return sample


def test_a_worker_that_is_stopped_ends_the_run_and_is_killed(leaf_of: Any) -> None:
    loader = _loader(leaf_of(20), Stops(), watchdog_timeout_seconds=0.5, fail_on_timeout=True)
    executor: Any = loader._workers.executor()
    processes = [worker.process for worker in executor._workers]
    with loader, pytest.raises(WorkerError, match=r"longer than 0\.5 s") as caught:
        for _ in loader:
            pass
    assert "worker" in str(caught.value) and "micro-batch" in str(caught.value)
    assert [process.exitcode is not None for process in processes] == [True, True]


class Starves(TaskEncoder):
    """One sample needs more memory than there is."""

    def encode_sample(self, sample: Any) -> Any:
        if sample.text == "a-7":
            bytearray(1 << 46)
        return sample


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_needs_too_much_memory_is_named(workers: int, leaf_of: Any) -> None:
    with _loader(leaf_of(20), Starves(), workers) as loader:
        with pytest.raises(FatalSampleError, match="no memory was left in encode_sample") as caught:
            take(loader, 10)
    assert "a-20[train], a-7" in str(caught.value) and "SkipSample" in str(caught.value)


class Limited(TaskEncoder):
    """The first worker that comes to one of these samples has no memory left, and dies of it; the next one has."""

    def __init__(self, folder: Path):
        self.folder = folder

    def encode_sample(self, sample: Any) -> Any:
        mark = self.folder / sample.text
        if int(sample.text.split("-")[1]) % 10 == 7 and not mark.exists():
            mark.touch()
            resource.setrlimit(resource.RLIMIT_AS, (1 << 20,) * 2)
            try:
                bytearray(1 << 28)
            except MemoryError:
                os.kill(os.getpid(), signal.SIGKILL)  # as the system does where it has promised too much
        return sample


def test_workers_that_the_system_ends_for_their_memory_are_replaced(leaf_of: Any, tmp_path: Path) -> None:
    with _loader(leaf_of(50), TaskEncoder(), 0) as plain:
        expected = [batch.__key__ for batch in take(plain, 12)]
    with _loader(leaf_of(50), Limited(tmp_path)) as loader:
        assert [batch.__key__ for batch in take(loader, 12)] == expected
        deaths, ends = loader.stats()["worker_deaths"], len(list(tmp_path.iterdir()))
        assert 4 <= deaths <= ends <= deaths + 2  # either worker may be dying just now
