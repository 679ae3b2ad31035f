"""Settings of the process that a run computes in; when its time limit counts as reached, and what signals tell it."""

from __future__ import annotations

import itertools
import logging
import os
import signal
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.errors import UsageError
from energon_lite.extras.inspect import ProfileWindow
from energon_lite.trainer import build_mesh, config_from_dict
from energon_lite.trainer.training import process
from energon_lite.trainer.training.config import changes
from energon_lite.trainer.training.process import Requests, prepare_attention, prepare_process


def config(**train: Any) -> Any:
    return config_from_dict({"data": {"path": "x"}, "output": "runs/1", "train": train})


@pytest.mark.parametrize(
    ("given", "gpu", "expected"), [(None, False, True), (None, True, False), (True, True, True), (False, False, False)]
)
def test_a_gpu_is_fast_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, given: bool | None, gpu: bool, expected: bool
) -> None:
    made: list[bool] = []
    monkeypatch.setattr(process, "make_deterministic", lambda: made.append(True))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    prepare_process(config(deterministic=given))
    assert bool(made) == expected


def test_the_flight_recorder_is_set_up_before_nccl_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"})
    prepare_process(config(deterministic=False))
    assert len(os.environ) == 1
    prepare_process(config(deterministic=False, flight_recorder=2000))
    assert os.environ == {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "runs/1/nccl-trace-rank",
    }


def test_what_makes_a_process_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    told, values = mock.Mock(), dict[str, str]()
    monkeypatch.setattr(process, "torch", told)
    monkeypatch.setattr(os, "environ", values)
    process.make_deterministic()
    assert told.mock_calls == [mock.call.use_deterministic_algorithms(True), mock.call.set_num_threads(1)]
    assert values == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} and told.backends.cudnn.benchmark is False


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_attention_that_is_used_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, deterministic: bool
) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    caplog.set_level(logging.INFO)
    for visible in (True, False):
        prepare_attention(config(), torch.device("cpu"), visible=visible)
    (line,) = (record.message for record in caplog.records if record.name == process.__name__)
    assert line == f"attention: sdpa; deterministic: {deterministic}"


def test_memory_is_recorded_of_a_gpu_only() -> None:
    assert config(memory_snapshot=True, profile=[2, 3]).train.memory_snapshot
    with pytest.raises(UsageError, match="only the memory of a GPU"):
        ProfileWindow((2, 3), "nowhere", build_mesh(), memory=True)


@given(
    steps=st.lists(st.floats(0.5, 3.0), min_size=1, max_size=9),
    saving=st.just(0.0) | st.floats(0.0, 8.0),
    limit=st.floats(30.0, 60.0),
)
def test_what_is_left_is_enough_for_the_running_step_and_two_checkpoints(
    steps: list[float], saving: float, limit: float
) -> None:
    """Where the first step is the slowest one, and the time of a checkpoint is known; and no run stops much earlier."""
    now = began = 100.0
    saves = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process.time, "monotonic", lambda: now)
        asked, why = Requests(limit, build_mesh()), ""
        with asked.listening():
            for seconds in itertools.chain([3.0], itertools.cycle(steps)):
                now += seconds
                why, save, *_ = asked.agreed(seconds_to_save=saving)
                assert now < began + limit
                saves += save
                if why:
                    break
    assert why == "train.time_limit"
    assert now + 3.0 + 2 * saving <= began + limit
    assert now >= began + limit - 2 * (3.0 + saving)
    assert saves == (saving == 0.0)


def test_a_checkpoint_is_saved_early_while_nobody_knows_how_long_one_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    now, known, saved = 0.0, 0.0, []
    monkeypatch.setattr(process.time, "monotonic", lambda: now)
    asked, why = Requests(100.0, build_mesh()), ""
    with asked.listening():
        while not why:
            now += 1.0
            why, save, *_ = asked.agreed(seconds_to_save=known)
            if save:
                saved.append(now)
            known = 20.0 if saved and now >= saved[0] + 20.0 else 0.0  # written beside the steps
    assert saved == [51.0] and now == 72.0  # as soon as that is known


def test_signals_are_told_until_they_are_answered_and_given_back() -> None:
    asked = Requests(None, build_mesh())
    before = signal.getsignal(signal.SIGTERM)
    with asked.listening() as came:
        assert asked.agreed(True, False, sums=[3.0]) == ("", False, [True, False], [3.0])
        os.kill(os.getpid(), signal.SIGUSR2)
        assert asked.agreed() == ("", True, [], []) and asked.agreed() == ("", False, [], [])
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked.agreed()[0] == asked.agreed()[0] == "SIGTERM" and came == {"SIGTERM"}
    assert signal.getsignal(signal.SIGTERM) == before
    with asked.listening():
        assert asked.agreed()[0] == ""


def test_changes_of_what_decides_the_steps() -> None:
    old = {"output": "a", "seed": 0, "train": {"save_every": 2, "steps": 9}}
    new = {"output": "b", "seed": 1, "train": {"save_every": 3, "steps": 9}}
    assert [*changes(old, new)] == ["seed was 0, is 1"]
    assert [*changes(old, old | {"train": {"save_every": 2, "steps": 7}})] == ["train.steps was 9, is 7"]
