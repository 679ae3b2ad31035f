"""States in files, in every format, damaged in every way; and states of ranks that do not agree: who, and in what."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.batching.plan import worlds_for
from energon_lite.errors import StateError, StateMismatchError, TopologyError, UsageError
from energon_lite.loading.iterators.dataset import Identity
from energon_lite.loading.iterators.state import CursorFields, make_state
from energon_lite.loading.saved_states import SUFFIXES, merged, read_state_files, redistributed, write_state_file
from tests.testing import train_loader


@pytest.fixture
def state(leaf_of: Callable[..., Path]) -> dict[str, Any]:
    return train_loader(leaf_of(7), batch_size=2).save_state_rank() or {}


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_all_formats_go_round(state: dict[str, Any], tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"loader{suffix}"
    write_state_file(path, state)
    (found,) = read_state_files([path])
    assert found.state == state and found.name == str(path)
    renamed = path.rename(tmp_path / "no_matter_what")
    assert read_state_files([renamed])[0].state == state
    assert [one.name for one in tmp_path.iterdir()] == ["no_matter_what"]  # nothing temporary is left


@pytest.mark.parametrize("suffix", [".json", ".msgpack", ".pt"])
def test_cut_at_any_byte(state: dict[str, Any], tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"loader{suffix}"
    write_state_file(path, state)
    data = path.read_bytes()
    for size in [0, 1, 3, *range(10, len(data) - 1, 100 if suffix == ".pt" else 10), len(data) - 2]:
        path.write_bytes(data[:size])
        with pytest.raises(StateError) as error:
            read_state_files([path])
        assert error.value.where == str(path) and error.value.fix


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"{'a': 1}", "damaged, or not a state"),
        (b'{"a": 1}', "no loader state in the file"),
        (b"[" * 100_000, "damaged, or not a state"),
        (b"\xc1abc", "damaged, or not a state"),
        (b"\x05", "no loader state in the file"),
        (b"PK\x03\x04 and no more", "damaged, or not a state"),
        (b"\x80\x02 and no more", "damaged, or not a state"),
    ],
)
def test_other_files(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "loader"
    path.write_bytes(content)
    with pytest.raises(StateError, match=words) as error:
        read_state_files([path])
    assert error.value.where == str(path)


def test_damaged_states_inside_of_a_checkpoint(state: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    torch.save({"model": torch.zeros(3), "loaders": [{"train": state | {"position": -1}}]}, path)
    with pytest.raises(StateError, match="damaged: position is -1") as error:
        read_state_files([path])
    assert error.value.where == f"{path}['loaders'][0]['train']"


def test_states_inside_of_checkpoints(state: dict[str, Any], tmp_path: Path) -> None:
    later = state | {"position": 5}
    torch.save({"model": {"w": torch.zeros(3)}, "loader": state, "more": (1, [later])}, tmp_path / "c.pt")
    names = [(one.name, one.state) for one in read_state_files([tmp_path / "c.pt"])]
    assert names == [(f"{tmp_path}/c.pt['loader']", state), (f"{tmp_path}/c.pt['more'][1][0]", later)]
    (tmp_path / "list.json").write_text(json.dumps([state, None, later]))
    assert [one.state for one in read_state_files([tmp_path / "list.json"])] == [state, later]


def test_a_checkpoint_that_would_run_code_is_not_read(tmp_path: Path, state: dict[str, Any]) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"loader": state, "evil": Evil()}, tmp_path / "c.pt")
    with pytest.raises(StateError, match="not plain data"):
        read_state_files([tmp_path / "c.pt"])
    assert not (tmp_path / "ran").exists()


def test_folders(state: dict[str, Any], tmp_path: Path) -> None:
    for rank in (10, 9, 1):
        write_state_file(tmp_path / f"rank{rank}.json", state | {"position": rank})
    (tmp_path / "notes.txt").write_text("no state")
    assert [one.state["position"] for one in read_state_files([tmp_path])] == [1, 9, 10]
    with pytest.raises(StateError, match="no file in the folder ends in"):
        (tmp_path / "empty").mkdir()
        read_state_files([tmp_path / "empty"])
    (tmp_path / ".metadata").write_text("")
    with pytest.raises(StateError, match=r"torch\.distributed\.checkpoint"):
        read_state_files([tmp_path])
    with pytest.raises(FileNotFoundError):
        read_state_files([tmp_path / "nowhere"])


def test_a_file_that_cannot_be_written_leaves_the_old_one(
    state: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    path = tmp_path / "loader.json"
    write_state_file(path, state)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_state_file(path, state | {"position": 4})
    assert read_state_files([path])[0].state == state and os.listdir(tmp_path) == ["loader.json"]
    with pytest.raises(UsageError, match=r"named \*\.jsn(.*\n)*.*did you mean '\.json'"):
        write_state_file(tmp_path / "loader.jsn", state)


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
    assert "or give as many ranks each its own state" in str(error.value.fix), "jobs of which samples were lost"


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
