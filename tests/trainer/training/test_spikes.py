"""The rule by which updates are left out for their losses."""

from __future__ import annotations

import math
import statistics

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite.trainer import build_mesh
from energon_lite.trainer.training.guards import SpikeGuard
from tests.testing import examples

LOSSES = st.lists(st.sampled_from([1.0, 1.1, 1.4, 1.6, 2.0, 3.0, 9.0, math.nan, math.inf]), max_size=40)


def judged(guard: SpikeGuard, losses: list[float]) -> list[bool]:
    return [bool(guard.judge(torch.tensor(loss, dtype=torch.float64))) for loss in losses]


@settings(max_examples=examples(50), deadline=None)
@given(losses=LOSSES, window=st.integers(2, 9), cut=st.integers(0, 40))
def test_a_loss_is_judged_by_the_median_of_those_before_it(losses: list[float], window: int, cut: int) -> None:
    """As plain Python has it; and a guard that goes on from a state judges as the one that was saved."""
    mesh = build_mesh()
    expected = []
    for step, loss in enumerate(losses):
        known = [one for one in losses[max(0, step - window) : step] if math.isfinite(one)]
        enough = len(known) >= window / 2
        expected.append(enough and math.isfinite(loss) and loss > 1.5 * statistics.median_high(known))
    guard, other, whole = (SpikeGuard(1.5, window, mesh) for _ in range(3))
    before = judged(guard, losses[:cut])
    other.restore(guard.state())
    assert before + judged(other, losses[cut:]) == expected
    assert judged(whole, losses) == expected and whole.state() == other.state()
    assert other.state()["left_out"] == sum(expected)


def test_a_state_fits_another_window_and_none_is_a_beginning() -> None:
    mesh = build_mesh()
    guard, smaller = SpikeGuard(1.5, 6, mesh), SpikeGuard(1.5, 2, mesh)
    judged(guard, [9.0, 9.0, 9.0, 9.0, 1.0, 1.0])
    smaller.restore(guard.state())
    assert judged(guard, [2.0]) == [False] and judged(smaller, [2.0]) == [True]
    smaller.restore({})
    assert smaller.state() == {"losses": [], "left_out": 0.0}
