"""Commands that report say the same as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from energon_lite import get_savable_loader, get_train_dataset
from tests.conftest import text_dataset
from tests.testing import ALONE, invoke, take


def found(*arguments: object) -> Any:
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_plan(tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.arange(1, 101))
    table = found("plan", tmp_path / "lengths.npy", "--capacity", 1000, "-s", "fixed", "-s", "bfd")
    assert (table["samples"], table["tokens"]) == (100, 5050)
    assert [plan["strategy"] for plan in table["plans"]] == ["fixed", "bfd"] and "fill" in table["plans"][0]


def test_trace(tmp_path: Path) -> None:
    dataset = get_train_dataset(text_dataset(tmp_path / "data", 10), worker_config=ALONE, batch_size=2)
    with get_savable_loader(dataset, trace=str(tmp_path / "trace.jsonl")) as loader:
        take(loader, 5)
    said = found("trace", tmp_path / "trace.jsonl", "--slowest", 3)
    assert (said["batches"], said["samples"], said["ranks"], said["keys"]) == (5, 10, [0], {})
    assert said["stages"]["read"] > 0


def test_measure(tmp_path: Path) -> None:
    path = text_dataset(tmp_path / "data", 10)
    arguments = ["--task-encoder", "energon_lite:DefaultTaskEncoder", "--length-field", "text", "--num-workers", 0]
    said = found("measure", path, *arguments, "--no-progress")
    assert said["samples"] == 10 and said["failed"] == 0 and said["shortest"] > 0
