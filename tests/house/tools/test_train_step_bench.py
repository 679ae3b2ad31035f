"""What a training step launches, as the benchmark counts it where there is no GPU."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fork_server import run_program
from tests.testing import script

SCRIPT = Path(__file__).parents[3] / "tools/bench/train_step.py"


@pytest.mark.parametrize(
    "variant", [pytest.param("ours", marks=pytest.mark.slow), pytest.param("packed", marks=pytest.mark.nightly)]
)
def test_a_step_launches_few_things_and_reads_nothing_back(variant: str) -> None:
    command = [str(SCRIPT), "--tiny", "--run", variant]
    done = run_program(command, capture_output=True, text=True, timeout=300, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    counts = found["counts"]
    assert counts["graphs"] == 2, "one for all blocks, and one for the loss"
    assert counts["host_reads"] == 0
    assert 100 < counts["kernels"] < 500 and counts["copies"] < 160
    assert found["last"] < found["first"]


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize(
    "how", [["--variants", "by-hand,torchtitan"], ["--variants=by-hand,torchtitan"]], ids=["space", "equals"]
)
def test_variants_are_named_in_either_way(
    how: list[str], installed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each measurement is a process of its own; none of them is started here."""
    runs: list[str] = []

    def fresh_process(script: str, *words: str) -> Any:
        *_, variants, empty, run, name = words
        assert (variants, empty, run) == ("--variants", "", "--run")  # the last one counts
        runs.append(name)
        counts = dict.fromkeys(("graphs", "operations", "kernels", "copies", "host_reads"), 1)
        found = {"seconds": [1.0], "memory": 1.0, "first": 2.0, "last": 1.0, "counts": counts}
        return {"matrix": 1e12, "optimizer": {"ours": 1.0, "plain": 1.0}}.get(name, found)

    monkeypatch.syspath_prepend(SCRIPT.parent)
    bench = script(SCRIPT)
    monkeypatch.setattr(bench, "fresh_process", fresh_process)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--tiny", *how])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    bench.main()
    shown = capsys.readouterr().out
    both = ["by-hand", *["torchtitan"] * installed]
    assert runs == ["matrix", *both, *both, "optimizer"]
    assert "\nby-hand" in shown and ("\ntorchtitan" in shown) == installed
