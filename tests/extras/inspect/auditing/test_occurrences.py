"""Where a sample stands in an order: the same as going through it would find."""

from __future__ import annotations

import time
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite.extras.blends.staged_run import Stages
from energon_lite.extras.blends.stages import WeightStage
from energon_lite.extras.inspect.occurrences import Occurrences, StreamPlaces
from energon_lite.order.orders import BlendOrder, ConcatOrder, EpochBlendOrder, Order, Rebase
from energon_lite.order.shuffle import LeafOrder, Leaves
from tests.testing import examples

#: Positions that are gone through.
STOP = 20_000

leaf_orders = st.builds(
    LeafOrder,
    length=st.sampled_from([7, 500, 1500, 5000]),
    key=st.integers(0, 1 << 60),
    copies=st.sampled_from([1, 1, 1, None, -1, 3]),
)
windows = st.sampled_from([{}, {"run": 5, "window": 20}, {"run": 3, "window": 0}, {"run": 7, "window": 1000}])


@st.composite
def orders(draw: st.DrawFn) -> tuple[Order, int, list[LeafOrder]]:
    """An order, the first position that it knows, and its leaves."""
    leaves = draw(st.lists(leaf_orders, min_size=1, max_size=3))
    arguments: dict[str, Any] = draw(windows)
    kind = draw(st.sampled_from(["weights", "stages", "repetitions", "passes", "concat"]))
    order: Any
    if kind == "concat":
        return ConcatOrder([leaf.length for leaf in leaves]), 0, leaves
    if kind in ("repetitions", "passes"):
        times = [draw(st.sampled_from([0.7, 1.0, 2.5])) for _ in leaves]
        order = EpochBlendOrder(leaves, times, 9, repeat=kind == "repetitions", **arguments)
    elif kind == "stages":
        share = draw(st.sampled_from([0.0, 0.2]))
        stages = (
            WeightStage(0, (1.0, *(0.5 for _ in leaves[1:]))),
            WeightStage(draw(st.sampled_from([100, 4096])), (*(share for _ in leaves[1:]), 1.0), (1.0,) * len(leaves)),
            WeightStage(12_000, (1.0,) * len(leaves)),
        )
        order = BlendOrder(leaves, Stages(stages), 5, **arguments)
    else:
        order = BlendOrder(leaves, [draw(st.floats(0.001, 1)) for _ in leaves], 5, **arguments)
    if kind != "passes" and draw(st.booleans()):
        starts = tuple(draw(st.integers(0, 400)) for _ in leaves)
        return order.rebased(Rebase(1234, starts)), 1234, leaves
    return order, 0, leaves


@settings(max_examples=examples(30))
@given(made=orders(), data=st.data())
def test_it_is_the_inverse_of_going_through_the_order(made: Any, data: st.DataObject) -> None:
    order, first, leaves = made
    bounds = order.bounds(0)
    stop = min(STOP, bounds[1]) if isinstance(order, ConcatOrder) else STOP
    every = order.lookup(np.arange(first, stop))
    leaf = data.draw(st.integers(0, len(leaves) - 1))
    index = data.draw(st.integers(0, leaves[leaf].length - 1))
    expected = (np.flatnonzero((every.leaf == leaf) & (every.index == index)) + first).tolist()
    found = Occurrences(order, leaf, index)
    assert list(islice(found.between(0, stop), 6)) == expected[:6]
    low, high = sorted((data.draw(st.integers(first, stop)), data.draw(st.integers(first, stop))))
    inside = [position for position in expected if low <= position < high]
    assert list(islice(found.between(low, high, newest=True), 6)) == inside[::-1][:6]
    assert found.count(high) - found.before_rebase == sum(position < high for position in expected)


def test_what_was_shown_before_a_rebase_is_counted() -> None:
    leaves = [LeafOrder(10, 1), LeafOrder(20, 2)]
    order = BlendOrder(leaves, [1, 1], 0).rebased(Rebase(100, (45, 55)))
    found = Occurrences(order, 0, 3)
    streamed, _ = Leaves(leaves).lookup(np.zeros(45, dtype=np.int64), np.arange(45))
    assert found.before_rebase == int((streamed == 3).sum()) in (4, 5)
    assert found.count(50) == found.before_rebase and list(found.between(0, 100)) == []


@pytest.mark.parametrize("copies", [1, 3])
def test_all_cycles_are_inverted_at_once(copies: int) -> None:
    places = StreamPlaces(Leaves([LeafOrder(100, 1, copies)]), 0, 7)
    found = list(places.between(0, 300_000))
    assert len(found) == places.count(300_000) == 3000 and found == sorted(set(found))


def test_a_sample_of_a_billion_is_found_at_once() -> None:
    leaves = [LeafOrder(10**9, 1), LeafOrder(10**6, 2), LeafOrder(3, 4)]
    order = BlendOrder(leaves, [0.7, 0.3, 1e-6], 0, run=100, window=10_000)
    for leaf, index in ((0, 123_456_789), (1, 5), (2, 1)):
        began = time.process_time()
        found = Occurrences(order, leaf, index)
        times, last = found.count(10**12), list(islice(found.between(0, 10**12, newest=True), 10))
        assert time.process_time() - began < 1.0
        assert times == pytest.approx(10**12 * [0.7, 0.3, 1e-6][leaf] / leaves[leaf].length, rel=0.01, abs=2)
        assert all(row[:2] == (leaf, index) for row in order.lookup(np.array(last)).rows())
