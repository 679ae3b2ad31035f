"""What a training step launches, as the benchmark counts it where there is no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "tools/bench/train_step.py"


@pytest.mark.parametrize(
    "variant", [pytest.param("ours", marks=pytest.mark.slow), pytest.param("packed", marks=pytest.mark.nightly)]
)
def test_a_step_launches_few_things_and_reads_nothing_back(variant: str) -> None:
    command = [sys.executable, str(SCRIPT), "--tiny", "--run", variant]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    counts = found["counts"]
    assert counts["graphs"] == 2, "one for all blocks, and one for the loss"
    assert counts["host_reads"] == 0
    assert 100 < counts["kernels"] < 500 and counts["copies"] < 160
    assert found["last"] < found["first"]


@pytest.mark.slow
@pytest.mark.parametrize("how", [["--variants", "by-hand"], ["--variants=by-hand"]], ids=["space", "equals"])
def test_variants_are_named_in_either_way(how: list[str]) -> None:
    command = [sys.executable, str(SCRIPT), "--tiny", *how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "\nby-hand" in done.stdout and "\nours" not in done.stdout
