"""``energon-lite measure``: what is stored and said; one split after the other, and following what errors advise."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from energon_lite import ByTokens, Reading
from energon_lite.batching import MaxLength
from energon_lite.cli import measure
from energon_lite.cli import output as command_output
from energon_lite.errors import DataIndexError, UsageError
from energon_lite.loading.measured_columns import MeasureReport
from energon_lite.storage.read.webdataset import WebdatasetSource
from tests.testing import invoke, output_of, refusal_of, val_loader, write_dataset

ENCODER = """
from energon_lite import SkipSample, TaskEncoder

class Words(TaskEncoder):
    def encode_sample(self, sample):
        if sample.text.startswith("3"):
            raise SkipSample("starts with 3")
        if sample.text == "7":
            raise ValueError("seven")
        return {"tokens": list(range(int(sample.text))), "other": [1]}

class Own(Words):
    def sample_length(self, encoded):
        return 1000

def make():
    return Words()

ready = Own()

class Needs(Words):
    def __init__(self, tokenizer):
        pass

class Texts(TaskEncoder):
    pass

class Numbers(TaskEncoder):
    def encode_sample(self, sample):
        number = int(sample.text) + 100 * sample.__subflavors__.get("plus", 0)
        return {"tokens": [0] * number}

    def sample_costs(self, encoded):
        number = len(encoded["tokens"])
        return {"twice": 2 * number, "pieces": [number, number]}
