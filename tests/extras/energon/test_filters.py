"""Samples that are left out before a run: by comparisons of columns, and by filter indexes in Energon 8's form."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite import EnergonLiteError, get_val_dataset, register_source
from energon_lite.config.leaf_spec import Subset
from energon_lite.errors import DataIndexError, EmptyDatasetError, StateMismatchError, UsageError
from energon_lite.extras.energon import build_filter_index, build_filter_index_from_shard_indexes
from energon_lite.extras.energon.sample_filters import SampleFilter
from energon_lite.storage.index.columns import write_column
from energon_lite.storage.read.webdataset import WebdatasetSource
from tests.testing import ALONE, batches_of, examples, metadataset, output_of, refusal_of, take, train_loader

VALUES = {"length": np.array([3, 900, 4096, 5000, 0]), "q.a": np.array([0.5, 1.5, -2.0, 0.0, 3.0])}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tokens <= 4096", [1, 1, 1, 0, 1]),
        ("num_tokens <= 4096 and length > 0", [1, 1, 1, 0, 0]),
        ("not (q.a > 0) or tokens == 3", [1, 0, 1, 1, 0]),
        ("-2 < q.a <= 1.5", [1, 1, 0, 1, 0]),
        ("tokens % 2 == 0 and tokens // 1000 + 1 < 5", [0, 1, 0, 0, 1]),
        ("tokens in [3, 5000] or q.a in (-2, 7)", [1, 0, 1, 1, 0]),
        ("tokens not in [3]", [0, 1, 1, 1, 1]),
        ("tokens * q.a / 2 >= 0", [1, 1, 0, 1, 1]),
    ],
)
def test_comparisons(text: str, expected: list[int]) -> None:
    one = pickle.loads(pickle.dumps(SampleFilter(text)))
    assert one.index is None and one.keep(VALUES).tolist() == [bool(value) for value in expected]


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')", "open('x')", "tokens <= 'a'", "[tokens for tokens in [1]]", "tokens <",
        "1 < 2", "tokens ** 9 > 1", "tokens[0] > 1", "lambda: 1", "tokens := 3", "-" * 990 + "tokens > 1",
        "(" * 300 + "tokens" + ")" * 300 + " > 1", "tokens > 1" * 200, "", "tokens in tokens", "f'{tokens}' > 1",
        "tokens > 1e400", "tokens if tokens else 1", "tokens > 99999999999999999999999999",
    ],
)  # fmt: skip
def test_what_is_no_filter(text: str) -> None:
    with pytest.raises(UsageError, match=r"not a filter|names no column"):
        SampleFilter(text)


@settings(max_examples=examples(200))
@given(st.text(alphabet="tokens.()[]<>=!+-*/%0123456789 ,andorti_'\"", max_size=40))
def test_any_text_is_a_filter_or_our_error(text: str) -> None:
    try:
        one = SampleFilter(text)
        if one.index is None:
            one.keep({name: np.arange(3) for name in one.columns})
    except UsageError:
        pass


def source(leaf: Path, *filters: str, **more: Any) -> WebdatasetSource:
    return WebdatasetSource.open(str(leaf), filters=[SampleFilter(text) for text in filters], **more)


@pytest.fixture
def leaf(leaf_of: Callable[..., Path], tmp_path: Path) -> Path:
    path = Path(shutil.copytree(leaf_of(50), tmp_path / "leaf"))
    write_column(path, "length", np.arange(50) * 10)
    write_column(path, "score", np.arange(50) % 7 / 7)
    return path


def keys_of(one: WebdatasetSource) -> list[str]:
    return [one.key(number) for number in range(len(one))]


@settings(max_examples=examples(40))
@given(
    most=st.integers(0, 600),
    kept=st.sets(st.integers(0, 49)),
    ratio=st.sampled_from([0.0, 0.3, 0.6]),
    data=st.data(),
)
def test_filters_leave_the_others_in_their_order(
    leaf: Path, most: int, kept: set[int], ratio: float, data: Any
) -> None:
    every = keys_of(source(leaf))
    build_filter_index(leaf, "some", sorted(kept), overwrite=True)
    wanted = [number for number in range(50) if number in kept and number * 10 <= most and number % 7 / 7 >= ratio]
    filters = data.draw(st.permutations([f"tokens <= {most}", "some", f"score >= {ratio}"]))
    if not wanted:
        with pytest.raises(EmptyDatasetError, match="leaves none of the 50 samples"):
            source(leaf, *filters)
        return
    one = source(leaf, *filters)
    assert keys_of(one) == [every[number] for number in wanted] == keys_of(pickle.loads(pickle.dumps(one)))
    assert one.choice.filtered == 50 - len(wanted) and one.skipped == 0
    assert one.column("length")[:].tolist() == [number * 10 for number in wanted]
    assert (one.fingerprint == source(leaf).fingerprint) == (len(wanted) == 50)


def test_filter_indexes_are_energons(leaf: Path) -> None:
    build_filter_index(leaf, "short", [0, 3, 49])
    meta = leaf / ".nv-meta"
    document = json.loads((meta / "filter_short.json").read_text())
    assert document["version"] == 1 and sum(document["filtered_shard_counts"].values()) == 3
    assert np.fromfile(meta / "filter_short.idx", dtype="<u8").tolist() == [0, 3, 49]
    with pytest.raises(UsageError, match="the filter 'short' exists already"):
        build_filter_index(leaf, "short", [1])
    for wrong in ([3, 1], [1, 1], [-1, 2], [50], [0.5]):
        with pytest.raises(UsageError, match="in ascending order"):
            build_filter_index(leaf, "wrong", wrong)
    shards = list(document["filtered_shard_counts"])
    build_filter_index_from_shard_indexes(leaf, "of_shards", {shards[-1]: [1]})
    count = json.loads((meta / ".info.json").read_text())["shard_counts"]
    assert keys_of(source(leaf, "of_shards")) == [keys_of(source(leaf))[50 - count[shards[-1]] + 1]]
    with pytest.raises(UsageError, match=r"no shard .x\.tar."):
        build_filter_index_from_shard_indexes(leaf, "x", {"x.tar": [1]})
    with pytest.raises(DataIndexError, match="no filter index 'absent'"):
        source(leaf, "absent")
    with pytest.raises(DataIndexError, match="no column 'unknown'"):
        source(leaf, "unknown > 3")
    counts = json.dumps(document | {"filtered_shard_counts": {**document["filtered_shard_counts"], "gone.tar": 0}})
    numbers = (meta / "filter_short.idx").read_bytes()
    for damage in (b"", b"\0" * 24, b"\xff" * 24, numbers[:16] + bytes([50]) + numbers[17:], numbers):
        (meta / "filter_short.idx").write_bytes(damage)
        if damage == numbers:
            (meta / "filter_short.json").write_text(counts)
        with pytest.raises(DataIndexError, match="damaged"):
            source(leaf, "short")
    (meta / "filter_short.json").write_text('{"version": 9}')
    with pytest.raises(DataIndexError, match="version 1"):
        source(leaf, "short")


def test_in_a_metadataset(leaf: Path, tmp_path: Path) -> None:
    def document(inner: str, **outer: str) -> dict[str, Any]:
        blend = [{"path": str(leaf), "filter": inner}]
        (tmp_path / "inner.yaml").write_text(json.dumps({"splits": {"train": {"blend": blend}}}))
        return metadataset({"blend": [{"path": str(tmp_path / "inner.yaml"), **outer}]})

    def loader(path: Any, **more: Any) -> Any:
        return train_loader(path, batch_size=2, **more)

    every = keys_of(source(leaf))
    one = loader(document("tokens < 200", filter="score < 0.5"))
    kept = {every[number] for number in range(20) if number % 7 < 3.5}
    assert len(one.dataset.leaves[0].source) == len(kept)
    assert {key for batch in take(one, len(kept)) for key in batch.__key__} == kept
    state = one.save_state_rank()
    loader(document("tokens < 200"), filter="score < 0.5").restore_state_rank(state)
    with pytest.raises(StateMismatchError, match="other data"):
        loader(document("tokens < 190")).restore_state_rank(state)
    with pytest.raises(EnergonLiteError, match=r"not a filter[\s\S]*inner\.yaml"):
        loader(document("tokens <"))
    assert len(batches_of(get_val_dataset(leaf, worker_config=ALONE, filter="tokens < 50"))) == 5


def test_of_a_jsonl_file_and_beside_measured_skips(leaf: Path, tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(f'{{"n": {number}}}\n' for number in range(9)))
    build_filter_index(chats, "some", (2, 4))
    assert (tmp_path / "chats.jsonl.some.json").exists() and (tmp_path / "chats.jsonl.some.idx").exists()
    assert keys_of(source(chats, "some")) == ["2", "4"]
    write_column(leaf, "skip", (np.arange(50) % 2).astype(np.uint8))
    one = source(leaf, "tokens < 100", skips="skip")
    assert [one.column("length")[number] for number in range(len(one))] == [0, 20, 40, 60, 80]
    assert (one.skipped, one.choice.filtered) == (25, 20)
    span = source(leaf, "tokens >= 100", subset=Subset(stop=Fraction(1, 2)))
    assert [int(length) for length in span.column("length")] == [*range(100, 250, 10)]


class Numbers:
    """A source of twenty numbers, with their squares as lengths."""

    identity = "numbers"

    def __len__(self) -> int:
        return 20

    def read(self, index: int) -> dict[str, Any]:
        return {"n": index}

    def column(self, name: str) -> Any:
        if name != "length":
            raise DataIndexError(f"no column {name!r}")
        return np.arange(20) ** 2


def open_numbers(url: str, split_part: str) -> Numbers:
    return Numbers()


def test_of_a_source_of_ones_own() -> None:
    register_source("filtered", open_numbers)

    def dataset(text: str) -> Any:
        return get_val_dataset("filtered://x", batch_size=4, worker_config=ALONE, filter=text)

    found = [number for batch in batches_of(dataset("100 <= tokens < 200")) for number in batch["n"]]
    assert found == [10, 11, 12, 13, 14]
    one = dataset("100 <= tokens < 200").leaves[0].source
    again = pickle.loads(pickle.dumps(one))
    assert again.column("length").tolist() == [100, 121, 144, 169, 196] and again.key(1) == "11"
    assert one.fingerprint != dataset("tokens >= 0").leaves[0].source.fingerprint
    with pytest.raises(UsageError, match="no filter index 'short'"):
        dataset("short")
    with pytest.raises(EmptyDatasetError, match="that meet the filter"):
        dataset("tokens < 0")
    with pytest.raises(DataIndexError, match="no column 'score'"):
        dataset("score < 0")


# -- the command ------------------------------------------------------------------------------------------------------


def test_a_condition_is_stored_under_a_name(leaf: Path) -> None:
    output = output_of("filter", leaf, "short", "tokens < 120 and tokens % 20 == 0")
    assert "filter 'short' keeps 6 of 50 samples" in output
    assert len(get_val_dataset(leaf, filter="short", worker_config=ALONE).leaves[0].source) == 6
    assert "exists already" in refusal_of("filter", leaf, "short", "tokens < 30")
    assert "keeps 3 of 50" in output_of("filter", leaf, "short", "tokens < 30", "--force-overwrite")
    wrong = {"short": "is not a condition", "tokens <": "not a filter", "absent > 1": "no column 'absent'"}
    for where, words in wrong.items():
        assert words in refusal_of("filter", leaf, "other", where)
