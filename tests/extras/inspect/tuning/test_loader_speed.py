"""How fast loaders are, where it is known; and what memory they have."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from energon_lite import TaskEncoder, get_train_dataset, stateless
from energon_lite.extras.inspect.tune_command import LoaderSpeed, available_memory, memory_of
from energon_lite.extras.inspect.tuning import Setting
from tests.testing import alone


class Sleeps(TaskEncoder):
    @stateless(restore_seeds=False)
    def encode_sample(self, sample: Any) -> Any:
        time.sleep(1e-2)
        return {"key": sample.__key__}


def speed_of(path: Any, **kwargs: Any) -> LoaderSpeed:
    def make(workers: int) -> Any:
        return get_train_dataset(path, batch_size=4, task_encoder=Sleeps(), worker_config=alone(workers), **kwargs)

    return LoaderSpeed(make, 0.4)


def test_no_more_than_the_hooks_allow_and_each_goes_on_where_the_last_one_stopped(leaf_of: Any) -> None:
    measure = speed_of(leaf_of(100))
    places = list[int]()
    for setting in (Setting(0), Setting(2), Setting(2, start_method="thread")):
        speed = measure(setting)
        most = 100 * max(1, setting.workers)
        assert 0.1 * most < speed.samples < 1.1 * most and speed.batches == pytest.approx(speed.samples / 4)
        assert speed.limit is not None and speed.limit["limit"] == "hooks" and speed.memory > 0
        places.append(measure._state["position"])
    assert places == sorted(places) and len(set(places)) == 3


def test_passes_that_end_are_begun_again_and_threads_that_cannot_are_told(leaf_of: Any) -> None:
    from energon_lite import ReadAhead, Reading

    assert speed_of(leaf_of(8), repeat=False)(Setting(0)).samples > 0
    measure = speed_of(leaf_of(100), reading=Reading(read_ahead=ReadAhead()))
    found = measure(Setting(2, start_method="thread"))
    assert found.samples == 0 and "read_ahead" in found.error


def test_memory_of_a_process_and_its_children() -> None:
    before = memory_of(os.getpid())
    assert before > 0
    ready, told = os.pipe()
    leave, go = os.pipe()
    child = os.fork()
    if not child:
        kept = bytearray(b"x") * (256 << 20)
        os.write(told, kept[:1])
        os.close(go)
        os.read(leave, 1)
        os._exit(0)
    try:
        os.read(ready, 1)
        # The share of this process in what it maps with others changes when such processes begin and end.
        assert memory_of(os.getpid()) - before > 128 << 20
    finally:
        os.close(go)
        os.waitpid(child, 0)
    assert memory_of(1 << 22) == 0, "there is no such process"
    assert (available_memory() or 0) > 0
