"""Very short jobs travel to workers, and back, several at a time: nothing else changes."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections import deque
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from energon_lite import SavableDataLoader, SkipSample, TaskEncoder
from energon_lite.errors import FatalSampleError, WorkerError
from energon_lite.loading.executors import worker_pool, worker_process
from tests.testing import nightly_but, take, train_loader


@pytest.fixture(autouse=True)
def groups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the groups that were sent. Jobs count as short from the first one on."""
    monkeypatch.setattr(worker_pool, "_UNKNOWN", 1e-6)
    sent: list[int] = []
    send = worker_pool.WorkerPool._send

    def noting(self: Any, worker: Any, tickets: list[int]) -> bool:
        sent.append(len(tickets))
        return send(self, worker, tickets)

    monkeypatch.setattr(worker_pool.WorkerPool, "_send", noting)
    return sent


def loader(path: Path, number: int, encoder: TaskEncoder | None = None, **options: Any) -> SavableDataLoader:
    return train_loader(path, number, task_encoder=encoder, **{"batch_size": 4, **options})


def keys(found: SavableDataLoader, count: int) -> list[Any]:
    return [batch.__key__ for batch in take(found, count)]


@pytest.mark.parametrize(
    ("together", "batch_size"), nightly_but({0, 4, 6, 8}, itertools.product([0.0, 1e-3, 1.0], [1, 4, 900]))
)
def test_the_same_batches(
    leaf_of: Any, groups: list[int], monkeypatch: pytest.MonkeyPatch, together: float, batch_size: int
) -> None:
    monkeypatch.setattr(worker_process, "_TOGETHER", together)
    with loader(leaf_of(50), 0, batch_size=batch_size) as alone:
        expected = keys(alone, 150)
    with loader(leaf_of(50), 2, batch_size=batch_size) as two:
        assert keys(two, 150) == expected
        assert two.stats()["samples"] == 150 * batch_size
    assert max(groups) > 2 or batch_size == 900


class Long(TaskEncoder):
    """Results of a megabyte."""

    def batch(self, samples: list[Any]) -> Any:
        return torch.full((1 << 18,), float(samples[0].text.split("-")[1]))


def test_of_large_results_there_are_not_many(leaf_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 0
    collect = worker_pool.WorkerPool._collect

    def measuring(self: Any, timeout: float | None) -> bool:
        nonlocal most
        found = collect(self, timeout)
        most = max(most, sum(self._sizes.values()))
        return found

    monkeypatch.setattr(worker_pool.WorkerPool, "_collect", measuring)
    monkeypatch.setattr(worker_pool, "_UNKNOWN", 1.0)  # how large they are is known before they count as short
    with loader(leaf_of(50), 2, Long(), max_bytes_in_flight=6 << 20) as two:
        deque(islice(two, 120), maxlen=0)  # none is kept
    assert 2 << 20 < most < 7 << 20


@pytest.mark.parametrize("seed", nightly_but({0}, range(3)))
def test_killed_at_any_moment(leaf_of: Any, groups: list[int], seed: int) -> None:
    draw = random.Random(seed)
    with loader(leaf_of(50), 0) as alone:
        expected = keys(alone, 400)
    with loader(leaf_of(50), 2, on_timeout="raise", watchdog_timeout_seconds=20) as two:
        found = []
        for number, batch in zip(range(400), two, strict=False):
            found.append(batch.__key__)
            if number % 40 == 7:
                victim = draw.choice(two._workers.executor()._workers)  # type: ignore[attr-defined]
                time.sleep(draw.uniform(0, 0.003))
                os.kill(victim.process.pid, signal.SIGKILL)
        assert found == expected and two.stats()["worker_deaths"] >= 3
    assert max(groups) > 2


class Breaks(TaskEncoder):
    """What it does with sample 31 of the first epoch, and of all others."""

    def __init__(self, what: str):
        self.what = what

    def encode_sample(self, sample: Any) -> Any:
        if sample.text == "a-31":
            if self.what == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.what == "skip":
                raise SkipSample("not this one")
            if self.what == "end":
                raise FatalSampleError("enough")
        return sample

    def batch(self, samples: list[Any]) -> Any:
        batch = super().batch(samples)
        return [lambda: 0] if self.what == "unsendable" and "a-31" in batch.__key__ else batch


@pytest.mark.parametrize(
    ("what", "error", "words"),
    [
        ("end", FatalSampleError, ["enough"]),
        ("unsendable", Exception, ["[0] is the function Breaks.batch.<locals>.<lambda>"]),
        ("die", WorkerError, ["in encode_sample of a-31", "micro-batch {} of pass 0"]),  # and no other is named
    ],
)
def test_an_error_comes_behind_the_batches_before_it(
    leaf_of: Any, groups: list[int], what: str, error: type[Exception], words: list[str]
) -> None:
    with loader(leaf_of(50), 0) as alone:
        plain = keys(alone, 13)  # an epoch
    before = next(number for number, some in enumerate(plain) if "a-31" in some)
    found = []
    with loader(leaf_of(50), 2, Breaks(what)) as two, pytest.raises(error) as caught:
        for batch in two:
            found.append(batch.__key__)
    assert found == plain[:before] and max(groups) > 2
    assert all(one.format(before) in str(caught.value) for one in words)


def test_skips_are_counted_when_they_are_delivered(leaf_of: Any) -> None:
    with loader(leaf_of(50), 2, Breaks("skip")) as two, loader(leaf_of(50), 0, Breaks("skip")) as alone:
        for batch, same in zip(range(70), zip(two, alone, strict=False), strict=False):
            assert same[0].__key__ == same[1].__key__, batch
            assert two.stats()["skipped"] == alone.stats()["skipped"]


def test_a_restore_forgets_what_is_under_way(leaf_of: Any) -> None:
    with loader(leaf_of(50), 2) as two, loader(leaf_of(50), 0) as alone:
        keys(two, 33)
        state = two.save_state_rank()
        assert keys(two, 21) == (keys(alone, 54))[33:]
        for _ in range(3):
            two.restore_state_rank(state)
            alone.restore_state_rank(state)
            assert keys(two, 25) == keys(alone, 25)
