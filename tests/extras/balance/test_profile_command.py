from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.cli import parse_bytes
from energon_lite.errors import UsageError
from energon_lite.extras.balance import (
    CostModel,
    Quadratic,
    capacity_trial,
    profile_command,
    read_cost_model,
    write_cost_model,
)
from energon_lite.extras.balance.capacity_trial import Outcome, Trial, largest_fitting, run_trial
from tests.testing import in_time, invoke, output_of, refusal_of

#: A step that takes one MiB for each token, and others.
MODULE = """
import os, time
import numpy as np

def step(capacity):
    np.ones(capacity << 17)

def built_once(capacity):
    print("built")
    time.sleep(1)
    return lambda: np.ones(capacity << 17)

def grows(capacity, kept=[]):
    kept.append(np.ones(capacity << 17))

def fails(capacity):
    raise ValueError(f"the model cannot take {capacity}")

def dies(capacity):
    print("something fatal", flush=True)
    os._exit(3)

def is_killed(capacity):
    os.kill(os.getpid(), 9)

def has_no_memory(capacity):
    raise MemoryError if capacity > 100 else None or RuntimeError("CUDA out of memory. Tried to allocate")

def sleeps(capacity):
    time.sleep(60)

nothing = 5
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "steps_here.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(capacity_trial.__file__).parents[2]))


def one(function: str, capacity: int = 10, limit: int | None = None, steps: int = 1, timeout: float = 300) -> Outcome:
    return run_trial(Trial(f"steps_here:{function}", capacity, steps, "cpu", limit), timeout)


linux = pytest.mark.skipif(sys.platform != "linux", reason="the limit is watched through /proc")


@linux
@pytest.mark.slow
def test_the_largest_capacity_within_a_limit() -> None:
    limits = ["--memory-limit", "400M", "--headroom", 0, "--start", 64, "--multiple", 16]
    output = output_of("profile", "steps_here:step", "--device", "cpu", *limits)
    head, *lines = output.splitlines()
    assert head == "steps_here:step on cpu, 0.39 of 0.39 GiB; 2 steps a try"
    rows = [line.split() for line in lines if re.match(r" +\d", line)]
    tries = {int(row[0]): "does not fit" not in " ".join(row) for row in rows}
    best = int(re.search(r"The largest capacity that fits is (\d+)", output)[1])  # type: ignore[index]
    # The interpreter and numpy take some of the 400 MiB; the rest has one MiB for each token.
    assert 200 < best < 400 and tries[best]
    assert {capacity for capacity, fits in tries.items() if not fits} == {one for one in tries if one > best}
    assert min(one for one in tries if one > best) - best == 16
    peaks = {int(row[0]): float(row[1]) for row in rows}
    assert peaks[128] - peaks[64] == pytest.approx(64 / 1024, abs=0.02)


@linux
def test_memory_that_is_kept_from_step_to_step_counts() -> None:
    assert one("grows", 50, limit=300 << 20, steps=2).fits
    found = one("grows", 50, limit=300 << 20, steps=20)
    assert not found.fits and found.peak > 300 << 20


def test_what_is_built_is_not_timed() -> None:
    found = one("built_once", steps=3)
    assert found.fits and 0 < found.seconds < 1


@pytest.mark.parametrize("function", ["is_killed", "has_no_memory"])
@pytest.mark.parametrize("capacity", [10, 1000])
def test_running_out_of_memory_is_no_failure(function: str, capacity: int) -> None:
    assert not one(function, capacity).fits


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("fails", "(?s)fails.10. failed, and not because memory ran out.*ValueError: the model cannot take 10"),
        ("dies", "(?s)not because memory ran out.*something fatal"),
        ("nothing", "is not a function"),
        ("stop", "did you mean 'step'"),
    ],
)
def test_other_failures_are_told(function: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        one(function)


def test_a_step_that_takes_too_long() -> None:
    with pytest.raises(UsageError, match=r"has been running for 0\.5 s"):
        one("sleeps", timeout=0.5)


def test_what_is_said_of_the_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """208 tokens do not fit."""
    slow, tried = {48: 0.0102, 96: 0.01, 192: 0.011, 208: 0.0}, list[Trial]()

    def run(trial: Trial, timeout: float) -> Outcome:
        tried.append(trial)
        return Outcome(trial.capacity < 208, trial.capacity % 208 << 23, slow[trial.capacity] * trial.capacity)

    monkeypatch.setattr(profile_command, "run_trial", run)
    limits = ["--memory-limit", "2G", "--start", 48, "--multiple", 16]
    words = ["profile", "a:b", "--device", "cpu", *limits, "--steps", 1, "--most"]
    head, *rows, _, best, faster = invoke(*words, 208).output.splitlines()
    assert head == "a:b on cpu, 1.90 of 2.00 GiB; 1 step a try"
    assert tried[0] == Trial("a:b", 48, 1, "cpu", int((2 << 30) * 0.95))
    assert rows[0] == "        48      0.38 GiB  0.49 s a step, 98 tokens/s"
    assert rows[3] == "       208                does not fit"  # of which the memory is not known
    assert best == "The largest capacity that fits is 192: 1.50 GiB, 2.11 s a step, 91 tokens/s."
    assert faster == "Faster, token for token, is 96: 0.96 s a step, 100 tokens/s."
    limited = "Nothing larger was tried: see --most."
    assert invoke(*words, 207).output.splitlines()[-3:] == [best, limited, faster]
    assert invoke(*words, 100).output.splitlines()[-1] == limited
    found = [profile_command._time(number * 10**power) for power in (18, 15, 12, 9, 6) for number in (1, 999)]
    assert found == [f"{number} {unit}" for unit in ("s", "ms", "us", "ns", "ps") for number in (1, 999)]


def test_wrong_arguments_and_nothing_that_fits(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    limit = ["--device", "cpu", "--memory-limit", "1G"]
    for words, message in (
        (["steps_here:step", "--device", "cpu"], r"cpu needs a limit[\s\S]*--memory-limit"),
        (["steps_here", *limit], "is not of the form module:function"),
        (["steps_here:has_no_memory", *limit, "--multiple", 1000], r"not even a capacity of 1000 fits into 0\.95 GiB"),
        ([tmp_path / "run"], "train.measure_costs"),  # a run that has measured nothing
        ([a_run(tmp_path / "other", 3)], "too few"),
        (["steps_here:step", "--json"], "to a run's costs"),
    ):
        assert re.search(message, refusal_of("profile", *words))
    for text, count in (("6G", 6 << 30), ("1.5 kib", 1536), ("500M", 500 << 20), ("77", 77), ("2tb", 2 * 10**12)):
        assert parse_bytes(text) == count
    for text in ("", "G", "0G", "6X", "-3G"):
        with pytest.raises(UsageError, match="is not a number of bytes"):
            parse_bytes(text)


def test_on_cuda_the_limit_is_the_allocators(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of the CUDA allocator, without one."""
    fractions: list[float] = []
    cuda = SimpleNamespace(
        set_per_process_memory_fraction=fractions.append,
        mem_get_info=lambda: (1, 1000),
        max_memory_reserved=lambda: 700,
        synchronize=lambda: None,
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    sys.path.insert(0, ".")
    try:
        assert capacity_trial._try(Trial("steps_here:step", 1, 2, "cuda", 750)).peak == 700
        assert capacity_trial._try(Trial("steps_here:step", 1, 1, "cuda", 650)).fits is False
        assert capacity_trial._try(Trial("steps_here:step", 1, 1, "cuda", 700)).fits
        assert capacity_trial._try(Trial("steps_here:has_no_memory", 1, 1, "cuda", 750)) == Outcome(False, 700)
    finally:
        sys.path.remove(".")
        sys.modules.pop("steps_here", None)
    assert fractions == [0.75, 0.65, 0.7, 0.75]


@pytest.mark.parametrize(("does", "memory"), [("exec sleep 100", None), ("echo 5000", 5000), ("echo 5; exit 1", None)])
def test_a_gpu_that_does_not_answer(does: str, memory: int | None, tmp_path: Path, monkeypatch: Any) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{does}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    if memory is None:
        monkeypatch.setattr(capacity_trial, "_ASKING", 0.3)
    assert in_time(lambda: capacity_trial.device_memory("cuda")) == memory


def a_run(folder: Path, count: int = 60) -> Path:
    """What a run leaves whose micro-batches take 2 us a token and 3 ms an image."""
    folder.mkdir()
    sizes = {"tokens": [1000 + 37 * n % 900 for n in range(count)], "images": [n % 5 for n in range(count)]}
    seconds = [2e-6 * tokens + 3e-3 * images for tokens, images in zip(*sizes.values(), strict=True)]
    (folder / "micro_batches.jsonl").write_text(json.dumps({"seconds": seconds, "sizes": sizes}) + "\n")
    return folder


def test_the_costs_of_a_run(tmp_path: Path) -> None:
    run, costs = a_run(tmp_path / "run"), tmp_path / "costs.json"
    result = invoke("profile", run, "-o", costs)
    assert "fitted by 60 micro-batches" in result.output
    assert "2 us for each of tokens" in result.output and "3 ms for each of images" in result.output
    model = read_cost_model(costs)
    assert model.language.b == pytest.approx(2e12) and model.encoder.c == pytest.approx(3e15)
    # Costs in another unit, as those by a model's shape, are compared by their proportions.
    write_cost_model(costs, CostModel(Quadratic(b=4 * 10**9), Quadratic(c=6 * 10**12)))
    words = ["profile", str(run / "micro_batches.jsonl"), "--compare", str(costs), "--json"]
    found = json.loads(invoke(*words).output)
    assert found["error"] < 1e-6 and found["error_of_compared"] < 1e-6
    assert sum(found["shares"].values()) == pytest.approx(1)


# -- the search for the largest capacity ------------------------------------------------------------------------------


def noting(limit: int) -> tuple[Callable[[int], bool], list[int]]:
    """Whether a capacity fits, and those that were tried."""
    tried: list[int] = []
    return lambda capacity: tried.append(capacity) or capacity <= limit, tried  # type: ignore[func-returns-value]


@given(
    limit=st.integers(0, 10_000),
    start=st.integers(1, 5000),
    most=st.integers(100, 20_000),
    multiple=st.integers(1, 100),
    precision=st.sampled_from([0.0, 0.01, 0.1]),
)
def test_the_largest_multiple_that_fits(limit: int, start: int, most: int, multiple: int, precision: float) -> None:
    fits, tried = noting(limit)
    found = largest_fitting(fits, start=start, most=most, multiple=multiple, precision=precision)
    best = min(limit, most) // multiple * multiple
    assert found <= best and found % multiple == 0
    assert best - found <= max(0, found * precision)
    assert len(set(tried)) == len(tried) <= 32 and all(0 < one <= most and one % multiple == 0 for one in tried)
    assert found == 0 or found in tried


def test_few_tries() -> None:
    fits, tried = noting(13_500)
    assert largest_fitting(fits, start=1024, multiple=64) == 13_440
    assert tried[:5] == [1024, 2048, 4096, 8192, 16_384] and len(tried) == 11


@pytest.mark.parametrize(("start", "most", "multiple"), [(0, 10, 1), (1, 0, 1), (1, 10, 0), (1, 10, 20)])
def test_nothing_to_try(start: int, most: int, multiple: int) -> None:
    with pytest.raises(UsageError, match="there is no multiple"):
        largest_fitting(lambda capacity: True, start=start, most=most, multiple=multiple)
