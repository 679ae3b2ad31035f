"""A blend that begins in the middle of a run: each leaf's stream goes on without a gap, wherever and however often."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.errors import UsageError
from energon_lite.order.hashing import hash_ints
from energon_lite.order.orders import BlendOrder, EpochBlendOrder, Rebase
from energon_lite.order.shuffle import LeafOrder

LENGTHS = (7, 50, 1000, 3, 4097)
weights = st.floats(0.01, 10).map(lambda weight: round(weight, 3))


def leaf_order(leaf: int) -> LeafOrder:
    return LeafOrder(LENGTHS[leaf], hash_ints(99, leaf), (1, 1, 3, None, 1)[leaf])


@st.composite
def recipes(draw: st.DrawFn) -> tuple[list[int], BlendOrder | EpochBlendOrder]:
    """Some of the leaves, in any order, and an order that mixes them."""
    leaves = draw(st.permutations(range(len(LENGTHS))))[: draw(st.integers(1, len(LENGTHS)))]
    orders = [leaf_order(leaf) for leaf in leaves]
    one_each: Any = st.lists(weights, min_size=len(leaves), max_size=len(leaves))
    if draw(st.booleans()):
        return leaves, BlendOrder(orders, draw(one_each), key=1)
    repetitions = [max(0.5, weight) for weight in draw(one_each)]  # of at least one sample
    return leaves, EpochBlendOrder(orders, repetitions, key=1)


@given(chain=st.lists(st.tuples(recipes(), st.integers(0, 6000)), min_size=1, max_size=4))
def test_each_leafs_stream_has_no_gap_and_no_repetition(chain: Any) -> None:
    position, shown = 0, dict.fromkeys(range(len(LENGTHS)), 0)
    streams: dict[int, list[tuple[int, int]]] = {leaf: [] for leaf in shown}
    for (leaves, order), count in chain:
        order = order.rebased(Rebase(position, tuple(shown[leaf] for leaf in leaves)))
        found = order.lookup(np.arange(position, position + count))
        for leaf, index, epoch in found.rows():
            streams[leaves[leaf]].append((index, epoch))
        position += count
        for leaf, before in zip(leaves, order.counts_before(position).tolist(), strict=True):
            shown[leaf] = before
    for leaf, stream in streams.items():
        alone = BlendOrder([leaf_order(leaf)], [1.0], key=1)
        assert stream == [row[1:] for row in alone.lookup(np.arange(shown[leaf])).rows()]


@given(recipe=recipes(), position=st.integers(0, 2**55), span=st.integers(1, 100))
def test_far_out_too_and_at_random(recipe: Any, position: int, span: int) -> None:
    leaves, order = recipe
    order = order.rebased(Rebase(position, tuple(range(len(leaves)))))
    one_by_one = [order.lookup(np.array([position + step])).rows()[0] for step in range(span)]
    assert order.lookup(np.arange(position, position + span)).rows() == one_by_one
    counts = order.counts_before(position + span) - order.counts_before(position)
    assert counts.tolist() == np.bincount([row[0] for row in one_by_one], minlength=len(leaves)).tolist()


def test_shares_are_those_of_the_new_blend() -> None:
    order = BlendOrder([leaf_order(2), leaf_order(4)], [3.0, 1.0], key=1).rebased(Rebase(10_001, (5000, 0)))
    assert order.counts_before(10_001 + 4096).tolist() == [5000 + 3072, 1024]
    # Values for ever. If this changes, so must ORDER_VERSION.
    assert order.lookup(10_001 + np.arange(12)).leaf.tolist() == [0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 1, 0]


def test_positions_before_are_refused() -> None:
    order = BlendOrder([leaf_order(0), leaf_order(1)], [1.0, 1.0], key=1).rebased(Rebase(100, (60, 40)))
    with pytest.raises(UsageError, match="position 99 is before the blend was changed, which was at position 100"):
        order.lookup(np.arange(99, 110))
