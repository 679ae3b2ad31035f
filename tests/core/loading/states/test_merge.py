"""States of ranks that do not agree: who, and in what."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite import get_savable_loader, get_train_dataset
from energon_lite.batching.plan import worlds_for
from energon_lite.errors import StateError, StateMismatchError, TopologyError
from energon_lite.extras.blends import rebase_state
from energon_lite.loading.iterators.dataset import Identity
from energon_lite.loading.iterators.state import CursorFields, make_state
from energon_lite.loading.saved_states import merged, redistributed
from tests.testing import ALONE

IDENTITY = {"fingerprint": "ab", "settings": {"seed": 1, "batch_size": 4}, "leaves": 1, "samples": 9, "marks": "x"}


def planned(**entries: Any) -> dict[str, Any]:
    settings = IDENTITY["settings"] | entries.pop("settings", {})  # type: ignore[operator]
    identity = IDENTITY | {"settings": settings} | entries.pop("identity", {})
    state = make_state("planned", CursorFields(position=8), {}, Identity({}), None, None)
    return {**state, "identity": identity, **entries}


def test_equal_states_are_one() -> None:
    assert merged([planned()] * 5) == planned() == merged([planned()])


def test_ranks_at_other_steps_are_grouped_and_named() -> None:
    states = [planned(), planned(position=9), planned(), planned(pass_number=1)]
    with pytest.raises(StateMismatchError) as error:
        merged(states, [f"rank {number}" for number in range(4)])
    assert str(error.value).splitlines()[:4] == [
        "the ranks are not at the same step:",
        "    rank 0, rank 2: pass 0, micro-batch 8",
        "    rank 1: pass 0, micro-batch 9",
        "    rank 3: pass 1, micro-batch 8",
    ]


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"settings": {"seed": 2}, "identity": {"fingerprint": "cd"}}, "fingerprint cd; seed: 2, elsewhere 1"),
        ({"identity": {"fingerprint": "cd", "marks": "y"}}, "fingerprint cd; marks: 'y', elsewhere 'x'"),
        ({"identity": {"fingerprint": "cd"}}, "fingerprint cd; they are different"),
        ({"loop_start": 3}, "fingerprint ab; loop_start: 3, elsewhere 0"),
        (
            {"rebase": {"position": 1, "starts": [1]}},
            "fingerprint ab; rebase: {'position': 1, 'starts': [1]}, elsewhere not set",
        ),
        ({"identity": 7}, "fingerprint None; batch_size: not set, elsewhere 4"),
    ],
)
def test_the_rank_that_differs_is_named(entries: dict[str, Any], words: str) -> None:
    """The many are right, wherever the one is."""
    other = planned(**entries) if entries != {"identity": 7} else planned() | {"identity": 7}
    for place in range(4):
        states = [planned()] * 3
        states.insert(place, other)
        with pytest.raises(StateMismatchError) as error:
            merged(states)
        assert f"    state {place}: {words}" in str(error.value)
        same = [number for number in range(4) if number != place]
        assert f"    {', '.join(f'state {number}' for number in same)}: fingerprint ab\n" in str(error.value)


def test_damaged_states_are_named() -> None:
    with pytest.raises(StateError, match="state 1: this is not a loader state"):
        merged([planned(), {"model": 3}])
    with pytest.raises(StateError, match="rank 7: the state is damaged: position is -1"):
        merged([planned(position=-1)], ["rank 7"])
    with pytest.raises(StateMismatchError, match="state 0: the state was saved under order version 0"):
        merged([planned(order_version=0)])
    lanes = planned(kind="lanes", lanes=2, cursors=[[0]])
    with pytest.raises(StateError, match="state 0: the state is damaged: a lane is"):
        merged([lanes])


@given(lanes=st.integers(1, 24), position=st.integers(0, 99), data=st.data())
def test_dealt_and_merged_again(lanes: int, position: int, data: st.DataObject) -> None:
    rows = [[lane, lane + lanes * data.draw(st.integers(0, 5)), [3]] for lane in range(lanes)]
    whole = planned(kind="lanes", lanes=lanes, cursors=rows) | {"position": position}
    for world in range(1, lanes + 1):
        if world not in worlds_for(lanes):
            with pytest.raises(TopologyError, match="cannot be divided"):
                redistributed(whole, world)
            continue
        own = redistributed(whole, world)
        assert len(own) == world and merged(own) == whole
        if world > 1:
            with pytest.raises(StateMismatchError, match="lanes are in none of"):
                merged(own[1:])


def test_a_rebased_state_and_one_that_is_not_do_not_mix(leaf_of: Callable[..., Path]) -> None:
    dataset = get_train_dataset(leaf_of(7), batch_size=2, worker_config=ALONE)
    state = (get_savable_loader(dataset).save_state_rank() or {}) | {"position": 4}
    rebased, _ = rebase_state(state, dataset, dataset)
    with pytest.raises(StateMismatchError, match="rebase"):
        merged([state, rebased])
