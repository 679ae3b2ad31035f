"""Metadatasets at random: how weights and repetitions multiply."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite.config.metadataset import load_metadataset

WEIGHTS = st.integers(1, 1000) | st.floats(1e-3, 1e3)
#: A leaf is an int (its number does not matter), a blend a list of (weight, what is below).
TREES = st.recursive(
    st.just(0), lambda inner: st.lists(st.tuples(WEIGHTS, inner), min_size=1, max_size=4), max_leaves=20
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


@settings(deadline=None)
@given(TREES)
def test_weights_sum_to_one_and_multiply_along_the_path(tree: Any) -> None:
    with TemporaryDirectory() as folder:
        expected: list[tuple[str, Fraction]] = []
        top = write_tree(tree, Path(folder), "weight", expected, Fraction(1), "top")
        leaves = load_metadataset(Path(folder, top), split_part="train")
        document = yaml.safe_load(Path(folder, top).read_text())
        for entry in document["splits"]["train"]["blend"]:
            entry["path"] = Path(folder, entry["path"])
        given_as_dict = load_metadataset(document, split_part="train")
    assert [leaf.path for leaf in leaves] == [path for path, _ in expected]
    assert math.fsum(leaf.weight for leaf in leaves) == pytest.approx(1.0, rel=1e-12)
    for leaf, (_, share) in zip(leaves, expected, strict=True):
        assert leaf.weight == pytest.approx(float(share), rel=1e-12)
    assert [(leaf.path, leaf.weight) for leaf in given_as_dict] == [(leaf.path, leaf.weight) for leaf in leaves]


REPETITIONS = st.integers(1, 9) | st.integers(1, 99).map(lambda n: n / 10)
EPOCH_TREES = st.recursive(
    st.just(0), lambda inner: st.lists(st.tuples(REPETITIONS, inner), min_size=1, max_size=4), max_leaves=12
).filter(lambda tree: isinstance(tree, list))


@settings(deadline=None)
@given(EPOCH_TREES)
def test_repetitions_multiply_along_the_path(tree: Any) -> None:
    with TemporaryDirectory() as folder:
        expected: list[tuple[str, Fraction]] = []
        top = write_tree(tree, Path(folder), "repetitions", expected, Fraction(1), "top")
        leaves = load_metadataset(Path(folder, top), split_part="train")
    assert [leaf.repetitions for leaf in leaves] == [float(product) for _, product in expected]
