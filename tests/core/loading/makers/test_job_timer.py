"""Which jobs are timed, what they say, and what they say of all of them."""

from __future__ import annotations

import timeit
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.loading.executors.executor import STAGES, WorkSeconds
from energon_lite.loading.makers import observers
from energon_lite.loading.makers.observers import JobTimer, Times
from energon_lite.storage.files.shard_store import COUNTS, Reads


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 100.0
        monkeypatch.setattr(observers.time, "monotonic", lambda: self.now)


class Samples:
    """What makes samples, as far as a timer sees it: a second for each step of a job."""

    observers: tuple[Any, ...] = ()

    def __init__(self, clock: Clock, *steps: tuple[str, str]):
        self.clock, self.steps = clock, steps

    def make(self) -> str:
        for observer in self.observers:
            observer.begin()
        for stage, leaf in self.steps:
            for observer in self.observers:
                observer.step(stage, leaf, "key")
            self.clock.now += 1.0
        for observer in self.observers:
            observer.end(())
        self.clock.now += 1.0  # somebody else's
        return "made"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_seconds_by_stage_and_data_set(clock: Clock) -> None:
    COUNTS.take()
    COUNTS.bytes_read += 7
    said: list[Times] = []
    steps = [("read", "a"), ("decode", "a"), ("encode_sample", "a"), ("decode_columns", "b"), ("batch", "*")]
    timer, samples = JobTimer(said.append), Samples(clock, *steps, ("cook_crude_sample", "a"))
    timer.sent = 0.5
    assert timer.run(samples, samples.make) == "made" and samples.observers == ()
    (times,) = said
    assert times.seconds == 7.0 and times.sent == 0.5 and times.reads == Reads(7)
    assert times.steps == [
        ("read", "a", 1.0),
        ("decode", "a", 1.0),
        ("hooks", "a", 2.0),
        ("decode", "b", 1.0),
        ("batch", "*", 1.0),
    ]
    work = WorkSeconds()
    work.add(times)
    work.busy = 70.0  # ten jobs of this kind, of which one was timed
    expected = {"read": 10.0, "decode": 20.0, "hooks": 20.0, "batch": 10.0, "other": 10.0}
    assert work.sum().by_stage() == pytest.approx(expected)
    assert work.by_leaf() == [
        {"dataset": "a", "read": 10.0, "decode": 10.0, "hooks": 20.0},
        {"dataset": "b", "read": 0.0, "decode": 10.0, "hooks": 0.0},
    ]


@pytest.mark.parametrize("steps", [1, 64, 1000])
def test_to_look_takes_a_250th_of_the_time_at_most(clock: Clock, steps: int) -> None:
    timer, samples = JobTimer(lambda _: None), Samples(clock, *[("decode", "a")] * steps)
    began = clock.now
    timer.run(samples, samples.make)
    assert timer.due - began == pytest.approx((steps + 24) * 1.5e-6 * 250)
    assert timer.due < clock.now, "slow jobs are timed one by one"


def test_a_job_that_fails_is_timed_and_nobody_looks_on_behind_it(clock: Clock) -> None:
    said: list[Times] = []
    timer, samples = JobTimer(said.append), Samples(clock, ("decode", "a"))

    def fail() -> None:
        samples.make()
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        timer.run(samples, fail)
    assert samples.observers == () and said[0].seconds == 2.0


def test_it_costs_a_few_microseconds() -> None:
    timer = JobTimer(lambda _: None)
    samples: Any = type("Samples", (), {"observers": ()})()
    best = min(timeit.repeat(lambda: timer.run(samples, lambda: None), repeat=200, number=1))
    assert best < 24 * 1.5e-6, "a timed job costs more than is reckoned with"


#: Seconds of a job by stage.
PARTS = st.tuples(*[st.integers(0, 1000)] * len(STAGES)).filter(any)


def add(work: WorkSeconds, parts: tuple[int, ...], timed: bool) -> None:
    """A job is done, by whichever worker."""
    if timed:
        steps = [(stage, "a", float(part)) for stage, part in zip(STAGES, parts, strict=True) if stage != "other"]
        work.add(Times(float(sum(parts)), steps, cpu_seconds=float(parts[0])))
    work.busy += sum(parts)


@given(st.lists(st.tuples(PARTS, st.booleans()), max_size=20))
def test_no_stage_is_wrong_by_more_than_nobody_has_timed(jobs: list[tuple[tuple[int, ...], bool]]) -> None:
    work = WorkSeconds()
    for parts, timed in jobs:
        add(work, parts, timed)
    found, unknown = work.sum().by_stage(), sum(sum(parts) for parts, timed in jobs if not timed)
    if not any(timed for _, timed in jobs):
        assert not any(found.values())
        return
    assert sum(found.values()) == pytest.approx(work.busy)
    for number, stage in enumerate(STAGES):
        assert abs(found[stage] - sum(parts[number] for parts, _ in jobs)) <= unknown + 1e-6 * work.busy, stage
    assert sum(float(one["decode"]) for one in work.by_leaf()) == pytest.approx(found["decode"])


def test_a_slow_beginning_says_nothing_about_what_follows() -> None:
    work = WorkSeconds()
    add(work, (5000, 0, 0, 0, 0), True)  # files are opened
    for number in range(1000):
        add(work, (1, 9, 0, 0, 0), number % 100 == 99)
    found = work.sum().by_stage()
    assert found["read"] == pytest.approx(6000) and found["decode"] == pytest.approx(9000)
    before = work.sum()
    add(work, (0, 0, 10, 0, 0), True)
    assert work.sum().since(before).by_stage() == pytest.approx(dict.fromkeys(STAGES, 0.0) | {"hooks": 10.0}, abs=1e-6)
