"""What timed jobs say of all of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.loading.executors.executor import STAGES, WorkSeconds
from energon_lite.loading.makers.observers import Times

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
