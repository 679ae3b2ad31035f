"""Learning rates of the steps of a run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.trainer import OptimizerConfig, learning_rate
from energon_lite.trainer.optimizer.config import SCHEDULES


def rates(schedule: str, total: int = 11, **more: float) -> list[float]:
    config = OptimizerConfig(**{"lr": 1.0, "min_lr": 0.2, "warmup": 2, "schedule": schedule} | more)  # type: ignore[arg-type]
    return [learning_rate(step, total, config) for step in range(total)]


def test_schedules_by_hand() -> None:
    assert rates("constant") == [0.5] + [1.0] * 10
    assert rates("linear") == pytest.approx([0.5, 1.0, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2])
    cosine = [0.25, 0.5, 0.75, 1.0, 1.0, 0.8828427, 0.6, 0.3171573, 0.2]
    assert rates("cosine", 9, warmup=4) == pytest.approx(cosine) and rates("cosine", 1, warmup=0) == [1.0]
    # A fifth of ten steps, rounded up, is the way down.
    assert rates("wsd", 10) == pytest.approx([0.5] + [1.0] * 7 + [0.6, 0.2])
    assert rates("wsd", 11, decay_share=1.0) == pytest.approx(rates("linear"))
    assert learning_rate(50, 9, OptimizerConfig(lr=1.0, min_lr=0.2)) == pytest.approx(0.2), "past the end it stays"


@given(
    schedule=st.sampled_from(SCHEDULES), total=st.integers(1, 60), warmup=st.integers(0, 70), share=st.floats(0.01, 1.0)
)
def test_every_schedule_rises_falls_and_ends_at_its_least(schedule: str, total: int, warmup: int, share: float) -> None:
    config = OptimizerConfig(lr=1.0, min_lr=0.25, warmup=warmup, schedule=schedule, decay_share=share)
    found = [learning_rate(step, total, config) for step in range(total)]
    assert all(0 < rate <= 1.0 for rate in found)
    assert found[:warmup] == sorted(found[:warmup]) and found[warmup:] == sorted(found[warmup:], reverse=True)
    if total > warmup + 1:
        assert found[warmup] == 1.0
        assert found[-1] == pytest.approx(1.0 if schedule == "constant" else 0.25)
