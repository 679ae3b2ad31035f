"""Answers that were written for Energon's questions mean the same here."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from megatron.energon.tools.prepare import command as energon_command

from energon_lite.cli.main import main


def document(root: Path, name: str) -> Any:
    return yaml.safe_load((root / ".nv-meta" / name).read_text())


def prepared(root: Path, tools: Any, answers: str, *options: str, ours: bool) -> tuple[int, Path]:
    """Prepare the same shards with either, by the same standard input."""
    tools.write_shards(root)
    command = (main, ["prepare"]) if ours else (energon_command, [])
    result = CliRunner().invoke(command[0], [*command[1], str(root), "--num-workers", "1", *options], input=answers)
    return result.exit_code, root


@pytest.mark.parametrize(
    ("answers", "options"),
    [
        ("8,1,1\ny\n0\ny\njpg,png\njson[text][0]\n", []),
        ("0.5, 0.25, 0.25\n\n8\n\ntxt\n", []),
        ("8,1,1\ny\n1\ny\nseg.png\ncls\n\n", []),  # no answer leaves label_name out
        ("8,1,1\ny\n1\ny\nseg.png\nnowhere\ncls\njson[meta][title]\n", []),  # a part that is not there is asked again
        ("8,1,1\ny\n11\n", []),  # crude
        ("8,1,1\nn\n", []),
        ("8,1,1\ny\n99\n9\ny\nnpy\nmp[n]\n\n\n", []),
        ("y\n8\ny\ntxt\n", ["--split-ratio", "1,1,1"]),
        (
            "y\ntxt\n",
            ["--split-parts", "train:train/.*", "--split-parts", "val:held/.*", "--sample-type", "TextSample"],
        ),
        ("1,1,0\ny\n8\nn\n", ["--exclude", "held"]),  # a sample_loader
        ("y\n8\ny\ntxt\n", ["--split-ratio", "1,1,1", "--shuffle-tars", "--dataset-yaml-name", "other.yaml"]),
    ],
)
def test_the_same_answers(tmp_path: Path, tools: Any, answers: str, options: list[str]) -> None:
    (their_code, theirs) = prepared(tmp_path / "theirs", tools, answers, *options, ours=False)
    (our_code, ours) = prepared(tmp_path / "ours", tools, answers, *options, ours=True)
    assert their_code == our_code == 0
    names = {path.name for path in (theirs / ".nv-meta").iterdir()}
    assert names - {path.name for path in (ours / ".nv-meta").iterdir()} == set()
    for name in names & {"dataset.yaml", "other.yaml"}:
        assert document(ours, name) == document(theirs, name)
    ours_split, their_split = (document(root, "split.yaml")["split_parts"] for root in (ours, theirs))
    assert ours_split == their_split
    assert ((ours / ".nv-meta/dataset.yaml").exists()) == ((theirs / ".nv-meta/dataset.yaml").exists())


def test_a_second_time(tmp_path: Path, tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    for ours in (False, True):
        root = tmp_path / str(ours)
        for answers in ("8,1,1\nn\n", "n\n", "y\n1,0,0\nn\n"):
            assert prepared(root, tools, answers, ours=ours)[0] == 0
        assert document(root, "split.yaml")["split_parts"]["val"] == []
        code, _ = prepared(root, tools, "", "--non-interactive", "--split-ratio", "1,0,0", ours=ours)
        assert code == 1


def test_without_questions(tmp_path: Path, tools: Any) -> None:
    """A sample type without a field map makes a sample_loader.py with both."""
    options = ["--non-interactive", "--split-ratio", "1,0,0", "--sample-type", "TextSample"]
    documents = []
    for ours in (False, True):
        code, root = prepared(tmp_path / str(ours), tools, "", *options, ours=ours)
        assert code == 0 and (root / ".nv-meta/sample_loader.py").exists()
        documents.append(document(root, "dataset.yaml"))
    assert documents[0] == documents[1]