"""


@pytest.fixture
def data(here: Path) -> Path:
    (here / "encoders_here.py").write_text(ENCODER)
    shards = {f"{s}.tar": [(f"{4 * s + n}", {"txt": str(4 * s + n).encode()}) for n in range(4)] for s in range(3)}
    return write_dataset(here / "d", shards, splits={"train": ["0.tar", "1.tar"], "val": ["2.tar"]})


WORDS = ("--task-encoder", "encoders_here:Words")


#: What it says when it is done, and when it refuses.
measured, refused = (partial(of, "measure", "--num-workers", 0) for of in (output_of, refusal_of))


def lengths(data: Path, name: str = "length", **options: Any) -> list[int]:
    return [int(value) for value in WebdatasetSource.open(data, **options).column(name)]


EXPECTED = [0, 1, 2, 0, 4, 5, 6, 0, 8, 9, 10, 11]


def test_what_is_stored_and_said(data: Path) -> None:
    output = measured(data, *WORDS)
    assert "d: 12 samples in 3 shards\n  10 have a length: 0 to 11, 5.6 on average, 56 in all" in output
    assert "  1 were skipped, 1 failed\n" in output and "1 x skipped in encode_sample: starts with 3" in output
    assert "failed: 1.tar, 7: encode_sample: ValueError: seven" in output and "length.col" in output
    assert lengths(data) == EXPECTED
    assert lengths(data, "skip") == [0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 0]
    again = measured(data, *WORDS)
    assert "12 samples in 3 shards, 8 of them measured before" in again
    assert "of those measured now" not in output
    assert "of those measured now:\n    1 x failed in encode_sample: " in again
    said = json.loads(invoke("measure", data, *WORDS, "--num-workers", "0", "--json", "--no-progress").stdout)
    assert (said["samples"], said["failed"], said["shortest"], said["longest"]) == (12, 1, 0, 11)


def test_a_long_report_says_how_much_it_leaves_out(capsys: pytest.CaptureFixture[str]) -> None:
    reasons = tuple((30 - number, "encode_sample", f"reason {number}", False) for number in range(21))
    columns = {"boxes": (40, 0, 9), "weight": (30, 1060, 70)}
    numbers = {"failed": 18, "reasons": reasons, "failures": ("0.tar, 7: seven",), "columns": columns}
    command_output.show_report(MeasureReport("d", 2, 30, written=("a.col", "b.col"), **numbers))
    said, failed = capsys.readouterr()
    lines = said.splitlines()
    assert lines[:2] == ["d: 30 samples in 2 shards", "  column boxes: 40 values of up to 9"]
    assert lines[2:4] == ["  column weight: 30 values of up to 70, 1,060 in all", "  0 were skipped, 18 failed"]
    assert lines[4] == "    30 x failed in encode_sample: reason 0" and "reason 19" in lines[-3]
    assert lines[-2:] == ["    ... and 1 other reasons", "  in a.col, b.col"]
    assert failed == "  failed: 0.tar, 7: seven\n  failed: ... and 17 more\n"


def test_a_function_an_encoder_and_its_own_length(data: Path) -> None:
    measured(data, "--task-encoder", "encoders_here:make")
    assert lengths(data) == EXPECTED
    measured(data, "--task-encoder", "encoders_here:ready")
    assert set(lengths(data)) == {0, 1000}
    measured(data, "--task-encoder", "encoders_here:ready", "--length-field", "other")
    assert set(lengths(data)) == {0, 1}


def test_a_changed_encoder_or_description_of_a_sample_measures_anew(data: Path, here: Path) -> None:
    measured(data, *WORDS)
    path = data / ".nv-meta/dataset.yaml"
    path.write_text("# a comment changes nothing\n" + path.read_text())
    assert "8 of them measured before" in measured(data, *WORDS)
    (here / "encoders_here.py").write_text(ENCODER.replace("list(range(int(sample.text)))", "[0] * 77"))
    sys.modules.pop("encoders_here")
    assert "8 of them measured before" in measured(data, *WORDS, "--same-encoder")
    assert lengths(data) == [0, 1, 2, 0, 77, 77, 77, 0, 8, 9, 10, 11]  # next to the one that failed
    measured(data, *WORDS, "--force-overwrite")
    assert set(lengths(data)) == {0, 77}
    path.write_text(path.read_text() + "subflavors: {a: 1}\n")
    assert "measured before" not in measured(data, *WORDS)


def test_a_metadataset_that_uses_a_data_set_in_two_ways(data: Path) -> None:
    blend = data.parent / "blend.yaml"
    blend.write_text("splits:\n  train:\n    blend:\n      - {path: d, subflavors: {a: 1}}\n      - {path: d}\n")
    output = refused(blend, *WORDS)
    assert "used in 2 ways, and has room for one" in output
    assert 'subflavors {"a": 1}' in output and "blend.yaml:4" in output and "--name" in output


def test_ranks(data: Path) -> None:
    first, second = (("--rank", rank, "--world-size", 2) for rank in range(2))
    assert "Rank 1 of 2: 4 samples measured; rank 0 goes on" in measured(data, *WORDS, *second)
    measured(data, *WORDS, *first)
    assert lengths(data) == EXPECTED
    (data / ".nv-meta/energon_lite.columns/length.col").unlink()
    assert "rank 1: 1" in refused(data, *WORDS, *first, "--rank-timeout", 0.1)


@pytest.mark.parametrize(
    ("encoder", "message"),
    [
        ("Words", "is not of the form module:Class"),
        ("encoders_here:", "is not of the form module:Class"),
        ("no_such_module:Words", "there is no module 'no_such_module'"),
        ("encoders_here.inner:Words", "there is no module 'encoders_here.inner'"),
        ("encoders_here:Word", "did you mean 'Words'?"),
        ("encoders_here:Needs", "cannot be called without arguments"),
        ("encoders_here:SkipSample", "task_encoder is a SkipSample"),
        ("encoders_here:Texts", "none of the fields tokens, input_ids, token_ids, text_tokens; it has text (str)"),
    ],
)
def test_wrong_encoders(data: Path, encoder: str, message: str) -> None:
    output = refused(data, "--task-encoder", encoder)
    assert message in output and "fix:" in output


def test_wrong_data(here: Path, data: Path) -> None:
    assert "no such data set" in refused(here / "nowhere", *WORDS)
    assert "test" in refused(data, *WORDS, "--split-parts", "test")
    assert "cannot be called 'a/b'" in refused(data, *WORDS, "--name", "a/b")
    split = data / ".nv-meta/split.yaml"
    split.write_text(split.read_text().replace("2.tar", "9.tar"))
    said = "split 'val' lists shard '9.tar', which the data set does not have"
    assert said in refused(data, *WORDS, "--split-parts", "val")


def test_progress_in_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command_output, "_BETWEEN", 0.0)
    monkeypatch.setattr(command_output, "time", SimpleNamespace(monotonic=iter([5.0, 6.0, 7.0, 9.0]).__next__))
    with measure.measuring("/data/coco", True) as tick:
        assert tick is not None
        tick(0, 400, "")
        tick(100, 400, "")
        tick(200, 400, "fast")
    assert capsys.readouterr().err == (
        "Measuring coco: 100 of 400 samples, 50.0/s, about 6 s left\n"
        "Measuring coco: 200 of 400 samples, 50.0/s, fast, about 4 s left\n"
    )
    with measure.measuring("/data/coco", False) as tick:
        assert tick is None


COOKS = """
from energon_lite import Cooker, TaskEncoder, basic_sample_keys, cooker

@cooker
def chat(sample):
    return {**basic_sample_keys(sample), "tokens": sample["json"]["chat"]}

class Cooks(TaskEncoder):
    cookers = [Cooker(chat, has_subflavors={"kind": "chat", "turns": 2})]
