"""What is chosen of a data set: ``split.yaml``, and subsets."""

from __future__ import annotations

import json
import logging
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.config.dataset import SplitConfig, load_split_config, split_exclusion
from energon_lite.config.leaf_spec import Subset, read_subset
from energon_lite.documents import from_plain
from energon_lite.errors import ConfigError
from tests.core.config.conftest import Write
from tests.testing import told_of


def test_exclude_takes_out_shards_and_names_samples(write: Write) -> None:
    text = """\
split_parts: {train: ['s/{01..03}.tar', s/00.tar], val: [s/02.tar], test: []}
exclude: [s/01.tar, 's/{02,03}.tar/a/0{1..2}', s/00.tar/x.y]
"""
    config = load_split_config(write(text))
    assert config.shards("train") == ("s/02.tar", "s/03.tar", "s/00.tar")
    assert config.shards("val") == ("s/02.tar",) and config.shards("test") == ()
    keys = {"s/02.tar": ("a/01", "a/02"), "s/03.tar": ("a/01", "a/02"), "s/00.tar": ("x.y",)}
    assert config.excluded_samples == tuple((shard, key) for shard, those in keys.items() for key in those)


@pytest.mark.parametrize(
    ("entry", "pair"),
    [
        ("a.tar/k", ("a.tar", "k")),
        ("a.tar/d/k", ("a.tar", "d/k")),
        ("d/b.tar/k", ("d/b.tar", "k")),
        ("a.tar", None),
        ("a.tar/", None),
        ("c.tar/k", None),
        ("d/k", None),
    ],
)
def test_where_the_shard_ends_and_the_key_begins(entry: str, pair: tuple[str, str] | None) -> None:
    assert split_exclusion(entry, {"a.tar", "d/b.tar"}) == pair


