from __future__ import annotations

import json
import math
import time
from fractions import Fraction
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.config.leaf_spec import LeafSpec, Subset
from energon_lite.config.metadataset import is_metadataset, load_metadataset
from energon_lite.errors import ConfigError
from tests.core.config.conftest import Write

V2 = "__module__: megatron.energon\n__class__: MetadatasetV2\n"


train_leaves = partial(load_metadataset, split_part="train")


def brief(leaves: tuple[LeafSpec, ...]) -> list[tuple[str, str, float]]:
    return [(Path(leaf.path).name, leaf.split_part, round(leaf.weight, 12)) for leaf in leaves]


# --------------------------------------------------------------------------------------------------- right documents


def test_a_blend(write: Write, room: Path) -> None:
    path = write(
        V2
        + """\
splits:
  train:
    blend:
      - path: digits
        weight: 3
        subflavors: {kind: image}
        shuffle_over_epochs_multiplier: 2
      - path: ./prose
        split_part: all
        dataset_config: words.yaml
        split_config: small.yaml
"""
    )
    assert train_leaves(path) == (
        LeafSpec(
            path=str(room / "digits"),
            split_part="train",
            weight=0.75,
            subflavors={"kind": "image"},
            shuffle_over_epochs_multiplier=2,
            origin=f"{path}:6",
        ),
        LeafSpec(
            path=str(room / "prose"),
            split_part="all",
            weight=0.25,
            dataset_config="words.yaml",
            split_config="small.yaml",
            origin=f"{path}:10",
        ),
    )


@pytest.mark.parametrize("head", ["", "__module__: megatron.energon\n__class__: Metadataset\n"])
def test_version_1(head: str, write: Write) -> None:
    text = """\
splits:
  train:
    datasets:
      - {path: digits, weight: 3, subflavor: old}
      - {path: prose, split_part: all, subflavors: {a: 1}}
  val:
    datasets: [{path: prose}]
"""
    path = write(head + text)
    leaves = train_leaves(path)
    assert brief(leaves) == [("digits", "train", 0.75), ("prose", "all", 0.25)]
    assert [leaf.subflavors for leaf in leaves] == [{"__subflavor__": "old"}, {"a": 1}]
    assert brief(load_metadataset(path, split_part="val")) == [("prose", "val", 1.0)]


@pytest.mark.parametrize(
    "head",
    [
        "",
        V2,
        "__class__: MetadatasetV2\n",
        "__module__: energon_lite\n__class__: MetadatasetV2\n",
        "__module__: megatron.energon.metadataset.metadataset_v2\n__class__: MetadatasetV2\n",
    ],
)
def test_version_2_however_it_is_named(head: str, write: Write) -> None:
    path = write(head + "splits: {train: {blend: [{path: digits}, {path: prose}]}}\n")
    assert brief(train_leaves(path)) == [("digits", "train", 0.5), ("prose", "train", 0.5)]


def test_absolute_paths_and_urls(write: Write, room: Path) -> None:
    path = write(f"splits: {{train: {{blend: [{{path: {room / 'digits'}}}, {{path: 's3://bucket/some/set'}}]}}}}\n")
    assert [leaf.path for leaf in train_leaves(path)] == [str(room / "digits"), "s3://bucket/some/set"]


def test_empty_optional_keys_are_as_if_they_were_not_there(write: Write) -> None:
    text = "splits:\n  train:\n    path: digits\n    split_part:\n    subflavors: ~\n    aux: null\n    subset:\n"
    assert train_leaves(write(text))[0].subflavors == {}


def test_paths_count_from_the_document_that_they_stand_in(write: Write, room: Path) -> None:
    write("splits: {train: {blend: [{path: photos}, {path: ../digits}]}}\n", "sub/inner.yml")
    outer = write("splits: {train: {blend: [{path: sub/inner.yml, weight: 1}, {path: prose, weight: 3}]}}\n")
    leaves = train_leaves(outer)
    assert [leaf.path for leaf in leaves] == [str(room / p) for p in ("sub/photos", "digits", "prose")]
    assert [leaf.weight for leaf in leaves] == [0.125, 0.125, 0.75]
    assert leaves[0].origin == f"{room / 'sub/inner.yml'}:1"


