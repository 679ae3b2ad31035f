"""Threads as workers: the same batches, the same errors, and no surprise."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from typing import Any

import pytest

from energon_lite import (
    ReadAhead,
    SavableDataLoader,
    SkipSample,
    TaskEncoder,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    stateless,
)
from energon_lite.errors import FatalSampleError, UsageError, WorkerError
from tests.testing import in_time, take


def _loader(path: Any, workers: int, *, encoder: TaskEncoder | None = None, **kwargs: Any) -> SavableDataLoader:
    data = {name: kwargs.pop(name) for name in ("read_ahead", "packing_buffer_size") if name in kwargs}
    config = WorkerConfig(rank=0, world_size=1, num_workers=workers)
    dataset = get_train_dataset(path, batch_size=4, task_encoder=encoder, worker_config=config, **data)
    return get_savable_loader(dataset, start_method="thread", **kwargs)


class Draws(TaskEncoder):
    """Own randomness, skips, failures, in whichever thread."""

    def encode_sample(self, sample: Any) -> Any:
        number = int(sample.text[2:])
        time.sleep(0.001 * (number % 3))
        if number % 7 == 0:
            raise SkipSample("seven")
        if number % 11 == 0:
            raise ValueError("eleven")
        return {"text": sample.text, "drawn": float(self.rng.random()), "pid": os.getpid()}


def test_threads_give_the_same_batches(leaf_of: Any) -> None:
    with _loader(leaf_of(50), 0, encoder=Draws()) as alone, _loader(leaf_of(50), 3, encoder=Draws()) as threads:
        for _, one, other in zip(range(40), alone, threads, strict=False):
            assert one == other
            assert alone.save_state_rank() == threads.save_state_rank()
        assert alone.stats()["reasons"] == threads.stats()["reasons"] and threads.stats()["failed"] > 0


def test_a_restore_and_a_close_in_the_middle(leaf_of: Any) -> None:
    with _loader(leaf_of(50), 0) as alone, _loader(leaf_of(50), 2) as threads:
        expected = [batch.__key__ for batch in take(alone, 12)]
        found = [batch.__key__ for batch in take(threads, 4)]
        state = threads.save_state_rank()
        take(threads, 5)
        threads.restore_state_rank(state)
        found += [batch.__key__ for batch in take(threads, 4)]
        threads.close()
        threads.close()
        assert not [one for one in threading.enumerate() if one.name.startswith("energon-lite-thread")]
        found += [batch.__key__ for batch in take(threads, 4)]
    assert found == expected


def test_an_error_reaches_the_caller(leaf_of: Any) -> None:
    class Ends(TaskEncoder):
        def encode_sample(self, sample: Any) -> Any:
            raise FatalSampleError("the end")

    with _loader(leaf_of(20), 2, encoder=Ends()) as loader, pytest.raises(FatalSampleError, match="the end"):
        next(iter(loader))


class Hangs(TaskEncoder):
    def encode_sample(self, sample: Any) -> Any:
        time.sleep(0.3)
        return sample


@pytest.mark.slow
def test_a_slow_batch_is_reported_with_its_stack(leaf_of: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with _loader(leaf_of(20), 1, encoder=Hangs(), watchdog_timeout_seconds=0.2) as loader:
        next(iter(loader))
    assert "still waiting" in caplog.text and "time.sleep(0.3)" in caplog.text
    for left in threading.enumerate():  # it is waited for two seconds, and still has the global generators
        if left.name.startswith("energon-lite-thread"):
            left.join(10)
    with _loader(leaf_of(20), 1, encoder=Hangs(), watchdog_timeout_seconds=0.2, on_timeout="raise") as loader:
        with pytest.raises(WorkerError, match=r"time\.sleep\(0\.3\)"):
            next(iter(loader))


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

    _loader(leaf_of(20), 1, encoder=Pure())
    _loader(leaf_of(20), 0, encoder=Seeded())  # no threads, no danger
    assert "one at a time" not in caplog.text
    _loader(leaf_of(20), 1, encoder=Seeded())
    assert "start_method='thread': encode_sample of Seeded are run one at a time" in caplog.text


class Waits(TaskEncoder):
    """Hooks that are not seeded run beside each other: the first two of them meet."""

    meeting = threading.Barrier(2, timeout=10)
    calls = itertools.count()

    @stateless(restore_seeds=False)
    def encode_sample(self, sample: Any) -> Any:
        if next(self.calls) < 2:
            self.meeting.wait()
        return sample


def test_hooks_without_seeds_run_beside_each_other(leaf_of: Any) -> None:
    with _loader(leaf_of(16), 2, encoder=Waits()) as loader:
        assert len(next(iter(loader)).__key__) == 4
        assert loader.stats()["failed"] == 0  # of one that waits in vain


def test_read_ahead_is_refused(leaf_of: Any) -> None:
    with pytest.raises(UsageError, match="start_method='thread' with read_ahead"):
        _loader(leaf_of(20), 1, read_ahead=ReadAhead())


@pytest.mark.slow
def test_who_waits_while_another_thread_closes_is_told(leaf_of: Any) -> None:
    loader = _loader(leaf_of(20), 1, encoder=Hangs(), watchdog_timeout_seconds=0.1)
    closing = threading.Timer(0.3, loader.close)
    closing.start()
    with pytest.raises(WorkerError, match="closed while another thread"):
        in_time(lambda: next(iter(loader)))
    closing.join()  # and with it the hook, which gives the global generators back
