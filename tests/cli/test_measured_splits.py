"""Measuring one split after the other, and following what errors advise."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from energon_lite.cli.main import main
from energon_lite.errors import DataIndexError
from energon_lite.storage.read.webdataset import WebdatasetSource

ENCODER = """
from energon_lite import TaskEncoder

class Words(TaskEncoder):
    def encode_sample(self, sample):
        number = int(sample.text) + 100 * sample.__subflavors__.get("plus", 0)
        return {"tokens": [0] * number}

    def sample_costs(self, encoded):
        number = len(encoded["tokens"])
        return {"twice": 2 * number, "pieces": [number, number]}
"""
ENCODED = ("--task-encoder", "words_here:Words")
SPLITS = {"train": ["0.tar", "1.tar"], "val": ["2.tar"], "test": ["3.tar"]}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "words_here.py").write_text(ENCODER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield tmp_path
    sys.modules.pop("words_here", None)


def numbers(shards: Sequence[int], plus: int = 0) -> list[int]:
    return [4 * shard + n + plus for shard in shards for n in range(1, 5)]


@pytest.fixture
def make(here: Path, write_dataset: Callable[..., Path]) -> Callable[[str], Path]:
    def write(name: str) -> Path:
        shards = {f"{s}.tar": [(f"{n}", {"txt": str(n).encode()}) for n in numbers([s])] for s in range(4)}
        path = write_dataset(here / name, shards, splits=SPLITS)
        document = {"split_parts": {"train": ["0.tar"], "val": ["1.tar", "2.tar", "3.tar"]}}
        (path / ".nv-meta" / "other_split.yaml").write_text(json.dumps(document))
        return path

    return write


def measure(*arguments: Any) -> str:
    result = CliRunner().invoke(main, ["measure", *map(str, arguments), "--num-workers", "0"])
    assert result.exit_code == 0, result.output
    return result.output


def column(path: Path, split: str, name: str = "length") -> list[int]:
    return [int(value) for value in WebdatasetSource.open(path, shards=SPLITS[split]).column(name)]


def pieces(path: Path, split: str) -> list[int]:
    return [int(one) for [one] in WebdatasetSource.open(path, shards=SPLITS[split]).ragged_column("pieces")[:].values]


def blend(path: Path, plus: dict[str, int]) -> Path:
    splits = {name: {"blend": [{"path": "d", "subflavors": {"plus": more}}]} for name, more in plus.items()}
    path.write_text(json.dumps({"splits": splits}))
    return path


@pytest.mark.parametrize("again", [(), ("--again",)])
def test_the_values_of_splits_with_other_subflavors_stay(again: Sequence[str], make: Any, here: Path) -> None:
    data, document = make("d"), blend(here / "blend.yaml", {"train": 0, "val": 1})
    measure(document, *ENCODED)
    measure(document, *ENCODED, "--split-part", "val", *again)
    for _ in range(2):
        assert column(data, "train") == numbers([0, 1]) and column(data, "val") == numbers([2], 100)
        assert column(data, "train", "twice") == [2 * n for n in numbers([0, 1])]
        assert pieces(data, "train") == [n for n in numbers([0, 1]) for _ in range(2)]
        assert pieces(data, "val") == [n for n in numbers([2], 100) for _ in range(2)]
        # Each is known as what it is, and not taken for the other's.
        assert ", 8 of them known before" in measure(document, *ENCODED)
        assert ", 4 of them known before" in measure(document, *ENCODED, "--split-part", "val")
    with pytest.raises(DataIndexError, match="no values for 1 of 1 shards"):
        column(data, "test")
    assert "known before" not in measure(data, *ENCODED, "--split-part", "val")
    assert column(data, "val") == numbers([2]) and column(data, "train") == numbers([0, 1])


def test_splits_with_other_subflavors_are_measured_by_one_command(make: Any, here: Path) -> None:
    data, document = make("d"), blend(here / "blend.yaml", {"train": 0, "val": 1})
    measure(document, *ENCODED, "--split-part", "train", "--split-part", "val")
    assert column(data, "train") == numbers([0, 1]) and column(data, "val") == numbers([2], 100)


def test_one_split_again_keeps_the_others(make: Any) -> None:
    data = make("d")
    measure(data, *ENCODED)
    measure(data, *ENCODED, "--again", "--split-part", "val")
    assert [*column(data, "train"), *column(data, "val"), *column(data, "test")] == numbers([0, 1, 2, 3])
