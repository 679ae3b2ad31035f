"""Paths as users write them: ``file://`` URLs, and names that are nearly right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from energon_lite import (
    EnergonLiteError,
    get_train_dataset,
    get_val_dataset,
    get_val_datasets,
)
from energon_lite.trainer.tokenizing.tokenize_command import read_metadata
from tests.testing import ALONE, invoke, metadataset, train_loader, write_dataset

CRUDE = "CrudeWebdataset"


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a data set, a blend and a JSONL file."""
    shard = [(str(number), {"txt": b"a"}) for number in range(8)]
    write_dataset(tmp_path / "prose", {"0.tar": shard})
    (tmp_path / "blend.yaml").write_text(json.dumps(metadataset({"path": str(tmp_path / "prose")})))
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"n": n}) + "\n" for n in range(8)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def batches(path: Any) -> list[Any]:
    with train_loader(path, batch_size=2, repeat=False) as loader:
        return [list(batch["__key__"]) if isinstance(batch, dict) else list(batch.__key__) for batch in loader]


@pytest.mark.parametrize("name", ["prose", "blend.yaml", "chats.jsonl"])
def test_a_file_url_is_its_path(room: Path, name: str) -> None:
    path = room / name
    assert batches(f"file://{path}") == batches(path)
    (room / "outer.yaml").write_text(json.dumps(metadataset({"path": f"file://{path}"})))
    assert batches(room / "outer.yaml") == batches(path) == batches(f"file://{room}/outer.yaml")
    assert len(get_val_datasets(f"file://{path}", batch_size=2, worker_config=ALONE)) == 1


def test_a_state_of_a_file_url_fits_its_path(room: Path) -> None:
    one, other = (train_loader(path, batch_size=2) for path in (f"file://{room}/prose", room / "prose"))
    with one, other:
        next(iter(one))
        other.restore_state_rank(one.save_state_rank())


@pytest.mark.parametrize(
    "command",
    [
        ["prepare", "file://{room}/raw", "--non-interactive", "--split-ratio", "1,0,0", "--sample-type", CRUDE],
        ["info", "file://{room}/prose"],
        ["info", "file://{room}/blend.yaml"],
        ["measure", "file://{room}/prose", "--task-encoder", "energon_lite:TaskEncoder", "--length-field", "text"],
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_commands_take_file_urls(room: Path, command: list[str]) -> None:
    (room / "raw").mkdir()
    (room / "raw" / "0.tar").write_bytes((room / "prose" / "0.tar").read_bytes())
    result = invoke(*(word.format(room=room) for word in command))
    assert result.exit_code == 0, result.output
    assert "file:" not in result.output


def test_a_list_of_files_takes_file_urls(room: Path) -> None:
    (room / "corpus.json").write_text(json.dumps({"inputs": [{"files": [f"file://{room}/chats.jsonl", "more.txt"]}]}))
    assert read_metadata(str(room / "corpus.json"))[0].files == (f"{room}/chats.jsonl", f"{room}/more.txt")


NEAR = {"pros": "prose", "blend.yml": "blend.yaml", "chat.jsonl": "chats.jsonl", "prose/../bland.yaml": "blend.yaml"}


@pytest.mark.parametrize("wrong", list(NEAR))
@pytest.mark.parametrize("function", [get_train_dataset, get_val_dataset, get_val_datasets])
def test_a_wrong_path_has_a_neighbour(room: Path, function: Any, wrong: str) -> None:
    with pytest.raises(EnergonLiteError) as error:
        function(wrong, batch_size=2, worker_config=ALONE)
    assert f"did you mean {str(room / NEAR[wrong])!r}?" in str(error.value)


@pytest.mark.parametrize(
    ("command", "near"),
    [
        (["prepare", "pros", "--non-interactive", "--split-ratio", "8,1,1"], "prose"),
        (["prepare", "chat.jsonl"], "chats.jsonl"),
        (["info", "pros"], "prose"),
        (["info", "bland.yaml"], "blend.yaml"),
        (["plan", "pros", "--capacity", "8"], "prose"),
        (["measure", "pros", "--task-encoder", "energon_lite:TaskEncoder"], "prose"),
        (["trace", "chat.jsonl"], "chats.jsonl"),
        (["checkpoint", "info", "chat.jsonl"], "chats.jsonl"),
        (["tokenize", "chat.jsonl", "-t", "prose", "-o", "out"], "chats.jsonl"),
        (["tokenize", "chats.jsonl", "-t", "pros", "-o", "out"], "prose"),
        (["tokenize", "--metadata", "bland.yaml", "-t", "prose", "-o", "out"], "blend.yaml"),
    ],
    ids=lambda words: " ".join(words[:2]) if isinstance(words, list) else "",
)
def test_a_wrong_path_on_the_command_line(room: Path, command: list[str], near: str) -> None:
    result = invoke(*command)
    assert result.exit_code in (1, 2), result.output
    assert f"did you mean {str(room / near)!r}?" in result.output.replace("\n  ", " "), result.output


def test_what_prepare_is_not_for() -> None:
    def said(path: str, *options: str) -> str:
        result = invoke("prepare", path, "--non-interactive", "--split-ratio", "8,1,1", *options)
        assert result.exit_code == 1 and f"where: {path}" in result.output
        return result.output

    assert "upload its .idx" in said("s3://bucket/chats.jsonl")
    assert "--length-field works on local folders" in said("s3://bucket/coco", "--length-field", "txt")
    assert "works on local folders" in said("s3://bucket/coco", "--media-metadata-by-header")
    measured = invoke("measure", "s3://bucket/coco", "--task-encoder", "energon_lite:TaskEncoder")
    assert measured.exit_code == 1 and "measure works on local folders" in measured.output
