"""Which settings are tried and proposed, on machines that are made up."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite.errors import UsageError
from energon_lite.extras.inspect.tuning import Bounds, Setting, Speed, Tuning, tune
from tests.testing import examples

GIB = 1 << 30


@dataclass
class Machine:
    """How fast a loader is here, by a formula.

    Args:
        work: seconds of a batch that any worker can do.
        cpu: the share of it that needs a core.
        cores: that there are.
        serial: seconds of a batch that only one process can do: the trainer's own, or the store's.
        python: the share of the work that threads cannot do beside each other.
        jitter: share by which batches differ; more of them ahead make up for that.
        each: bytes of a worker.
        noise: share by which a look may be wrong.
    """

    work: float = 0.04
    cpu: float = 1.0
    cores: int = 8
    serial: float = 0.002
    python: float = 0.8
    jitter: float = 0.0
    each: int = GIB // 4
    noise: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        self.random, self.now, self.tried = random.Random(self.seed), 0.0, list[Setting]()

    def batches(self, setting: Setting) -> float:
        """In a second, in truth."""
        workers = setting.workers
        if not workers:
            return 1 / (self.work + self.serial)
        busy = workers if workers * self.cpu <= self.cores else self.cores / self.cpu
        rate = busy / self.work
        if setting.kind == "thread":
            rate = min(rate, 1 / (self.work * self.python))
        waits = self.jitter / setting.prefetch
        return min(rate / (1 + waits), 1 / (self.serial if setting.kind == "process" else self.serial / 2))

    def memory(self, setting: Setting) -> int:
        return GIB + (self.each if setting.kind == "process" else self.each // 8) * setting.workers

    def __call__(self, setting: Setting) -> Speed:
        self.tried.append(setting)
        self.now += 2.5
        batches = self.batches(setting) * (1 - self.noise * self.random.random())
        return Speed(setting, 8 * batches, batches, self.memory(setting))


def found_on(machine: Machine, **bounds: float) -> Tuning:
    return tune(machine, Bounds(**{"workers": 32, **bounds}), clock=lambda: machine.now)  # type: ignore[arg-type]


def best_of(machine: Machine, workers: int, memory: float = 1e18) -> float:
    """By a grid."""
    every = [
        Setting(number, prefetch, method)
        for number in range(workers + 1)
        for prefetch in (2, 4, 8)
        for method in ("fork", "thread")
    ]
    return max(machine.batches(one) for one in every if machine.memory(one) <= memory)


@settings(max_examples=examples(150), deadline=None)
@given(
    work=st.floats(0.002, 0.5),
    cpu=st.floats(0.0, 1.0),
    cores=st.integers(1, 16),
    serial=st.floats(1e-4, 0.02),
    python=st.floats(0.02, 1.0),
    jitter=st.floats(0.0, 1.0),
    seed=st.integers(0, 99),
)
def test_within_a_tenth_of_the_best_of_a_grid(seed: int, cores: int, **shape: float) -> None:
    machine = Machine(cores=cores, noise=0.03, seed=seed, **shape)
    found = found_on(machine, workers=4 * cores)
    assert found.best is not None
    assert machine.batches(found.best.setting) >= 0.9 * best_of(machine, 4 * cores), (found.best, machine.tried)
    assert machine.now <= 60


def test_no_setting_beyond_the_memory_is_tried_or_proposed() -> None:
    machine = Machine(each=GIB)
    found = found_on(machine, memory=4 * GIB, threads=False)
    assert found.best is not None and found.best.setting.workers == 3 and best_of(machine, 8, 4 * GIB) > 0
    assert all(machine.memory(one) <= 4 * GIB for one in machine.tried)
    assert "GiB" in found.left_out[Setting(4)]


def test_what_turns_out_to_be_too_large_is_not_proposed() -> None:
    machine = Machine(each=4 * GIB)
    found = found_on(machine, memory=4 * GIB, threads=False)
    assert found.best is not None and found.best.setting == Setting(0)
    assert machine.tried.count(Setting(1)) == 1 and Setting(2) not in machine.tried


def test_the_fewest_workers_that_keep_up() -> None:
    found = found_on(Machine(work=0.1, cores=16), batches=45.0)
    assert found.best is not None and found.best.setting == Setting(5)


def test_workers_that_cannot_be_run_are_left_out() -> None:
    machine = Machine()

    def measure(setting: Setting) -> Speed:
        speed = machine(setting)
        return speed if setting.kind != "thread" else Speed(setting, 0.0, error="read_ahead")

    found = tune(measure, Bounds(8), clock=lambda: machine.now)
    assert found.best is not None and found.best.setting == Setting(8)
    assert [one.error for one in found.all() if one.setting.kind == "thread"] == ["read_ahead"]


def test_nothing_works() -> None:
    with pytest.raises(UsageError, match="no setting could be run: broken"):
        tune(lambda setting: Speed(setting, 0.0, error="broken"), Bounds(4))
    with pytest.raises(UsageError, match="fits into memory"):
        tune(Machine(), Bounds(4, memory=GIB // 2))


def test_time_is_kept() -> None:
    machine = Machine(cores=64)
    found = found_on(machine, workers=256, seconds=11)
    assert machine.now <= 12 and found.left_out and found.best is not None and found.best.samples > 0


def test_looks_that_differ_are_told() -> None:
    assert found_on(Machine(noise=0.0)).spread == 0.0
    assert 0.3 < found_on(Machine(noise=0.7)).spread < 0.7
