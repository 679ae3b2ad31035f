"""Records of leaves: plain lists, and back."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from energon_lite.config.leaf_spec import AuxReference, LeafSpec, Step, Subset, WeightUnit
from energon_lite.extras.blends.leaf_table import LeafRecords
from energon_lite.extras.blends.weight_schedule import Schedule, Segment
from tests.testing import examples

_NUMBERS = st.floats(1e-300, 1.0)
_PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
_SUBSETS = st.builds(
    Subset,
    st.fractions(0, Fraction(1, 2)),
    st.fractions(Fraction(1, 2), 1),
    st.none() | st.integers(0, 99),
    st.none() | st.integers(100, 2**40),
    st.text(max_size=5),
)
_SPECS = st.builds(
    LeafSpec,
    path=st.text(max_size=9).map("/data/".__add__),
    split_part=st.sampled_from(["train", "val"]),
    weight=_NUMBERS,
    schedule=st.none()
    | st.lists(st.builds(Segment, st.integers(0, 2**62), _NUMBERS, _NUMBERS), min_size=1, max_size=2).map(
        lambda segments: Schedule(tuple(segments))
    ),
    repetitions=st.none() | _NUMBERS,
    subset=st.none() | _SUBSETS,
    subflavors=st.dictionaries(st.text(max_size=3), _PLAIN, max_size=2),
    shuffle_over_epochs_multiplier=st.sampled_from([None, -1, 1, 3]),
    origin=st.text(max_size=5),
    trail=st.lists(st.builds(Step, *[st.text(max_size=3)] * 4), max_size=2).map(tuple),
    filters=st.lists(st.text(max_size=3), max_size=2).map(tuple),
    units=st.lists(
        st.builds(WeightUnit, st.just("tokens"), *[st.integers(0, 9)] * 2, st.text(max_size=3)), max_size=1
    ).map(tuple),
)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(_SPECS, max_size=70))
@example([LeafSpec("/data/\udcff", "train")] * 65)  # a path that is no text
def test_they_come_back_as_they_were(specs: list[LeafSpec]) -> None:
    records = LeafRecords.of(specs)
    assert list(records) == specs and records[: len(specs)] == specs
    assert len(records.packed) == -(-len(specs) // 32)  # in files, too
    assert list(records.paths()) == [spec.path for spec in specs]
    for number, spec in enumerate(specs):
        assert records[number] == spec and records[number].trail == spec.trail
        assert records[number].subset == spec.subset
    with pytest.raises(IndexError):
        records[len(specs)]


@pytest.mark.parametrize(
    "spec",
    [LeafSpec("a", "train", aux={"x": AuxReference("dataset", "b")}), LeafSpec("a", "train", subflavors={"x": 2**70})],
)
def test_what_is_not_plain_is_refused(spec: LeafSpec) -> None:
    with pytest.raises(ValueError):
        LeafRecords.of([spec])
