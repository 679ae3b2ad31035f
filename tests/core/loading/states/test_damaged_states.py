"""States that are damaged, or mean harm: refused, or a place in the run; soon, without much memory, and by us."""

from __future__ import annotations

import copy
import json
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from energon_lite import BestFit, Capacity, EnergonLiteError, TaskEncoder, stateless
from energon_lite.cli.checkpoint import summary, summary_lines
from energon_lite.errors import FatalSampleError, SampleError, StateError, UsageError
from energon_lite.extras.blends import rebase_state
from energon_lite.loading.saved_states import merged, read_state_files, redistributed
from energon_lite.storage.read.webdataset import WebdatasetSource
from tests.testing import take, train_loader, val_loader


class Yielding(TaskEncoder):
    """One or two samples of each."""

    @stateless
    def encode_sample(self, sample: Any) -> Iterator[Any]:
        yield from [sample] * (1 + len(sample.text) % 2)


_LANES: dict[str, Any] = {"batch_size": 2, "task_encoder": Yielding(), "chunk_size": 4, "lanes": 6}
#: A loader of each kind of state, and its arguments.
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "planned": (train_loader, {"batch_size": 2}),
    "finite": (val_loader, {"batch_size": 2}),
    "lanes": (train_loader, _LANES),
    "finite lanes": (val_loader, _LANES),
    "tokens": (train_loader, {"batching": BestFit(Capacity(40)), "length_column": "length", "chunk_size": 8}),
}


