"""Wrong joins, each with the place and the cure that its message must name; and what right ones mean."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from wrong_rows import Row, check

from energon_lite.config import load_metadataset
from energon_lite.errors import ConfigError

V2 = "__module__: megatron.energon\n__class__: MetadatasetV2\n"
TEXT = "    joiner: {__class__: TextSample}\n"

JOINS: dict[str, Row] = {
    "join without a joiner": (
        V2 + "splits:\n  train:\n    join: [{path: digits}]\n",
        5, 5, "splits.train.join", "'join' without 'joiner'", "__class__",
    ),
    "joiner in a blend that names nothing": (
        V2 + "splits:\n  train:\n    blend:\n      - join: [{path: digits}]\n        joiner: {}\n",
        7, 17, "splits.train.blend[0].joiner", "the joiner names nothing", "__function__",
    ),
    "joiner that is no sample type": (
        V2 + "splits:\n  train:\n    join: [{path: digits}]\n    joiner: {__class__: CaptionSample}\n",
        6, 25, "splits.train.joiner.__class__", "unknown class 'CaptionSample'", "CaptioningSample",
    ),
    "joiner with two names": (
        V2 + "splits:\n  train:\n    join: [{path: digits}]\n    joiner: {__class__: A, __function__: b}\n",
        6, 28, "splits.train.joiner.__function__", "'__class__' and '__function__'", "keep one",
    ),
    "joiner function without a module": (
        V2 + "splits:\n  train:\n    join: [{path: digits}]\n    joiner: {__function__: b}\n",
        6, 13, "splits.train.joiner", "missing key '__module__'", "add '__module__:'",
    ),
    "join of nothing": (
        V2 + "splits:\n  train:\n    join: []\n    joiner: {__class__: TextSample}\n",
        5, 11, "splits.train.join", "the join is empty", "add '- path: ...'",
    ),
    "join of text": (
        V2 + "splits:\n  train:\n    join: digits\n    joiner: {__class__: TextSample}\n",
        5, 11, "splits.train.join", "expected a list of data sets", "write a list",
    ),
    "join inside of a join": (
        V2 + "splits:\n  train:\n    join: [{join: []}]\n    joiner: {__class__: TextSample}\n",
        5, 13, "splits.train.join[0].join", "a join inside of a join", "into one list",
    ),
    "join of a metadataset": (
        V2 + "splits:\n  train:\n    join: [{path: good.yaml}]\n    joiner: {__class__: TextSample}\n",
        5, 19, "splits.train.join[0].path", "a metadataset cannot be joined", "name the folder",
    ),
    "join beside a path": (
        V2 + "splits:\n  train:\n    blend:\n    - {path: digits, join: [], joiner: {__class__: TextSample}}\n",
        6, 8, "splits.train.blend[0].path", "'path' and 'join'", "keep one",
    ),
    "joiner without a join": (
        V2 + "splits:\n  train:\n    path: digits\n    joiner: {__class__: TextSample}\n",
        6, 5, "splits.train.joiner", "unknown key 'joiner'", "",
    ),
    "nonmatch outside of a join": (
        V2 + "splits:\n  train:\n    path: digits\n    nonmatch: skip\n",
        6, 5, "splits.train.nonmatch", "unknown key 'nonmatch'", "",
    ),
    "nonmatch of the first data set": (
        V2 + "splits:\n  train:\n    join: [{path: digits, nonmatch: skip}]\n    joiner: {__class__: TextSample}\n",
        5, 27, "splits.train.join[0].nonmatch", "'nonmatch' at the first data set", "remove it here",
    ),
    "another nonmatch": (
        V2 + "splits:\n  train:\n    join: [{path: digits}, {path: prose, nonmatch: skp}]\n" + TEXT,
        5, 52, "splits.train.join[1].nonmatch", "expected one of error, skip, none", "did you mean 'skip'",
    ),
    "aux of a joined data set": (
        V2 + "splits:\n  train:\n    join: [{path: digits, aux: {a: prose}}, {path: prose}]\n" + TEXT,
        5, 27, "splits.train.join[0].aux", "'aux' is for the cooker of one data set", "as one more data set",
    ),
    "aux of a join": (
        V2 + "splits:\n  train:\n    join: [{path: digits}, {path: prose}]\n" + TEXT + "    aux: {a: prose}\n",
        7, 5, "splits.train.aux", "'aux' is for the cooker of one data set", "as one more data set",
    ),
    "weight of a joined data set": (
        V2 + "splits:\n  train:\n    join: [{path: digits, weight: 2}]\n    joiner: {__class__: TextSample}\n",
        5, 27, "splits.train.join[0].weight", "outside of a blend", "remove it",
    ),
    "dataset_config beside a join": (
        V2 + "splits:\n  train:\n    join: [{path: digits}]\n" + TEXT + "    dataset_config: a.yaml\n",
        7, 5, "splits.train.dataset_config", "belongs to one data set", "write it at the data sets",
    ),
}  # fmt: skip


@pytest.mark.parametrize("row", JOINS.values(), ids=JOINS.keys())
def test_wrong_join(row: Row, write: Callable[..., Path]) -> None:
    path = write(row[0])
    with pytest.raises(ConfigError) as caught:
        load_metadataset(path, split_part="train")
    check(caught.value, path, row)


def test_a_join_is_one_leaf(write: Callable[..., Path], room: Path) -> None:
    path = write(
        V2
        + "splits:\n  train:\n    subset: {range: [0%, 50%]}\n    blend:\n    - path: prose\n    - join:\n"
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