@pytest.mark.parametrize(
    ("outer", "inner", "product"),
    [("2", "3", 6), ("-1", "3", -1), ("3", "-1", -1), ("null", "-1", None), ("-1", "null", None), ("2", "1", 2)],
)
def test_the_multiplier_multiplies(outer: str, inner: str, product: int | None, write: Write) -> None:
    write(f"splits: {{train: {{path: digits, shuffle_over_epochs_multiplier: {inner}}}}}\n", "in.yaml")
    path = write(f"splits: {{train: {{path: in.yaml, shuffle_over_epochs_multiplier: {outer}}}}}\n")
    assert train_leaves(path)[0].shuffle_over_epochs_multiplier == product


def test_a_document_may_refer_to_another_split_of_itself(write: Write) -> None:
    path = write("splits:\n  train: {path: digits}\n  val: {path: doc.yaml, split_part: train}\n")
    assert brief(load_metadataset(path, split_part="val")) == [("digits", "train", 1.0)]


# ------------------------------------------------------------------------------------- repetitions, subsets, the trail


def test_a_version_1_document_below_a_subset(write: Write) -> None:
    write("splits: {train: {datasets: [{path: digits}]}}\n", "in.yaml")
    top = write("splits:\n  train: {path: in.yaml, subset: {range: [50%, 100%]}}\n")
    assert train_leaves(top)[0].subset == Subset(Fraction(1, 2), Fraction(1))


def test_weights_of_any_size(write: Write) -> None:
    path = write("splits: {train: {blend: [{path: digits, weight: 1e308}, {path: prose, weight: 1.0e308}]}}\n")
    assert [leaf.weight for leaf in train_leaves(path)] == [0.5, 0.5]


# -------------------------------------------------------------------------------------------------- dicts and paths