"""


def test_cookers_that_match_by_subflavors(here: Path) -> None:
    (here / "cooks_here.py").write_text(COOKS)
    chats = here / "chats.jsonl"
    chats.write_text("".join(f'{{"chat": {list(range(number))}}}\n' for number in range(4)))
    cooks = ("--task-encoder", "cooks_here:Cooks")
    output = refused(chats, *cooks)
    assert "none of the 1 cookers of Cooks" in output and "--subflavors" in output
    measured(chats, *cooks, "--subflavors", '{"kind": "chat", "turns": 2}')
    assert lengths(chats) == [0, 1, 2, 3]
    blend = here / "blend.yaml"
    blend.write_text("splits: {train: {blend: [{path: chats.jsonl, subflavors: {kind: chat}, weight: 1}]}}\n")
    measured(blend, *cooks, "--subflavors", '{"turns": 2}', "--name", "two")
    assert lengths(chats, "two.length") == [0, 1, 2, 3]
    assert "4 of them measured before" in measured(blend, *cooks, "--subflavors", '{"turns": 2}', "--name", "two")


@pytest.mark.parametrize("text", ["kind=chat", "[1]", '"chat"'])
def test_subflavors_that_are_none(data: Path, text: str) -> None:
    output = refused(data, *WORDS, "--subflavors", text)
    assert "--subflavors" in output and '{"kind": "chat"}' in output


def test_columns_of_parts_need_no_encoder(data: Path) -> None:
    output = measured(data, "--column", "n=txt", "--column", "all=*", "--length-field", "txt")
    assert "column n: 12 values of up to 2, 14 in all" in output
    assert lengths(data, "n") == lengths(data) == [1] * 10 + [2] * 2
    assert WebdatasetSource.open(data).column("n").maker["by"] == "measure"
    # With an encoder, in the pass that measures the length.
    measured(data, "--task-encoder", "encoders_here:Own", "--column", "n=txt")
    assert max(lengths(data)) == 1000 and lengths(data, "n") == [1] * 10 + [2] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to measure is given"),
        (["--images"], "no sample has a part with an image's extension"),
        (["--column", "txt"], "expected NAME=PART"),
        (["--column", "a=txt", "--column", "a=txt"], "given twice"),
        (["--column", "length=txt"], "a column cannot have this name"),
        (["--column", "n=jpg"], "no sample has such a part"),
        (["--patches", "14,"], "expected a mapping with the keys patch_size"),
        (["--patches", '{"patch": 14}'], "did you mean 'patch_size'"),
        (["--patches", '{"patch_size": 0}'], "patch_size is 0"),
        (["--patches", '{"patch_size": 14, "multiple": 20}'], "not a multiple of patches"),
        (["--patches", '{"patch_size": "14"}'], "expected a whole number"),
        (["--column", "n=txt", "--split-parts", "train"], "needs a task encoder"),
    ],
)
def test_parts_that_cannot_be_measured(data: Path, arguments: list[str], message: str) -> None:
    assert message in refused(data, *arguments)


# -- splits

ENCODED = ("--task-encoder", "encoders_here:Numbers")
SPLITS = {"train": ["0.tar", "1.tar"], "val": ["2.tar"], "test": ["3.tar"]}


def numbers(shards: Sequence[int], plus: int = 0) -> list[int]:
    return [4 * shard + n + plus for shard in shards for n in range(1, 5)]


@pytest.fixture
def make(here: Path) -> Callable[[str], Path]:
    (here / "encoders_here.py").write_text(ENCODER)

    def write(name: str) -> Path:
        shards = {f"{s}.tar": [(f"{n}", {"txt": str(n).encode()}) for n in numbers([s])] for s in range(4)}
        path = write_dataset(here / name, shards, splits=SPLITS)
        document = {"split_parts": {"train": ["0.tar"], "val": ["1.tar", "2.tar", "3.tar"]}}
        (path / ".nv-meta" / "other_split.yaml").write_text(json.dumps(document))
        return path

    return write


def column(path: Path, split: str, name: str = "length") -> list[int]:
    return lengths(path, name, shards=SPLITS[split])


def pieces(path: Path, split: str) -> list[int]:
    return [int(one) for [one] in WebdatasetSource.open(path, shards=SPLITS[split]).ragged_column("pieces")[:].values]


def blend(path: Path, plus: dict[str, int]) -> Path:
    splits = {name: {"blend": [{"path": "d", "subflavors": {"plus": more}}]} for name, more in plus.items()}
    path.write_text(json.dumps({"splits": splits}))
    return path


@pytest.mark.parametrize("again", [(), ("--force-overwrite",)])
def test_the_values_of_splits_with_other_subflavors_stay(again: Sequence[str], make: Any, here: Path) -> None:
    data, document = make("d"), blend(here / "blend.yaml", {"train": 0, "val": 1})
    measured(document, *ENCODED)
    measured(document, *ENCODED, "--split-parts", "val", *again)
    for _ in range(2):
        assert column(data, "train") == numbers([0, 1]) and column(data, "val") == numbers([2], 100)
        assert column(data, "train", "twice") == [2 * n for n in numbers([0, 1])]
        assert pieces(data, "train") == [n for n in numbers([0, 1]) for _ in range(2)]
        assert pieces(data, "val") == [n for n in numbers([2], 100) for _ in range(2)]
        # Each is known as what it is, and not taken for the other's.
        assert ", 8 of them measured before" in measured(document, *ENCODED)
        assert ", 4 of them measured before" in measured(document, *ENCODED, "--split-parts", "val")
    with pytest.raises(DataIndexError, match="no values for 1 of 1 shard"):
        column(data, "test")
    assert "measured before" not in measured(data, *ENCODED, "--split-parts", "val")
    assert column(data, "val") == numbers([2]) and column(data, "train") == numbers([0, 1])


def test_splits_with_other_subflavors_are_measured_by_one_command(make: Any, here: Path) -> None:
    data, document = make("d"), blend(here / "blend.yaml", {"train": 0, "val": 1})
    measured(document, *ENCODED, "--split-parts", "train", "--split-parts", "val")
    assert column(data, "train") == numbers([0, 1]) and column(data, "val") == numbers([2], 100)


def load(path: Any, split: str, length_column: str = "length", **reading: Any) -> list[int]:
    """The lengths of a split in its order: the encoder is not run."""
    batching = ByTokens(MaxLength(batch_size=1, max_length=10**6), length_column=length_column)
    dataset = val_loader(path, split_part=split, batching=batching, reading=Reading(**reading)).dataset
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
            last = measured(*words)
    raise AssertionError(f"advised and run, and still refused: {last}")


@pytest.mark.parametrize("split", ["train", "val", "test"])
@pytest.mark.parametrize("first", ["train", "val"])
def test_what_is_advised_for_a_folder_ends_the_trouble(split: str, first: str, make: Any) -> None:
    data = make("d")
    measured(data, *ENCODED, "--split-parts", first)
    assert follow(data, split) == numbers({"train": [0, 1], "val": [2], "test": [3]}[split])


def test_what_is_advised_for_a_split_of_another_document_ends_the_trouble(make: Any) -> None:
    data = make("d")
    measured(data, *ENCODED, "--split-parts", "train")
    assert follow(data, "val", split_config="other_split.yaml") == numbers([1, 2, 3])


def test_what_is_advised_for_a_blend_ends_the_trouble(make: Any, here: Path) -> None:
    make("d"), make("e")
    both = {name: {"blend": [{"path": "d"}, {"path": "e"}]} for name in ("train", "val")}
    both["test"] = {"blend": [{"path": "d", "split_part": "test", "subset": {"range": ["25%", "75%"]}}]}  # type: ignore
    document = here / "blend.yaml"
    document.write_text(json.dumps({"splits": both}))
    measured(document, *ENCODED)
    assert follow(document, "train", most=0) == numbers([0, 1]) * 2
    assert follow(document, "val") == numbers([2]) * 2
    assert follow(document, "test") == numbers([3])[1:3]
    # The same folders in another document, and in a dict, where none was measured by them.
    other = make("f")
    measured(other, *ENCODED, "--split-parts", "val")
    (here / "other.yaml").write_text(json.dumps({"splits": {"train": {"blend": [{"path": "f"}, {"path": "d"}]}}}))
    assert follow(here / "other.yaml", "train") == numbers([0, 1]) * 2
    asked = {"splits": {"val": {"blend": [{"path": str(other), "split_part": "test", "subflavors": {"plus": 2}}]}}}
    assert follow(asked, "val") == numbers([3], 200)


def test_what_is_advised_for_columns_of_parts_ends_the_trouble(make: Any, here: Path) -> None:
    data, document = make("d"), here / "blend.yaml"
    document.write_text(json.dumps({"splits": {"train": {"path": "d", "split_part": "test"}}}))
    measured(document, "--column", "bytes=txt")
    shards = {f"{s}.tar": [("0", {"txt": b"1" * (s + 1)}), ("1", {"txt": b"2"})] for s in range(4)}
    write_dataset(data, shards, splits=SPLITS)
    document.write_text(json.dumps({"splits": {"val": {"blend": [{"path": "d"}]}}}))
    assert follow(document, "val", "bytes") == [3, 1]
