"""Threads as workers: the same batches, the same errors, and no surprise."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from energon_lite import ReadAhead, SavableDataLoader, TaskEncoder, stateless
from energon_lite.errors import UsageError, WorkerError
from energon_lite.loading.executors.transport import WakingChannel
from tests.testing import in_time, told_of, train_loader, until

_loader = partial(train_loader, batch_size=4, start_method="thread")


class Held(TaskEncoder):
    """Waits, from the second batch on, until it may go on."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()

    def encode_batch(self, batch: Any) -> Any:
        if self.current_batch_index:
            self.begun.set()
            self.go.wait(300)
        return batch


@contextmanager
def _held(leaf: Any, **kwargs: Any) -> Iterator[tuple[Held, SavableDataLoader, Iterator[Any]]]:
    """A loader whose thread waits in the hook of the next batch; it goes on at the end."""
    encoder = Held()
    with _loader(leaf, 1, task_encoder=encoder, watchdog_timeout_seconds=0.2, **kwargs) as loader:
        batches = iter(loader)
        next(batches)
        assert encoder.begun.wait(120)
        try:
            yield encoder, loader, batches
        finally:
            encoder.go.set()


def test_a_slow_batch_is_reported_with_its_stack(leaf_of: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with _held(leaf_of(20)) as (encoder, _, batches):
        going = threading.Thread(target=lambda: (until(lambda: told_of(caplog, "still waiting")), encoder.go.set()))
        going.start()
        next(batches)
        going.join()
    assert "self.go.wait(300)" in told_of(caplog, "still waiting")[0]
    with _held(leaf_of(20), on_timeout="raise") as (*_, batches):
        with pytest.raises(WorkerError, match=r"self\.go\.wait\(300\)"):
            next(batches)


def test_hooks_that_have_to_wait_for_each_other_are_told(leaf_of: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Seeded(TaskEncoder):
        def encode_sample(self, sample: Any) -> Any:
            return sample

        @stateless(restore_seeds=False)
        def encode_batch(self, batch: Any) -> Any:
            return batch

    class Pure(TaskEncoder):
        @stateless(restore_seeds=False)
        def encode_sample(self, sample: Any) -> Any:
            return sample

    _loader(leaf_of(20), 1, task_encoder=Pure())
    _loader(leaf_of(20), 0, task_encoder=Seeded())  # no threads, no danger
    assert "one at a time" not in caplog.text
    _loader(leaf_of(20), 1, task_encoder=Seeded())
    assert "start_method='thread': encode_sample of Seeded are run one at a time" in caplog.text


class Waits(TaskEncoder):
    """Hooks that are not seeded run beside each other: the first two of them meet."""

    meeting = threading.Barrier(2, timeout=120)
    calls = itertools.count()

    @stateless(restore_seeds=False)
    def encode_sample(self, sample: Any) -> Any:
        if next(self.calls) < 2:
            self.meeting.wait()
        return sample


def test_hooks_without_seeds_run_beside_each_other(leaf_of: Any) -> None:
    with _loader(leaf_of(16), 2, task_encoder=Waits()) as loader:
        assert len(next(iter(loader)).__key__) == 4
        assert loader.stats()["failed"] == 0  # of one that waits in vain


class Sealed(dict[str, Any]):
    """A dict that takes no entries, so that it cannot be copied."""

    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError("sealed")


def test_a_batch_whose_size_is_not_known_is_delivered(leaf_of: Any) -> None:
    """It ended the thread, and the trainer waited for ever."""

    class Odd(TaskEncoder):
        def __init__(self, batch: Any) -> None:
            self.made = batch

        def encode_batch(self, batch: Any) -> Any:
            return self.made

    for batch in ({"mask": torch.eye(3).to_sparse()}, Sealed(mask=torch.eye(3))):
        with _loader(leaf_of(8), 1, task_encoder=Odd(batch)) as loader:
            assert in_time(lambda loader=loader: next(iter(loader)))["mask"].to_dense().sum() == 3


def test_read_ahead_is_refused(leaf_of: Any) -> None:
    with pytest.raises(UsageError, match="start_method='thread' with read_ahead"):
        _loader(leaf_of(20), 1, read_ahead=ReadAhead())


@pytest.mark.parametrize("seconds", [0.0, 0.3])
def test_who_waits_while_another_thread_closes_is_told(
    leaf_of: Any, seconds: float, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it has read the byte that wakes it before its pipe is closed."""
    wake = WakingChannel.wake
    monkeypatch.setattr(WakingChannel, "wake", lambda channel: (wake(channel), time.sleep(seconds)))
    with _held(leaf_of(20)) as (encoder, loader, batches):
        closing = threading.Thread(target=lambda: (until(lambda: told_of(caplog, "still waiting")), loader.close()))
        closing.start()
        with pytest.raises(WorkerError, match="closed while another thread"):
            in_time(lambda: next(batches))
        encoder.go.set()
        closing.join()
