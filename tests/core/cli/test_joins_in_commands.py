"""Joins in the commands: all data sets of one are seen, also where its first one stands alone beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.testing import TEXT_YAML, output_of, refusal_of, text_dataset, write_dataset

JOINER = {"__module__": "megatron.energon", "__class__": "OCRSample"}


@pytest.fixture
def blend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``one`` alone, joined to all of ``two``, and to a part of it."""
    monkeypatch.setenv("ENERGON_LITE_CACHE", str(tmp_path / "cache"))
    text_dataset(tmp_path / "one", 6)
    text_dataset(tmp_path / "two", 8, shards=2)
    part = {"split_parts": {"train": ["shard-000.tar"]}}
    (tmp_path / "two/.nv-meta/part.yaml").write_text(json.dumps(part))
    write(tmp_path, {}, {"split_config": "part.yaml", "nonmatch": "skip"})
    return tmp_path / "blend.yaml"


def write(room: Path, *seconds: dict[str, Any], joiner: Any = JOINER) -> None:
    joins = [{"join": [{"path": "one"}, {"path": "two"} | second], "joiner": joiner} for second in seconds]
    (room / "blend.yaml").write_text(json.dumps({"splits": {"train": {"blend": [{"path": "one"}, *joins]}}}))


def test_prepare_opens_each(blend: Path) -> None:
    output, one, two = output_of("prepare", blend), blend.parent / "one", blend.parent / "two"
    assert f"{one} [train]: 6 samples" in output and f"{one} + {two} [train]: 6 samples" in output
    assert f"{one} + {two} [train]: 4 samples" in output and "3 data sets ready" in output


def test_prepare_says_what_does_not_match(blend: Path) -> None:
    write(blend.parent, {"split_config": "part.yaml"})
    output = refusal_of("prepare", blend)
    assert "2 of 6 samples of" in output and "1 of 2 data sets cannot be read" in output
    blend.write_text("splits: {train: {blend: 3}}")
    assert "splits.train.blend" in refusal_of("prepare", blend)


def test_info_names_all(blend: Path) -> None:
    assert "one + two [train]" in output_of("info", blend)
    joined = [one["joined"] for one in json.loads(output_of("info", blend, "--json"))["data_sets"]]
    both = [str(blend.parent / "one"), str(blend.parent / "two")]
    assert joined == [None, both, both]


def test_preview_shows_joined_samples(blend: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(blend.parent))
    code = "def pair(one, two):\n    return type(one).derive_from(one, text=f'{one.text} beside {two.text}')\n"
    (blend.parent / "joiner_of_previews.py").write_text(code)
    join = [{"path": "one"}, {"path": "two"}]
    joiner = {"__module__": "joiner_of_previews", "__function__": "pair"}
    blend.write_text(json.dumps({"splits": {"train": {"join": join, "joiner": joiner}}}))
    assert "2 beside 2" in output_of("preview", blend, "--start", 2, "--samples", 1, "--trust-code")
    assert "trust" in refusal_of("preview", blend)


def test_measure_refuses_before_it_begins(blend: Path) -> None:
    arguments = ["--task-encoder", "energon_lite:DefaultTaskEncoder", "--length-field", "text", "--num-workers", 0]
    output = refusal_of("measure", blend, *arguments)
    assert "joined samples are not measured" in output and "measure each folder by itself" in output
    assert not list(blend.parent.glob("one/.nv-meta/*column*"))


def test_lint_examines_each_member(blend: Path) -> None:
    write_dataset(blend.parent / "two", {"shard-000.tar": [("0", {"txt": b"\xff"})]}, dataset_yaml=TEXT_YAML)
    write(blend.parent, {"nonmatch": "none"})
    found = json.loads(refusal_of("lint", blend, "--json", "--no-progress", "--num-workers", 1))
    assert [Path(one["path"]).name for one in found["data_sets"]].count("two") == 1
    assert {(Path(one["dataset"]).name, one["key"]) for one in found["problems"] if not one["note"]} == {("two", "0")}


def test_lint_says_that_a_join_cannot_be_made(blend: Path) -> None:
    write(blend.parent, {"split_config": "part.yaml"})
    assert "2 of 6 samples of" in refusal_of("lint", blend, "--no-progress", "--num-workers", 1)


def test_lint_runs_no_hooks_on_members(blend: Path) -> None:
    encoder = "energon_lite:DefaultTaskEncoder"
    output = output_of("lint", blend, "--no-progress", "--num-workers", 1, "--task-encoder", encoder)
    assert "hooks are not run on joined samples" in output
