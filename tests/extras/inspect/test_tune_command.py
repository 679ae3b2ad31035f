"""``energon-lite tune``: real loaders, for a short time; and the search, on machines that are made up."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite import ReadAhead, Reading, TaskEncoder, get_train_dataset, stateless
from energon_lite.errors import UsageError
from energon_lite.extras.inspect.tune_command import LoaderSpeed, _report, _slope, available_memory, memory_of
from energon_lite.extras.inspect.tuning import Bounds, Setting, Speed, Tuning, tune
from tests.accidents import beside
from tests.testing import alone, command, examples, invoke, output_of, until

HERE = "tests.extras.inspect.test_tune_command"
TRAINER = os.getpid()


class Sleeps(TaskEncoder):
    @stateless(restore_seeds=False)
    def encode_sample(self, sample: Any) -> Any:
        time.sleep(0.01)
        return {"key": sample.__key__}


class Hungry(TaskEncoder):
    kept: bytearray | None = None

    @stateless(restore_seeds=False)
    def encode_sample(self, sample: Any) -> Any:
        if os.getpid() != TRAINER and self.kept is None:
            self.kept = bytearray(os.urandom(1 << 20)) * 300
        return {"key": sample.__key__}


@pytest.fixture
def folder(leaf_of: Any) -> Path:
    return Path(leaf_of(120, "tuned"))


@pytest.mark.slow
def test_batches_by_tokens_in_one_word(folder: Path) -> None:
    output_of("measure", folder, "--length-field", "txt", "--no-progress")
    given = ["--seconds", 4, "--most-workers", 1, "--no-threads", "--json"]
    found = invoke("tune", folder, "--batching", "best_fit:capacity=40", *given)
    assert found.exit_code == 0 and json.loads(found.stdout)["best"]["samples"] > 0, found.output


@pytest.mark.nightly  # each time, proposals on machines that are made up
def test_it_proposes_workers(folder: Path) -> None:
    given = ["--task-encoder", f"{HERE}:Sleeps", "--batch-size", 4, "--seconds", 20, "--most-workers", 4]
    lines = output_of("tune", folder, *given, "--step-seconds", 0.021).splitlines()
    assert "cores and" in lines[0] and lines[1].startswith("  no workers: ")
    proposal = next(line for line in lines if line.startswith("num_workers="))
    # A batch takes 40 ms: two workers make one in 20 ms, if the machine lets them.
    assert proposal.startswith(("num_workers=2,", "num_workers=3,", "num_workers=4,")), lines
    assert "times as fast as without workers" in proposal and "The loader is then limited by hooks." in lines


def test_what_takes_too_much_memory_is_not_proposed(folder: Path) -> None:
    given = ["--task-encoder", f"{HERE}:Hungry", "--seconds", 12, "--most-workers", 1, "--no-threads", "--json"]
    limit = memory_of(os.getpid()) + (150 << 20)
    result = json.loads(output_of("tune", folder, *given, "--memory-limit", limit))
    assert result["best"]["setting"]["workers"] == 0 and result["best"]["memory"] < limit
    (worker,) = [one for one in result["measured"] if one["setting"]["workers"]]
    assert worker["memory"] > limit


def test_what_cannot_be_loaded_is_said_and_bad_options(folder: Path) -> None:
    for path, options, status, said in (
        (folder / "nothing", ["--seconds", 4], 1, "nothing"),
        (folder, ["--memory-limit", "lots"], 1, "is not a number of bytes"),
        (folder, ["--ranks", 0], 2, ""),
    ):
        code, output = command("tune", path, *options)
        assert code == status and said in output


# -- how fast loaders are, where it is known, and what memory they have ------------------------------------------------


def speed_of(path: Any, **kwargs: Any) -> LoaderSpeed:
    def make(workers: int) -> Any:
        return get_train_dataset(path, batch_size=4, task_encoder=Sleeps(), worker_config=alone(workers), **kwargs)

    return LoaderSpeed(make, 0.4)


def test_no_more_than_the_hooks_allow_and_each_goes_on_where_the_last_one_stopped(leaf_of: Any) -> None:
    measure = speed_of(leaf_of(100))
    places = list[int]()
    for setting in (Setting(0), Setting(2), Setting(2, start_method="thread")):
        speed = measure(setting)
        most = 100 * max(1, setting.workers)
        assert 0.1 * most < speed.samples < 1.1 * most and speed.batches == pytest.approx(speed.samples / 4)
        assert speed.limit is not None and speed.limit["limit"] == "hooks" and speed.memory > 0
        places.append(measure._state["position"])
    assert places == sorted(places) and len(set(places)) == 3


def test_passes_that_end_are_begun_again_and_threads_that_cannot_are_told(leaf_of: Any) -> None:
    assert speed_of(leaf_of(8), repeat=False)(Setting(0)).samples > 0
    measure = speed_of(leaf_of(100), reading=Reading(read_ahead=ReadAhead()))
    found = measure(Setting(2, start_method="thread"))
    assert found.samples == 0 and "read_ahead" in found.error


def test_a_pause_of_the_machine_does_not_count_where_batches_are_many() -> None:
    times = [number / 10 + 5 * (number > 5) for number in range(15)]
    assert _slope(times[:12], 1) == pytest.approx(10) == _slope(times, 5)
    assert _slope(times[:11], 1) < 3 > _slope(times[:14], 5)


def test_memory_of_a_process_and_its_children() -> None:
    before = memory_of(os.getpid())
    assert before > 0

    def keep() -> None:
        kept = bytearray(b"x") * (256 << 20)
        while kept:
            signal.pause()

    with beside(keep):
        # The share of this process in what it maps with others changes when such processes begin and end.
        assert until(lambda: memory_of(os.getpid()) - before > 128 << 20)
    assert memory_of(1 << 22) == 0, "there is no such process"
    assert (available_memory() or 0) > 0


# -- which settings are tried and proposed, on machines that are made up -----------------------------------------------


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


def found_on(machine: Machine, **bounds: float) -> tuple[Tuning, Speed]:
    """What is found, and the best of it."""
    found = tune(machine, Bounds(**{"workers": 32, **bounds}), clock=lambda: machine.now)  # type: ignore[arg-type]
    assert found.best is not None
    return found, found.best


def best_of(machine: Machine, workers: int) -> float:
    """By a grid."""
    every = itertools.product(range(workers + 1), (2, 4, 8), ("fork", "thread"))
    return max(machine.batches(Setting(*one)) for one in every)


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
    _, best = found_on(machine, workers=4 * cores)
    assert machine.batches(best.setting) >= 0.9 * best_of(machine, 4 * cores), (best, machine.tried)
    assert machine.now <= 60


def test_no_setting_beyond_the_memory_is_tried_or_proposed() -> None:
    machine = Machine(each=GIB)
    found, best = found_on(machine, memory=4 * GIB, threads=False)
    assert best.setting.workers == 3
    assert all(machine.memory(one) <= 4 * GIB for one in machine.tried)
    assert "GiB" in found.left_out[Setting(4)]


def test_what_turns_out_to_be_too_large_is_not_proposed() -> None:
    machine = Machine(each=4 * GIB)
    assert found_on(machine, memory=4 * GIB, threads=False)[1].setting == Setting(0)
    assert machine.tried.count(Setting(1)) == 1 and Setting(2) not in machine.tried


def test_the_fewest_workers_that_keep_up() -> None:
    assert found_on(Machine(work=0.1, cores=16), batches=45.0)[1].setting == Setting(5)


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
    found, best = found_on(machine, workers=256, seconds=11)
    assert machine.now <= 12 and found.left_out and best.samples > 0


def test_the_report() -> None:
    alone, two = Speed(Setting(0), 100.0, 25.0, GIB), Speed(Setting(2), 180.0, 45.0, 2 * GIB)
    for limit, said in (("hooks", ["The loader is then limited by hooks."]), ("trainer", []), (None, [])):
        best = replace(two, limit=limit and {"limit": limit})
        lines = _report(Tuning([alone, best], best=best), Bounds(4, batches=90.0)).splitlines()
        assert lines[-2 - len(said)].endswith("180.0 samples/s, 1.8 times as fast as without workers; 2.00 GiB")
        assert lines[-1 - len(said) :] == [
            "That is 50 % of what the training could take: the loader will be the limit.",
            *said,
        ]


def test_looks_that_differ_are_told() -> None:
    assert found_on(Machine(noise=0.0))[0].spread == 0.0
    assert 0.3 < found_on(Machine(noise=0.7))[0].spread < 0.7
