"""``energon-lite tune``: real loaders, for a short time."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from energon_lite.extras.inspect.tune_command import memory_of
from tests.testing import invoke

ENCODERS = """
import ctypes, os, time
from energon_lite import TaskEncoder, stateless

class Sleeps(TaskEncoder):
    @stateless(restore_seeds=False)
    def encode_sample(self, sample):
        time.sleep(0.01)
        return {"key": sample.__key__}

class Hungry(TaskEncoder):
    kept = None

    @stateless(restore_seeds=False)
    def encode_sample(self, sample):
        if os.getpid() != TRAINER and self.kept is None:
            self.kept = bytearray(os.urandom(1 << 20)) * 300
        return {"key": sample.__key__}

TRAINER = os.getpid()
"""


@pytest.fixture
def folder(leaf_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tuned_encoders.py").write_text(ENCODERS)
    monkeypatch.chdir(tmp_path)
    return Path(leaf_of(120, "tuned"))


def tune(*arguments: object) -> Any:
    return invoke("tune", *arguments)


@pytest.mark.slow
def test_batches_by_tokens_in_one_word(folder: Path) -> None:
    stored = invoke("measure", folder, "--length-field", "txt", "--no-progress")
    assert stored.exit_code == 0, stored.output
    given = ["--seconds", 4, "--most-workers", 1, "--no-threads", "--json"]
    found = tune(folder, "--batching", "best_fit:capacity=40", *given)
    assert found.exit_code == 0 and json.loads(found.stdout)["best"]["samples"] > 0, found.output


@pytest.mark.nightly  # each time, proposals on machines that are made up (tuning/test_search.py)
def test_it_proposes_workers(folder: Path) -> None:
    given = ["--task-encoder", "tuned_encoders:Sleeps", "--batch-size", 4, "--seconds", 20, "--most-workers", 4]
    found = tune(folder, *given, "--step-seconds", 0.021)
    assert found.exit_code == 0, found.output
    lines = found.output.splitlines()
    assert "cores and" in lines[0] and lines[1].startswith("  no workers: ")
    proposal = next(line for line in lines if line.startswith("num_workers="))
    # A batch takes 40 ms: two workers make one in 20 ms, if the machine lets them.
    assert proposal.startswith(("num_workers=2,", "num_workers=3,", "num_workers=4,")), found.output
    assert "times as fast as without workers" in proposal and "The loader is then limited by hooks." in lines


def test_what_takes_too_much_memory_is_not_proposed(folder: Path) -> None:
    given = ["--task-encoder", "tuned_encoders:Hungry", "--seconds", 12, "--most-workers", 1, "--no-threads", "--json"]
    limit = memory_of(os.getpid()) + (150 << 20)
    found = tune(folder, *given, "--memory-limit", limit)
    assert found.exit_code == 0, found.output
    result = json.loads(found.output)
    assert result["best"]["setting"]["workers"] == 0 and result["best"]["memory"] < limit
    (worker,) = [one for one in result["measured"] if one["setting"]["workers"]]
    assert worker["memory"] > limit


def test_what_cannot_be_loaded_is_said(tmp_path: Path) -> None:
    found = tune(tmp_path / "nothing", "--seconds", 4)
    assert found.exit_code == 1 and "nothing" in found.output and "Traceback" not in found.output


def test_bad_options(folder: Path) -> None:
    assert "is not a number of bytes" in tune(folder, "--memory-limit", "lots").output
    assert tune(folder, "--ranks", 0).exit_code == 2
