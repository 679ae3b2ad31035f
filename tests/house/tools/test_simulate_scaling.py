"""The model of scaling: it gives the published table, and what it gives elsewhere is possible."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.testing import script

SCRIPT = Path(__file__).parents[3] / "tools" / "simulate_scaling.py"
scaling = script(SCRIPT)
MACHINES = st.builds(
    scaling.Machine,
    kernels=st.floats(100, 10_000),
    efficiency=st.floats(0.05, 1.0),
    network=st.floats(1e9, 1e12),
    latency=st.floats(0, 1e-4),
)
JOBS = st.builds(scaling.Job, parameters=st.floats(1e8, 1e11), tp=st.sampled_from([1, 2, 8]))


def test_the_published_table_comes_out() -> None:
    machine = scaling.calibrated(scaling.Job(), scaling.Machine())
    for (way, gpus), published in scaling.TABLE.items():
        found = scaling.tokens_per_second(way, gpus, scaling.Job(), machine)
        # Two constants are fitted to the two stock rows; the others follow.
        assert found == pytest.approx(published, rel=1e-3 if way == "stock" else scaling.STATED_ERROR)


def test_what_was_measured_comes_out() -> None:
    for (way, count), seconds in scaling.MEASURED.items():
        found = scaling.scheduled(way, count, scaling.MEASURED_COSTS)
        assert found == pytest.approx(seconds, rel=scaling.STATED_ERROR)


def parts(way: str, gpus: int, job: Any, machine: Any, count: int) -> tuple[float, float, float]:
    """Seconds of computation, of communication and of the update, each alone."""
    own, ranks = job.parameters / job.tp, max(1, gpus // job.tp)
    buckets = -(-own // scaling.bucket_elements(way, ranks))
    reductions = count if way in ("overlapped", "every") else 1
    one = [machine.collective(size * own / buckets, ranks, job.tp) for size in (4, 2)]
    update = 30 * own / ranks / machine.memory
    tokens = count * job.micro_batch * job.sequence / job.tp
    return tokens / machine.kernels, buckets * (reductions * one[0] + one[1]), update


@given(JOBS, MACHINES, st.integers(1, 200), st.integers(1, 12), st.sampled_from(scaling.WAYS))
def test_a_step_is_between_all_hidden_and_nothing_hidden(
    job: Any, machine: Any, replicas: int, count: int, way: str
) -> None:
    gpus = replicas * job.tp
    compute, network, update = parts(way, gpus, job, machine, count)
    found = scaling.step_time(way, gpus, job, machine, count)
    assert max(compute, network) + update <= found * (1 + 1e-9)
    assert found <= (compute + network + update) * (1 + 1e-9)
    if way == "stock":
        assert found == pytest.approx(compute + network + update)


@given(JOBS, MACHINES, st.integers(1, 200), st.integers(1, 12))
def test_to_reduce_once_is_never_slower(job: Any, machine: Any, replicas: int, count: int) -> None:
    gpus = replicas * job.tp
    last, every = (scaling.step_time(way, gpus, job, machine, count) for way in ("last", "every"))
    assert last <= every * (1 + 1e-9)
    if count == 1:
        assert last == pytest.approx(every)


def test_on_a_slow_network_to_reduce_each_time_is_slower_than_no_overlap_at_all() -> None:
    """What users of Megatron-LLaMA measured with much accumulation, and why ``last`` is the default."""
    machine = replace(scaling.calibrated(scaling.Job(), scaling.Machine()), network=2e10)
    stock, overlapped, last = (
        scaling.step_time(way, 128, scaling.Job(), machine, 16) for way in ("stock", "overlapped", "last")
    )
    assert last < stock < overlapped


def test_by_hand() -> None:
    job = scaling.Job(parameters=80e6, tp=1, sequence=100, micro_batch=1)
    machine = scaling.Machine(kernels=100.0, efficiency=1.0, network=1e9, latency=0.0, memory=1e30)
    # Two buckets of 40 million. A pass takes 1/3 s forward and 2/3 s backward, 1/6 and 1/3 of a bucket. On two ranks
    # gathering a bucket takes 0.04 s and reducing it 0.08 s: only the first of these and the last of those shows.
    assert scaling.step_time("last", 2, job, machine, 3) == pytest.approx(0.04 + 3.0 + 0.08)
    assert scaling.step_time("stock", 2, job, machine, 3) == pytest.approx(3.0 + 0.12 * 2)
    assert scaling.step_time("last", 1, job, machine, 3) == pytest.approx(3.0)


def test_it_says_that_it_is_a_model_and_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "scaling.png"
    command = [sys.executable, str(SCRIPT), "--gpus", "32", "256", "--plot", str(picture)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("A model, not a measurement")
    assert picture.read_bytes().startswith(b"\x89PNG")
