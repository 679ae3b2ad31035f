from __future__ import annotations

import random

import pytest
from braceexpand import braceexpand
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.errors import UsageError
from energon_lite.storage.prepare_choices import (
    collapse_names,
    divide_by_patterns,
    divide_by_ratio,
    meant_to_be_empty,
    parse_pattern,
    parse_ratio,
    split_notes,
)

TEN = [f"s{number}.tar" for number in range(10)]


@pytest.mark.parametrize(
    ("ratio", "count", "expected"),
    [
        ("8,1,1", 10, [8, 1, 1]),
        ("0.8, 0.1, 0.1", 10, [8, 1, 1]),
        ("1,0,0", 3, [3, 0, 0]),
        ("8,1,1", 2, [1, 0, 1]),
        ("8,1,1", 1, [0, 0, 1]),
        ("1,1,1", 100, [33, 33, 34]),
        ("0.7,0.2,0.1", 10, [7, 2, 1]),  # with floats the last shard gets lost here
    ],
)
def test_ratio(ratio: str, count: int, expected: list[int]) -> None:
    splits = divide_by_ratio([str(number) for number in range(count)], ratio)
    assert [len(shards) for shards in splits.values()] == expected


@given(st.lists(st.integers(0, 1000), min_size=3, max_size=3).filter(any), st.integers(0, 200))
def test_every_shard_goes_somewhere_once(ratio: list[int], count: int) -> None:
    shards = [str(i) for i in range(count)]
    splits = divide_by_ratio(shards, ",".join(map(str, ratio)))
    assert [shard for chosen in splits.values() for shard in chosen] == shards
    for share, chosen in zip(ratio, splits.values(), strict=True):
        assert abs(len(chosen) - count * share / sum(ratio)) < 1 + 1e-9
        assert share or not chosen


def test_shuffled_shards_are_always_mixed_alike() -> None:
    mixed = list(TEN)
    random.Random(42).shuffle(mixed)
    splits = divide_by_ratio(TEN, "5,3,2", shuffle=True)
    assert splits == {"train": mixed[:5], "val": mixed[5:8], "test": mixed[8:]}


@pytest.mark.parametrize("ratio", ["8,1", "1,1,1,1", "a,b,c", "0,0,0", "-1,1,1", "nan,1,1", "inf,1,1", "1/0,1,1", ""])
def test_what_is_no_ratio(ratio: str) -> None:
    with pytest.raises(UsageError, match="not a ratio of train, val and test"):
        parse_ratio(ratio)


def test_patterns() -> None:
    shards = ["train/00.tar", "train/01.tar", "train/10.tar", "val/a.tar"]
    splits = divide_by_patterns(shards, [("train", "train/{00,10}"), ("val", "val"), ("train", "train/01")])
    assert splits == {"train": shards[:3], "val": shards[3:]}


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("*.tar", "not a regular expression.*nothing to repeat"),
        ("train/.*", "'train/.\\*' .for split 'x'. matches none of the 10 shards"),
        ("0.tar", "matches none"),  # from the start of the name
        ("{0..99999999999}", "its braces stand for 100,000,000,000 names, which are too many"),
    ],
)
def test_patterns_that_do_not_work(pattern: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        divide_by_patterns(TEN, [("x", pattern)])


@pytest.mark.parametrize("text", ["train", ":x", "train:", ""])
def test_what_is_no_pattern(text: str) -> None:
    with pytest.raises(UsageError, match="not of the form name:regex"):
        parse_pattern(text)
    assert parse_pattern("train:a:b") == ("train", "a:b")


def test_notes() -> None:
    assert split_notes({"train": TEN}, TEN) == []
    notes = split_notes({"train": TEN[:2], "val": TEN[1:3], "test": []}, TEN[:4])
    assert [note.split(",")[0].split(" because")[0] for note in notes] == [
        "split 'test' got no shard",
        "splits 'train' and 'val' share 1 shard",
        "1 shard in no split",
    ]
    (note,) = split_notes({"train": TEN[:1], "val": [], "test": []}, TEN[:1])
    assert note.startswith("splits 'val', 'test' got no shard, because whole shards are divided, and there are 1:")


@pytest.mark.parametrize(("ratio", "count", "noted"), [("1,0,0", 3, False), ("8,1,1", 2, True), ("9,1,0", 1, True)])
def test_only_a_split_that_was_to_get_shards_is_noted_when_it_gets_none(ratio: str, count: int, noted: bool) -> None:
    shards = TEN[:count]
    assert bool(split_notes(divide_by_ratio(shards, ratio), shards, meant_to_be_empty(ratio))) == noted


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a0.tar", "a1.tar"], ["a{0..1}.tar"]),
        (["a08.tar", "a09.tar", "a10.tar", "a12.tar"], ["a{08..10}.tar", "a12.tar"]),
        (["a8.tar", "a9.tar", "a10.tar"], ["a{8..9}.tar", "a10.tar"]),
        (["p0/s0.tar", "p0/s1.tar", "p1/s0.tar", "p1/s1.tar"], ["p0/s{0..1}.tar", "p1/s{0..1}.tar"]),
        (["s1-1.tar", "s2-1.tar", "s2-2.tar"], ["s{1..2}-1.tar", "s2-2.tar"]),
        (["s1-1.tar", "s2-2.tar"], ["s1-1.tar", "s2-2.tar"]),
    ],
)
def test_collapse(names: list[str], expected: list[str]) -> None:
    assert collapse_names(names) == expected


@given(st.lists(st.from_regex(r"[ab]/?[0-9]{1,3}-?[0-9]{0,2}\.tar", fullmatch=True), max_size=30), st.booleans())
def test_collapsed_names_expand_to_themselves(names: list[str], ordered: bool) -> None:
    names = sorted(names) if ordered else names
    assert [name for pattern in collapse_names(names) for name in braceexpand(pattern)] == names


def test_a_long_run_is_one_pattern() -> None:
    names = [f"shards/part-{number:06d}.tar" for number in range(5000)]
    assert collapse_names(names) == ["shards/part-{000000..004999}.tar"]