@pytest.fixture(autouse=True)
def lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sample has 1 to 30 tokens; no column is on the disk."""
    monkeypatch.setattr(WebdatasetSource, "column", lambda source, name: np.arange(len(source)) * 7 % 30 + 1)


def _state(kind: str, leaf_of: Callable[..., Path]) -> tuple[Any, dict[str, Any]]:
    get, arguments = KINDS[kind]
    loader = get(leaf_of(20, "a"), **arguments)
    take(loader, 3)
    return loader, loader.save_state_rank()


#: Numbers at which something may overflow, and those beside them.
EDGES = [
    (1 << bits) + more for bits in (0, 5, 20, 28, 31, 40, 44, 45, 53, 60, 61, 62, 63, 64, 80) for more in (-1, 0, 1)
]
numbers = st.sampled_from([-1, *EDGES]) | st.integers(0, 100)
junk = st.one_of(
    numbers,
    st.none(),
    st.booleans(),
    st.floats(),
    st.text(max_size=3),
    st.lists(numbers, max_size=8),
    st.lists(st.lists(numbers, max_size=8), max_size=3),
    st.dictionaries(st.text(max_size=3) | st.integers(), numbers, max_size=2),
    st.builds(dict, position=numbers, starts=st.lists(numbers, max_size=3)),
    st.sampled_from([torch.zeros(2), np.arange(3), b"x", {1, 2}, 1 << 20_000, Yielding, float("nan"), "9" * 5000]),
)


def _places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield (*at, key)
        yield from _places(inner, (*at, key))


def _put(state: Any, place: tuple[Any, ...], value: Any) -> None:
    """Put something into a state."""
    for step in place[:-1]:
        state = state[step]
    state[place[-1]] = value


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_a_damaged_state_is_refused_or_a_place_in_the_run(
    leaf_of: Callable[..., Path], kind: str, data: st.DataObject
) -> None:
    """Whatever is put anywhere into a state: our error, and nothing has changed; or a run that goes on from there."""
    loader, state = _state(kind, leaf_of)
    changed = copy.deepcopy(state)
    for _ in range(data.draw(st.integers(1, 2))):
        more = data.draw(st.sampled_from(["", "", "", "rebase", "kind", "lanes", "cursors", "place", "new"]))
        place = (more,) if more else data.draw(st.sampled_from(list(_places(changed))))
        _put(changed, place, data.draw(junk))
    begin = time.process_time()
    try:
        loader.restore_state_rank(changed)
    except StateError as error:
        assert error.fix
        assert loader.save_state_rank() == state
        return
    after = loader.save_state_rank()
    json.dumps(after)
    assert merged([after]) == after
    assert summary_lines(summary(after))
    try:
        next(iter(loader), None)
    except (FatalSampleError, UsageError) as error:  # a place in a chunk where nothing is
        assert isinstance(error, EnergonLiteError)
    assert time.process_time() - begin < 20


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_what_reads_states_says_what_is_wrong(
    leaf_of: Callable[..., Path], tmp_path: Path, kind: str, data: st.DataObject
) -> None:
    """Files, merging, dealing, rebasing and the summary, of a state in which one value is another one."""
    loader, state = _state(kind, leaf_of)
    _put(state, data.draw(st.sampled_from(list(_places(state)))), data.draw(junk))
    path = tmp_path / "state"
    try:
        path.write_bytes(msgpack.packb(state))
    except (TypeError, OverflowError, ValueError):
        torch.save(state, path)
    for work in (
        lambda: [summary_lines(summary(one.state)) for one in read_state_files([path])],
        lambda: redistributed(merged([state, state]), 3),
        lambda: rebase_state(state, loader.dataset, loader.dataset, give_up=True),
    ):
        try:
            work()
        except EnergonLiteError as error:
            assert error.fix


@pytest.mark.parametrize("lanes", [1 << 28, 1 << 62, 1 << 80, -1, 0, True, 1.5, "6", None, []])
def test_the_number_of_lanes_takes_no_memory(leaf_of: Callable[..., Path], lanes: Any) -> None:
    loader, state = _state("lanes", leaf_of)
    bad = state | {"lanes": lanes}
    tracemalloc.start()
    try:
        for work in (loader.restore_state_rank, summary, lambda one: merged([one]), lambda one: redistributed(one, 1)):
            with pytest.raises(StateError, match="damaged: lanes is"):
                work(bad)
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()
    with pytest.raises(UsageError, match="lanes is"):
        train_loader(leaf_of(20, "a"), **_LANES | {"lanes": (1 << 20) + 1})


def test_a_lane_twice_and_chunks_that_no_pass_has(leaf_of: Callable[..., Path]) -> None:
    loader = train_loader(leaf_of(20, "a"), **_LANES | {"chunk_size": 1 << 20})
    state = loader.save_state_rank()
    rows = [[lane, lane + 6 * (1 << 42), []] for lane in range(6)]
    for cursors, words in ((rows, "cursors is 'in chunk 26388279066629"), (rows + rows[:1], "a lane is")):
        with pytest.raises(StateError, match=f"damaged: {words}"):
            loader.restore_state_rank(state | {"cursors": cursors})


@pytest.mark.parametrize("kind", [[], {}, {"a": 1}, None, 5, "unknown", ["lanes"]])
def test_a_kind_that_is_none(leaf_of: Callable[..., Path], tmp_path: Path, kind: Any) -> None:
    loader, state = _state("lanes", leaf_of)
    (tmp_path / "x.json").write_text(json.dumps(state | {"kind": kind}))
    for work in (
        lambda: loader.restore_state_rank(state | {"kind": kind}),
        lambda: merged([state | {"kind": kind}]),
        lambda: read_state_files([tmp_path / "x.json"]),
    ):
        with pytest.raises(StateError, match=r"damaged: (state 0: )?kind is|damaged: kind is"):
            work()


@pytest.mark.parametrize("name", ["pass_number", "position", "loop_start"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_number_is_too_large_to_go_on_with(leaf_of: Callable[..., Path], kind: str, name: str) -> None:
    """2**63 was taken, and overflowed in the middle of the next loop."""
    loader, state = _state(kind, leaf_of)
    for number in EDGES:
        try:
            loader.restore_state_rank(state | {name: number})
        except StateError as error:
            assert error.fix and "damaged" in str(error)
            continue
        assert number < 1 << 61
        next(iter(loader), None)
    with pytest.raises(StateError, match="damaged"):
        loader.restore_state_rank(state | {name: 1 << 63})
    with pytest.raises(StateError, match="loop_start is"):
        loader.restore_state_rank(state | {"loop_start": state["position"] + 1})


def test_a_batch_that_its_chunk_does_not_have(leaf_of: Callable[..., Path]) -> None:
    """Chunk after chunk would be planned in search of it."""
    loader, state = _state("tokens", leaf_of)
    for batch in (50, 1 << 39):
        wrong = state | {"place": [state["place"][0], batch]}
        with pytest.raises(StateError, match=rf"damaged: place is \[\d+, {batch}\]"):
            loader.restore_state_rank(wrong)
        with pytest.raises(StateError, match=rf"damaged: place is \[\d+, {batch}\]"):
            rebase_state(wrong, loader.dataset, loader.dataset)
    assert loader.save_state_rank() == state


class FailsOnce(Yielding):
    """Batches of a hook that fails when it runs for the first time after it was told to."""

    fails = False

    def batch(self, samples: list[Any]) -> Any:
        if self.fails:
            self.fails = False
            raise ValueError("this hook was changed")
        return super().batch(samples)


def test_a_batch_that_fails_when_it_is_made_again_is_not_the_next_one(leaf_of: Callable[..., Path]) -> None:
    encoder = FailsOnce()
    loader = train_loader(leaf_of(20), batch_size=2, task_encoder=encoder)
    batch = take(loader, 3)[0]
    assert loader.restore_sample(batch.__restore_key__).__key__ == batch.__key__
    encoder.fails = True
    with pytest.raises(SampleError, match=r"(?s)the batch cannot be made: batch: ValueError: .*raise ValueError\("):
        loader.restore_sample(batch.__restore_key__)


def test_who_changes_a_state_changes_no_later_one(leaf_of: Callable[..., Path]) -> None:
    loader, state = _state("tokens", leaf_of)
    kept = copy.deepcopy(state)
    state["identity"]["settings"]["batching"].clear()
    assert loader.save_state_rank() == kept


@pytest.mark.parametrize("kind", ["planned", "finite"])
def test_two_places_at_once(leaf_of: Callable[..., Path], kind: str) -> None:
    """With micro-batches of a fixed size, the position is the place."""
    loader, state = _state(kind, leaf_of)
    loader.restore_state_rank(state | {"place": [state["position"]]})
    for place in (state["position"] - 1, state["position"] + 1):
        with pytest.raises(StateError, match=f"damaged: position is {state['position']}"):
            loader.restore_state_rank(state | {"place": [place]})
    assert loader.save_state_rank() == state


def test_files_that_are_nested_or_shared_without_end(
    leaf_of: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, state = _state("planned", leaf_of)
    monkeypatch.setattr("energon_lite.loading.saved_states._MOST_STATES", 1000)
    for inner, words in ((state, "more than 1000 loader states"), ({}, "more than [0-9]+ lists and dicts")):
        shared: Any = [inner]
        for _ in range(12):
            shared = [shared] * 10
        torch.save(shared, tmp_path / "laughs.pt")
        with pytest.raises(StateError, match=words):
            read_state_files([tmp_path / "laughs.pt"])
    deep: Any = 1
    for _ in range(sys.getrecursionlimit() // 2):
        deep = [deep]
    (tmp_path / "deep.json").write_text(json.dumps(state | {"new": 1}).replace('"new": 1', f'"new": {deep}'))
    with pytest.raises(StateError, match="damaged"):
        read_state_files([tmp_path / "deep.json"])
    (tmp_path / "keys").write_bytes(msgpack.packb([1, 2]).join([b"\x81", b"\x01"]))
    with pytest.raises(StateError, match="damaged, or not a state"):
        read_state_files([tmp_path / "keys"])
    (tmp_path / "1²2.json").write_text(json.dumps(state))
    (tmp_path / "laughs.pt").unlink()
    (tmp_path / "deep.json").unlink()
    (tmp_path / "keys").unlink()
    assert len(read_state_files([tmp_path])) == 1
