from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from energon_lite.config.dataset import SplitConfig, load_split_config, split_exclusion
from energon_lite.errors import ConfigError
from tests.testing import told_of

WRITTEN_BY_ENERGON = """\
exclude: []
split_parts:
  train:
  - shards/s{000..002}.tar
  - shards/extra.tar
  val:
  - shards/s003.tar
  test: []
"""


def test_as_energon_writes_it(write: Callable[..., Path]) -> None:
    config = load_split_config(write(WRITTEN_BY_ENERGON))
    assert config.split_parts == {
        "train": ("shards/s000.tar", "shards/s001.tar", "shards/s002.tar", "shards/extra.tar"),
        "val": ("shards/s003.tar",),
        "test": (),
    }
    assert config.shards("val") == ("shards/s003.tar",)
    assert config.shards("test") == ()
    assert (config.exclude, config.excluded_samples) == ((), ())


def test_exclude_takes_out_shards_and_names_samples(write: Callable[..., Path]) -> None:
    text = """\
split_parts: {train: ['s/{0..3}.tar'], val: [s/2.tar]}
exclude: [s/1.tar, 's/{2,3}.tar/a/0{1..2}', s/0.tar/x.y]
"""
    config = load_split_config(write(text))
    assert config.shards("train") == ("s/0.tar", "s/2.tar", "s/3.tar")
    assert config.shards("val") == ("s/2.tar",)
    assert config.excluded_samples == (
        ("s/2.tar", "a/01"), ("s/2.tar", "a/02"), ("s/3.tar", "a/01"), ("s/3.tar", "a/02"), ("s/0.tar", "x.y"),
    )  # fmt: skip


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


def test_an_exclusion_that_matches_nothing_is_logged(
    write: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    path = write("split_parts: {train: [a.tar]}\nexclude:\n- b.tar\n- a.tar/x\n- 'b.tar/{0..9}'\n")
    with caplog.at_level(logging.WARNING, logger="energon_lite"):
        config = load_split_config(path)
    assert config.shards("train") == ("a.tar",)
    assert told_of(caplog, path) == [
        f"{path}:3: the exclusion 'b.tar' matches no shard of any split",
        f"{path}:5: the exclusion 'b.tar/{{0..9}}' matches no shard of any split",
    ]


def test_an_unknown_split_names_those_that_there_are(write: Callable[..., Path]) -> None:
    path = write(WRITTEN_BY_ENERGON)
    with pytest.raises(ConfigError, match="has no split 'trian'") as caught:
        load_split_config(path).shards("trian")
    assert caught.value.file == str(path)
    assert caught.value.expected == "one of: train, val, test"
    assert caught.value.fix == "did you mean 'train'?"


def test_an_unknown_split_where_none_resembles_it() -> None:
    with pytest.raises(ConfigError) as caught:
        SplitConfig({"a": (), "b": ()}).shards("zzz")
    assert caught.value.fix == "use one of: a, b"
    with pytest.raises(ConfigError, match="no splits at all") as caught:
        SplitConfig({}).shards("train")
    assert "energon-lite prepare" in str(caught.value.fix)


def test_split_json_stands_in(room: Path) -> None:
    meta = room / "digits" / ".nv-meta"
    meta.mkdir()
    (meta / "split.json").write_text(json.dumps({"split_parts": {"train": ["é{0..1}.tar"]}, "exclude": []}))
    config = load_split_config(meta / "split.yaml")
    assert config.shards("train") == ("é0.tar", "é1.tar")
    assert config.origin == str(meta / "split.json")
