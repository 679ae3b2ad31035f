"""Runs whose weights change: rebases and arrays of their order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.errors import UsageError
from energon_lite.extras.blends.staged_run import Stages, stages_from
from energon_lite.extras.blends.stages import WeightStage
from energon_lite.extras.tools.order_arrays import build_blend_index
from energon_lite.order.orders import BlendOrder, Rebase
from tests.core.order import test_rebase as rebase


@st.composite
def staged(draw: st.DrawFn) -> tuple[list[int], BlendOrder]:
    """Some of the leaves, in any order, and an order that mixes them by weights that change."""
    leaves = draw(st.permutations(range(len(rebase.LENGTHS))))[: draw(st.integers(1, len(rebase.LENGTHS)))]
    one_each: Any = st.lists(rebase.weights, min_size=len(leaves), max_size=len(leaves))
    first, second, third = (tuple(draw(one_each)) for _ in range(3))
    begin = draw(st.integers(1, 9000))
    stages = WeightStage(0, first, last=second), WeightStage(begin, second), WeightStage(begin + 4096, third)
    return leaves, BlendOrder([rebase.leaf_order(leaf) for leaf in leaves], Stages(stages), key=1)


@given(
    chain=st.lists(
        st.tuples(st.one_of(staged(), staged(), rebase.recipes()), st.integers(0, 6000)), min_size=1, max_size=4
    )
)
def test_each_leafs_stream_has_no_gap_and_no_repetition(chain: Any) -> None:
    rebase.test_each_leafs_stream_has_no_gap_and_no_repetition.hypothesis.inner_test(chain)  # type: ignore[attr-defined]


@given(recipe=staged(), position=st.one_of(st.integers(0, 20_000), st.integers(0, 2**55)), span=st.integers(1, 100))
def test_far_out_too_and_at_random(recipe: Any, position: int, span: int) -> None:
    rebase.test_far_out_too_and_at_random.hypothesis.inner_test(recipe, position, span)  # type: ignore[attr-defined]
    rebase.test_counts_before_are_what_is_shown_before.hypothesis.inner_test(  # type: ignore[attr-defined]
        recipe, position % 20_000
    )


def test_a_stage_keeps_its_place_in_the_run() -> None:
    stages = WeightStage(0, (1, 0)), WeightStage(4096, (0, 1))
    order = BlendOrder([rebase.leaf_order(2), rebase.leaf_order(4)], Stages(stages), key=1)
    order = order.rebased(Rebase(4000, (4000, 0)))
    assert order.lookup(np.arange(4000, 5000)).leaf.tolist() == [0] * 96 + [1] * 904
    slope = [WeightStage(0, (2.0, 0.0), last=(0.0, 4.0)), WeightStage(8, (0.0, 1.0))]
    assert stages_from(slope, 2) == [WeightStage(0, (0.75, 0.25), last=(0.0, 4.0)), WeightStage(6, (0.0, 1.0))]
    assert stages_from(slope, 8) == stages_from(slope, 99) == [WeightStage(0, (0.0, 1.0))]


def test_a_blend_index_of_stages(tmp_path: Any) -> None:
    stages = Stages((WeightStage(0, (1, 0)), WeightStage(4096, (1, 3))))
    data_set, sample = build_blend_index(stages, 6000, key=3)
    leaf, position = stages.blend(2, 3, 6000).lookup(np.arange(6000))
    assert np.array_equal(data_set, leaf) and np.array_equal(sample, position)
    for built, expected in zip(
        build_blend_index(stages, 6000, tmp_path / "index", key=3, workers=2), (leaf, position), strict=True
    ):
        assert np.array_equal(built, expected)
    with pytest.raises(UsageError, match="never ends"):
        build_blend_index(Stages((WeightStage(0, (1, 0), last=(0, 1)),)), 10)
