"""The plan of fixed batches: positions cut into equal pieces, any number of them at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.batching.plan import FixedPlan
from energon_lite.errors import UsageError
from energon_lite.order.orders import BlendOrder, ConcatOrder
from energon_lite.order.shuffle import LeafOrder


@given(length=st.integers(0, 60), batch_size=st.integers(1, 9), drop_last=st.booleans())
def test_a_finite_order_is_cut_without_loss(length: int, batch_size: int, drop_last: bool) -> None:
    plan = FixedPlan(ConcatOrder([length]), batch_size, drop_last=drop_last)
    count = plan.count(0)
    assert count is not None
    rows = [[index for _, index, _ in batch] for batch in plan.batches([(number,) for number in range(count)])]
    kept = length // batch_size * batch_size if drop_last else length
    assert [index for batch in rows for index in batch] == list(range(kept))
    assert all(len(batch) == batch_size for batch in rows[:-1])


@given(
    numbers=st.lists(st.integers(0, 2**50), min_size=1, max_size=20), batch_size=st.one_of(st.none(), st.integers(1, 9))
)
def test_batches_do_not_depend_on_which_are_asked_for_together(numbers: list[int], batch_size: int | None) -> None:
    order = BlendOrder([LeafOrder(30, 1), LeafOrder(7, 2)], [1.0, 2.0], key=3)
    plan = FixedPlan(order, batch_size)
    assert plan.count(0) is None
    together = plan.batches([(number,) for number in numbers])
    assert together == [plan.batches([(number,)])[0] for number in numbers]
    assert all(len(batch) == (batch_size or 1) for batch in together)


def test_passes_repeat_or_go_on() -> None:
    same = FixedPlan(ConcatOrder([10]), 5)
    other = FixedPlan(BlendOrder([LeafOrder(10, 1)], [1.0], key=3, length=10), 5)
    assert same.batches([(0,), (1,)], 0) == same.batches([(0,), (1,)], 7)
    epochs = [[row for batch in other.batches([(0,), (1,)], number) for row in batch] for number in (0, 1)]
    assert {epoch for _, _, epoch in epochs[0]} == {0} and {epoch for _, _, epoch in epochs[1]} == {1}


def test_batches_of_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match="batch_size is 0"):
        FixedPlan(ConcatOrder([5]), 0)