def test_a_dict_counts_paths_from_the_current_folder(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(room)
    document: dict[str, Any] = {
        "splits": {"train": {"blend": [{"path": Path("digits"), "weight": 1}, {"path": "good.yaml", "weight": 3}]}}
    }
    leaves = train_leaves(document)
    assert brief(leaves) == [("digits", "train", 0.25), ("digits", "train", 0.75)]
    assert leaves[0].path == str(room / "digits")
    assert leaves[0].origin == "<dict> at splits.train.blend[0]"


def test_mistakes_in_a_dict_name_their_place() -> None:
    said = r"unknown key 'weigth'[\s\S]*<dict> at splits\.train\.blend\[0\]\.weigth[\s\S]*did you mean 'weight'"
    with pytest.raises(ConfigError, match=said):
        train_leaves({"splits": {"train": {"blend": [{"path": "x", "weigth": 1}]}}})


@pytest.mark.parametrize(
    ("path", "expected"),
    [("a.yaml", True), ("a.yml", True), ("s3://b/a.yaml", True), ("a", False), ("a.jsonl", False), ("a.yaml.d", False)],
)
def test_what_is_a_metadataset(path: str, expected: bool) -> None:
    assert is_metadataset(path) is expected
    assert is_metadataset(Path(path)) is expected


def test_a_folder_with_such_a_name_is_none(tmp_path: Path) -> None:
    (tmp_path / "set.yaml").mkdir()
    assert not is_metadataset(tmp_path / "set.yaml")
    assert is_metadataset({"splits": {}})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("god.yaml", "the metadataset is missing.*\\n.*\\n.*did you mean '.*/good.yaml'"),
        ("digits", "a folder, not a metadataset"),
        ("s3://bucket/blend.yaml", "behind a URL are not read here"),
    ],
)
def test_what_is_no_document(name: str, message: str, room: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        train_leaves(name if "://" in name else room / name)


def test_a_thousand_leaves_load_quickly(write: Write, room: Path) -> None:
    entries = []
    for number in range(1000):
        (room / f"set{number:04}").mkdir()
        entries.append({"path": f"set{number:04}", "weight": number + 1, "subflavors": {"number": number}})
    path = write(yaml.safe_dump({"splits": {"train": {"blend": entries}, "val": {"blend": entries}}}))
    start = time.thread_time()
    leaves = train_leaves(path)
    assert time.thread_time() - start < 1.0
    assert len(leaves) == 1000
    assert math.fsum(leaf.weight for leaf in leaves) == pytest.approx(1.0)


# ----------------------------------------------------------------------------------------------- behind URLs, at random


def behind_a_url(aux: dict[str, str]) -> LeafSpec:
    text = json.dumps({"splits": {"train": {"path": "./digits", "aux": aux}}})
    (leaf,) = load_metadataset("s3://store/blends/a.yaml", split_part="train", read_url=lambda _: text.encode())
    return leaf


def test_aux_of_a_document_behind_a_url(tmp_path: Path) -> None:
    aux = {
        "a": "./text", "b": "filesystem://../notes", "c": "filesystem+s3://other/notes", "d": f"filesystem+file://{tmp_path}"
    }  # fmt: skip
    leaf = behind_a_url(aux)
    assert leaf.path == "s3://store/blends/digits"
    assert {name: (one.kind, one.path) for name, one in leaf.aux.items()} == {
        "a": ("dataset", "s3://store/blends/text"),
        "b": ("filesystem", "s3://store/notes"),
        "c": ("filesystem", "s3://other/notes"),
        "d": ("filesystem", str(tmp_path)),
    }
    for wrong, words in (
        ("filesystem:///etc", "absolute path in a document behind"),
        ("../../../a", "out of the store"),
    ):
        with pytest.raises(ConfigError, match=words):
            behind_a_url({"a": wrong})


def trees(numbers: st.SearchStrategy[Any], leaves: int) -> st.SearchStrategy[Any]:
    """A leaf is an int (its number does not matter), a blend a list of (number, what is below)."""
    return st.recursive(
        st.just(0), lambda below: st.lists(st.tuples(numbers, below), min_size=1, max_size=4), max_leaves=leaves
    ).filter(lambda tree: isinstance(tree, list))


def write_tree(
    tree: Any, folder: Path, key: str, expected: list[tuple[str, Fraction]], product: Fraction, name: str
) -> str:
    """Writes the documents of a tree; returns the path for the reference to it; collects the leaves in order.

    Weights multiply as shares, repetitions as decimal numbers.
    """
    if not isinstance(tree, list):
        path = folder / f"leaf{len(expected)}"
        path.mkdir()
        expected.append((str(path), product))
        return path.name
    total = sum(Fraction(weight) for weight, _ in tree)
    entries = []
    for i, (number, below) in enumerate(tree):
        factor = Fraction(number) / total if key == "weight" else Fraction(str(number))
        entries.append({"path": write_tree(below, folder, key, expected, product * factor, f"{name}{i}"), key: number})
    kind = "blend" if key == "weight" else "blend_epochized"
    (folder / f"{name}.yaml").write_text(yaml.safe_dump({"splits": {"train": {kind: entries}}}))
    return f"{name}.yaml"


def loaded(tree: Any, key: str) -> tuple[tuple[LeafSpec, ...], list[tuple[str, Fraction]]]:
    """The leaves of a tree, which are the same if the top is given as a dict; and those that it should have."""
    with TemporaryDirectory() as folder:
        expected: list[tuple[str, Fraction]] = []
        top = Path(folder, write_tree(tree, Path(folder), key, expected, Fraction(1), "top"))
        leaves = train_leaves(top)
        document = yaml.safe_load(top.read_text())
        for entry in document["splits"]["train"]["blend" if key == "weight" else "blend_epochized"]:
            entry["path"] = Path(folder, entry["path"])
        given_as_dict = train_leaves(document)
    for leaf, other in zip(leaves, given_as_dict, strict=True):
        assert (leaf.path, leaf.weight, leaf.repetitions) == (other.path, other.weight, other.repetitions)
    assert [leaf.path for leaf in leaves] == [path for path, _ in expected]
    return leaves, expected


@given(trees(st.integers(1, 1000) | st.floats(1e-3, 1e3), 20))
def test_weights_sum_to_one_and_multiply_along_the_path(tree: Any) -> None:
    leaves, expected = loaded(tree, "weight")
    assert math.fsum(leaf.weight for leaf in leaves) == pytest.approx(1.0, rel=1e-12)
    for leaf, (_, share) in zip(leaves, expected, strict=True):
        assert leaf.weight == pytest.approx(float(share), rel=1e-12)


@given(trees(st.integers(1, 9) | st.integers(1, 99).map(lambda n: n / 10), 12))
def test_repetitions_multiply_along_the_path(tree: Any) -> None:
    leaves, expected = loaded(tree, "repetitions")
    assert [leaf.repetitions for leaf in leaves] == [float(product) for _, product in expected]
