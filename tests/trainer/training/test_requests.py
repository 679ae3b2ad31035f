"""When a time limit counts as reached, and what is told of signals."""

from __future__ import annotations

import itertools
import os
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.trainer.parallel.mesh import build_mesh
from energon_lite.trainer.training import process
from energon_lite.trainer.training.process import Requests


@given(
    steps=st.lists(st.floats(0.5, 3.0), min_size=1, max_size=9),
    saving=st.just(0.0) | st.floats(0.0, 8.0),
    limit=st.floats(30.0, 60.0),
)
def test_what_is_left_is_enough_for_the_running_step_and_two_checkpoints(
    steps: list[float], saving: float, limit: float
) -> None:
    """Where the first step is the slowest one, and the time of a checkpoint is known; and no run stops much earlier."""
    now = began = 100.0
    saves = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process.time, "monotonic", lambda: now)
        asked, why = Requests(limit, build_mesh()), ""
        with asked.listening():
            for seconds in itertools.chain([3.0], itertools.cycle(steps)):
                now += seconds
                why, save, *_ = asked.agreed(seconds_to_save=saving)
                assert now < began + limit
                saves += save
                if why:
                    break
    assert why == "train.time_limit"
    assert now + 3.0 + 2 * saving <= began + limit
    assert now >= began + limit - 2 * (3.0 + saving)
    assert saves == (saving == 0.0)


def test_a_checkpoint_is_saved_early_while_nobody_knows_how_long_one_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    now, known, saved = 0.0, 0.0, []
    monkeypatch.setattr(process.time, "monotonic", lambda: now)
    asked, why = Requests(100.0, build_mesh()), ""
    with asked.listening():
        while not why:
            now += 1.0
            why, save, *_ = asked.agreed(seconds_to_save=known)
            if save:
                saved.append(now)
            known = 20.0 if saved and now >= saved[0] + 20.0 else 0.0  # written beside the steps
    assert saved == [51.0] and now == 72.0  # as soon as that is known


def test_signals_are_told_until_they_are_answered_and_given_back() -> None:
    asked = Requests(None, build_mesh())
    before = signal.getsignal(signal.SIGTERM)
    with asked.listening() as came:
        assert asked.agreed(True, False, sums=[3.0]) == ("", False, [True, False], [3.0])
        os.kill(os.getpid(), signal.SIGUSR2)
        assert asked.agreed() == ("", True, [], []) and asked.agreed() == ("", False, [], [])
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked.agreed()[0] == asked.agreed()[0] == "SIGTERM" and came == {"SIGTERM"}
    assert signal.getsignal(signal.SIGTERM) == before
    with asked.listening():
        assert asked.agreed()[0] == ""
