"""States in files: the formats, checkpoints around states, and every way in which a file can be damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from energon_lite import get_savable_loader, get_train_dataset
from energon_lite.errors import StateError, UsageError
from energon_lite.loading.saved_states import SUFFIXES, read_state_files, write_state_file
from tests.testing import ALONE


@pytest.fixture
def state(leaf_of: Callable[..., Path]) -> dict[str, Any]:
    dataset = get_train_dataset(leaf_of(7), batch_size=2, worker_config=ALONE)
    return get_savable_loader(dataset).save_state_rank() or {}


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
