"""Joins in documents: the leaves that come of them, and mistakes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from energon_lite.config.metadataset import load_metadataset
from tests.core.config.conftest import room, write
from tests.core.config.test_wrong_documents import check_wrong_document

__all__ = ["room", "write"]

WRONG = yaml.safe_load((Path(__file__).parent / "wrong_joins.yaml").read_text())


@pytest.mark.parametrize("name", WRONG)
def test_wrong_join(name: str, write: Callable[..., Path]) -> None:
    check_wrong_document("metadatasets", WRONG[name], write)


def test_a_join_is_one_leaf(write: Callable[..., Path], room: Path) -> None:
    path = write(
        "splits:\n  train:\n    subset: {range: [0%, 50%]}\n    blend:\n    - path: prose\n    - join:\n"
        + "        a: {path: digits, subflavors: {x: 1, y: 1}, split_part: val}\n"
        + "        b: {path: prose, nonmatch: none, dataset_config: d.yaml, split_config: s.yaml}\n"
        + "      joiner: {__module__: mine, __function__: both}\n      weight: 3\n      split_part: held_out\n"
        + "      subflavors: {y: 2}\n      shuffle_over_epochs_multiplier: 4\n      subset: {range: [50%, 100%]}\n"
    )
    _, leaf = load_metadataset(path, split_part="train")
    assert leaf.join is not None and leaf.weight == 0.75 and leaf.shuffle_over_epochs_multiplier == 4
    assert leaf.folders == (str(room / "digits"), str(room / "prose")) and leaf.path == str(room / "digits")
    assert (leaf.join.names, leaf.join.nonmatch, leaf.join.joiner) == (("a", "b"), ("error", "none"), "mine.both")
    assert [member.split_part for member in leaf.join.members] == ["val", "held_out"]
    assert [member.subflavors for member in leaf.join.members] == [{"x": 1, "y": 2}, {"y": 2}]
    assert (leaf.join.members[1].dataset_config, leaf.join.members[1].split_config) == ("d.yaml", "s.yaml")
    assert str(leaf.subset) == "50% to 75%" and all(member.subset is None for member in leaf.join.members)
