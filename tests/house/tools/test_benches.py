"""Benchmarks: what a training step launches, counted where there is no GPU; and costs that are fitted by some
micro-batches predict how long others take."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fork_server import run_program
from tests.testing import script

BENCHES = Path(__file__).parents[3] / "tools/bench"
TRAIN_STEP, COST_MODEL = BENCHES / "train_step.py", BENCHES / "cost_model.py"


@pytest.mark.parametrize(
    "variant", [pytest.param("ours", marks=pytest.mark.slow), pytest.param("packed", marks=pytest.mark.nightly)]
)
def test_a_step_launches_few_things_and_reads_nothing_back(variant: str) -> None:
    command = [str(TRAIN_STEP), "--tiny", "--run", variant]
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

    monkeypatch.syspath_prepend(TRAIN_STEP.parent)
    bench = script(TRAIN_STEP)
    monkeypatch.setattr(bench, "fresh_process", fresh_process)
    monkeypatch.setattr(sys, "argv", [str(TRAIN_STEP), "--tiny", *how])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    bench.main()
    shown = capsys.readouterr().out
    both = ["by-hand", *["torchtitan"] * installed]
    assert runs == ["matrix", *both, *both, "optimizer"]
    assert "\nby-hand" in shown and ("\ntorchtitan" in shown) == installed


def mean_errors(*words: str) -> dict[str, float]:
    bench = script(COST_MODEL)
    found = bench.errors_of(bench.arguments().parse_args(words))
    return {name: float(errors.mean()) for name, errors in found.items()}


@pytest.mark.nightly
def test_predictions_are_within_8_percent_on_a_processor() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = mean_errors("--count", "80", "--repeats", "3")
    finally:
        torch.set_num_threads(threads)
    assert found["fitted"] < 0.08
    assert found["fitted"] < found["costs by shape"] < found["tokens"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; pytest -m gpu")
def test_predictions_are_within_5_percent_on_a_gpu() -> None:
    # Layers so wide that the device is busy for longer than the host takes to launch their kernels.
    sizes = {
        "hidden": 4096,
        "layers": 4,
        "vision": 2048,
        "vision-layers": 4,
        "capacity": 8192,
        "count": 60,
        "repeats": 4,
    }
    words = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    assert mean_errors("--device", "cuda", *words)["fitted"] < 0.05
