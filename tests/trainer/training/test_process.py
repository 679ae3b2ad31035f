"""Settings of the process that a run computes in."""

from __future__ import annotations

import logging
import os
from typing import Any

import pytest
import torch

from energon_lite.errors import ConfigError, UsageError
from energon_lite.extras.inspect import ProfileWindow
from energon_lite.trainer.parallel.mesh import ParallelMesh
from energon_lite.trainer.training import process
from energon_lite.trainer.training.config import config_from_dict
from energon_lite.trainer.training.process import prepare_attention, prepare_process


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


def test_memory_is_recorded_of_a_gpu_and_in_a_window(alone: ParallelMesh) -> None:
    with pytest.raises(ConfigError, match="memory_snapshot has no window"):
        config(memory_snapshot=True)
    assert config(memory_snapshot=True, profile=[2, 3]).train.memory_snapshot
    with pytest.raises(UsageError, match="only the memory of a GPU"):
        ProfileWindow((2, 3), "nowhere", alone, memory=True)