def test_an_exclusion_that_matches_nothing_is_logged(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    path = write("split_parts: {train: [a.tar]}\nexclude:\n- b.tar\n- a.tar/x\n- 'b.tar/{0..9}'\n")
    with caplog.at_level(logging.WARNING, logger="energon_lite"):
        config = load_split_config(path)
    assert config.shards("train") == ("a.tar",)
    assert told_of(caplog, path) == [
        f"{path}:3: the exclusion 'b.tar' matches no shard of any split",
        f"{path}:5: the exclusion 'b.tar/{{0..9}}' matches no shard of any split",
    ]


def test_an_unknown_split_names_those_that_there_are(write: Write) -> None:
    path = write("split_parts: {train: [s.tar], val: [], test: []}")
    said = rf"has no split 'trian'; expected one of: train, val, test[\s\S]*{path}[\s\S]*did you mean 'train'\?"
    with pytest.raises(ConfigError, match=said):
        load_split_config(path).shards("trian")


def test_an_unknown_split_where_none_resembles_it() -> None:
    with pytest.raises(ConfigError, match="fix:   use one of: a, b"):
        SplitConfig({"a": (), "b": ()}).shards("zzz")
    with pytest.raises(ConfigError, match=r"no splits at all[\s\S]*energon-lite prepare"):
        SplitConfig({}).shards("train")


def test_split_json_stands_in(room: Path) -> None:
    meta = room / "digits" / ".nv-meta"
    meta.mkdir()
    (meta / "split.json").write_text(json.dumps({"split_parts": {"train": ["é{0..1}.tar"]}, "exclude": []}))
    config = load_split_config(meta / "split.yaml")
    assert config.shards("train") == ("é0.tar", "é1.tar")
    assert config.origin == str(meta / "split.json")
    with pytest.raises(ConfigError, match="list of splits is missing"):
        load_split_config(meta / "other.yaml")


# -- subsets


def read(start: Any, stop: Any) -> Subset:
    return read_subset(from_plain({"range": [start, stop]}, "x"))


@pytest.mark.parametrize(
    ("range_", "samples", "expected"),
    [
        (("0%", "100%"), 7, (0, 7)),
        (("0%", "80%"), 10, (0, 8)),
        (("25%", "75%"), 10, (2, 7)),
        (("12.5 %", " 1e2%"), 16, (2, 16)),
        (("29%", "30%"), 100, (28, 30)),  # 100 * 0.29 is a hair below 29, and Energon rounds down
        (("0%", "1%"), 99, (0, 0)),
        ((3, 5), 10, (3, 5)),
        ((3, "end"), 10, (3, 10)),
        ((0, 10), 10, (0, 10)),
        ((9, " end "), 9, (9, 9)),
    ],
)
def test_bounds(range_: tuple[Any, Any], samples: int, expected: tuple[int, int]) -> None:
    assert read(*range_).bounds(samples) == expected


@pytest.mark.parametrize(("range_", "samples"), [((3, 11), 10), ((11, "end"), 10), ((0, 1), 0)])
def test_numbers_beyond_the_end(range_: tuple[Any, Any], samples: int) -> None:
    said = rf"beyond the end of the data set; expected .*up to {samples}.*; found .*{range_[1]}.*\n  where: x"
    with pytest.raises(ConfigError, match=said):
        read(*range_).bounds(samples)


def test_an_outer_range_is_a_part_of_the_inner_one() -> None:
    inner, outer = read("25%", "75%"), read("50%", "100%")
    assert outer.of(inner) == Subset(Fraction(1, 2), Fraction(3, 4))
    assert outer.of(None) == outer
    assert outer.of(read(100, 300)).bounds(1000) == (200, 300)  # numbers first, then percentages


@pytest.mark.parametrize(
    ("subset", "text"),
    [
        (read("25%", "33.3%"), "25% to 33.3%"),
        (read(5, "end"), "samples 5:end"),
        (read("0%", "50%").of(read(5, 9)), "0% to 50% of samples 5:9"),
    ],
)
def test_text(subset: Subset, text: str) -> None:
    assert str(subset) == text


cuts = st.lists(st.integers(0, 10_000).map(lambda n: n / 100), min_size=0, max_size=4).map(
    lambda inner: sorted({0.0, 100.0, *inner})
)


@given(st.integers(0, 10**6), st.lists(cuts, min_size=1, max_size=3))
def test_ranges_that_meet_partition_a_data_set_at_every_depth(samples: int, levels: list[list[float]]) -> None:
    parts: list[Subset | None] = [None]
    for level in levels:  # from the inside out
        ranges = [read(f"{a}%", f"{b}%") for a, b in pairwise(level)]
        parts = [outer.of(inner) for inner in parts for outer in ranges]
    bounds = [part.bounds(samples) for part in parts if part is not None]
    assert bounds[0][0] == 0 and bounds[-1][1] == samples
    assert all(one[1] == other[0] for one, other in pairwise(bounds))
    assert all(start <= stop for start, stop in bounds)


percentages = st.one_of(st.integers(0, 100), st.integers(0, 1000).map(lambda n: n / 10), st.floats(0, 100)).map(
    lambda value: f"{value}%"
)
pairs = st.tuples(percentages, percentages).filter(lambda pair: float(pair[0][:-1]) < float(pair[1][:-1]))


@given(st.integers(0, 10**7), pairs)
def test_one_range_cuts_where_energon_cuts(samples: int, pair: tuple[str, str]) -> None:
    from megatron.energon.metadataset.metadataset_v2 import Subset as EnergonSubset

    theirs = EnergonSubset(range=pair).as_dataset_subset().compute_subset(samples)
    assert read(*pair).bounds(samples) == theirs


@given(st.integers(0, 10**7), pairs, pairs, st.none() | st.tuples(st.integers(0, 50), st.integers(51, 99)))
def test_a_range_of_a_range_is_energons_within_one_sample(
    samples: int, inner: tuple[str, str], outer: tuple[str, str], numbers: tuple[int, int] | None
) -> None:
    from megatron.energon.metadataset.metadataset_v2 import Subset as EnergonSubset

    samples = max(samples, 99)
    theirs = EnergonSubset(range=inner).merge(EnergonSubset(range=outer).as_dataset_subset())
    ours = read(*outer).of(read(*inner))
    if numbers is not None:
        theirs = EnergonSubset(range=numbers).merge(theirs)
        ours = ours.of(read(*numbers))
    try:
        expected = theirs.compute_subset(samples)
    except AssertionError:  # their cuts crossed, by rounding
        expected = ours.bounds(samples)
    assert all(abs(a - b) <= 1 for a, b in zip(ours.bounds(samples), expected, strict=True))
