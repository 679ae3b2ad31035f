"""Measuring one split after the other, and following what errors advise."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from energon_lite import ByTokens, Reading, get_val_dataset
from energon_lite.batching import MaxLength
from energon_lite.errors import DataIndexError, UsageError
from energon_lite.storage.read.webdataset import WebdatasetSource
from tests.testing import ALONE, output_of

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


def numbers(shards: Sequence[int], plus: int = 0) -> list[int]:
    return [4 * shard + n + plus for shard in shards for n in range(1, 5)]


@pytest.fixture
def make(here: Path, write_dataset: Callable[..., Path]) -> Callable[[str], Path]:
    (here / "words_here.py").write_text(ENCODER)

    def write(name: str) -> Path:
        shards = {f"{s}.tar": [(f"{n}", {"txt": str(n).encode()}) for n in numbers([s])] for s in range(4)}
        path = write_dataset(here / name, shards, splits=SPLITS)
        document = {"split_parts": {"train": ["0.tar"], "val": ["1.tar", "2.tar", "3.tar"]}}
        (path / ".nv-meta" / "other_split.yaml").write_text(json.dumps(document))
        return path

    return write


def measure(*arguments: Any) -> str:
    return output_of("measure", *arguments, "--num-workers", "0")


def column(path: Path, split: str, name: str = "length") -> list[int]:
    return [int(value) for value in WebdatasetSource.open(path, shards=SPLITS[split]).column(name)]


def pieces(path: Path, split: str) -> list[int]:
    return [int(one) for [one] in WebdatasetSource.open(path, shards=SPLITS[split]).ragged_column("pieces")[:].values]


def blend(path: Path, plus: dict[str, int]) -> Path:
    splits = {name: {"blend": [{"path": "d", "subflavors": {"plus": more}}]} for name, more in plus.items()}
    path.write_text(json.dumps({"splits": splits}))
    return path


@pytest.mark.parametrize("again", [(), ("--force-overwrite",)])
def test_the_values_of_splits_with_other_subflavors_stay(again: Sequence[str], make: Any, here: Path) -> None:
    data, document = make("d"), blend(here / "blend.yaml", {"train": 0, "val": 1})
    measure(document, *ENCODED)
    measure(document, *ENCODED, "--split-parts", "val", *again)
    for _ in range(2):
        assert column(data, "train") == numbers([0, 1]) and column(data, "val") == numbers([2], 100)
        assert column(data, "train", "twice") == [2 * n for n in numbers([0, 1])]
        assert pieces(data, "train") == [n for n in numbers([0, 1]) for _ in range(2)]
        assert pieces(data, "val") == [n for n in numbers([2], 100) for _ in range(2)]
        # Each is known as what it is, and not taken for the other's.
        assert ", 8 of them measured before" in measure(document, *ENCODED)
        assert ", 4 of them measured before" in measure(document, *ENCODED, "--split-parts", "val")
    with pytest.raises(DataIndexError, match="no values for 1 of 1 shard"):
        column(data, "test")
    assert "measured before" not in measure(data, *ENCODED, "--split-parts", "val")
    assert column(data, "val") == numbers([2]) and column(data, "train") == numbers([0, 1])


def test_splits_with_other_subflavors_are_measured_by_one_command(make: Any, here: Path) -> None:
    data, document = make("d"), blend(here / "blend.yaml", {"train": 0, "val": 1})
    measure(document, *ENCODED, "--split-parts", "train", "--split-parts", "val")
    assert column(data, "train") == numbers([0, 1]) and column(data, "val") == numbers([2], 100)


def load(path: Any, split: str, length_column: str = "length", **reading: Any) -> list[int]:
    """The lengths of a split in its order: the encoder is not run."""
    batching = ByTokens(MaxLength(batch_size=1, max_length=10**6), length_column=length_column)
    dataset = get_val_dataset(
        path, split_part=split, worker_config=ALONE, batching=batching, reading=Reading(**reading), batch_size=None
    )
    return [int(value) for leaf in dataset.leaves for value in leaf.source.column(length_column)]


def follow(path: Any, split: str, *arguments: Any, most: int = 1, **options: Any) -> list[int]:
    """Load a split; where that is refused, run what is advised, word by word, so many times at most."""
    for _ in range(most + 1):
        try:
            return load(path, split, *arguments, **options)
        except (DataIndexError, UsageError) as error:
            assert error.fix is not None
            command, *words = shlex.split(error.fix.rpartition(": energon-lite ")[2])
            assert command == "measure"
            last = measure(*words)
    raise AssertionError(f"advised and run, and still refused: {last}")


@pytest.mark.parametrize("split", ["train", "val", "test"])
@pytest.mark.parametrize("first", ["train", "val"])
def test_what_is_advised_for_a_folder_ends_the_trouble(split: str, first: str, make: Any) -> None:
    data = make("d")
    measure(data, *ENCODED, "--split-parts", first)
    assert follow(data, split) == numbers({"train": [0, 1], "val": [2], "test": [3]}[split])


def test_what_is_advised_for_a_split_of_another_document_ends_the_trouble(make: Any) -> None:
    data = make("d")
    measure(data, *ENCODED, "--split-parts", "train")
    assert follow(data, "val", split_config="other_split.yaml") == numbers([1, 2, 3])


def test_what_is_advised_for_a_blend_ends_the_trouble(make: Any, here: Path) -> None:
    make("d"), make("e")
    both = {name: {"blend": [{"path": "d"}, {"path": "e"}]} for name in ("train", "val")}
    both["test"] = {"blend": [{"path": "d", "split_part": "test", "subset": {"range": ["25%", "75%"]}}]}  # type: ignore
    document = here / "blend.yaml"
    document.write_text(json.dumps({"splits": both}))
    measure(document, *ENCODED)
    assert follow(document, "train", most=0) == numbers([0, 1]) * 2
    assert follow(document, "val") == numbers([2]) * 2
    assert follow(document, "test") == numbers([3])[1:3]
    # The same folders in another document, and in a dict, where none was measured by them.
    other = make("f")
    measure(other, *ENCODED, "--split-parts", "val")
    (here / "other.yaml").write_text(json.dumps({"splits": {"train": {"blend": [{"path": "f"}, {"path": "d"}]}}}))
    assert follow(here / "other.yaml", "train") == numbers([0, 1]) * 2
    asked = {"splits": {"val": {"blend": [{"path": str(other), "split_part": "test", "subflavors": {"plus": 2}}]}}}
    assert follow(asked, "val") == numbers([3], 200)


def test_what_is_advised_for_columns_of_parts_ends_the_trouble(make: Any, here: Path, write_dataset: Any) -> None:
    data, document = make("d"), blend(here / "blend.yaml", {"train": 0, "val": 1})
    (here / "blend.yaml").write_text(
        document.read_text().replace('"path": "d", ', '"path": "d", "split_part": "test", ')
    )
    measure(document, "--column", "bytes=txt")
    shards = {f"{s}.tar": [("0", {"txt": b"1" * (s + 1)}), ("1", {"txt": b"2"})] for s in range(4)}
    write_dataset(data, shards, splits=SPLITS)
    document.write_text(json.dumps({"splits": {"val": {"blend": [{"path": "d"}]}}}))
    assert follow(document, "val", "bytes") == [3, 1]
