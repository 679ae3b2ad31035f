"""Plans: positions cut into batches and chunks, any number of them at once, or ahead; lanes; lists of addresses."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.batching.digests import AddressList, set_digest
from energon_lite.batching.packing import ConcatSplit
from energon_lite.batching.padded import Fixed, LengthDifference
from energon_lite.batching.plan import ChunkPlan, FixedPlan, default_chunk_size, default_lanes, worlds_for
from energon_lite.batching.token_plan import PlansAhead, TokenPlan
from energon_lite.errors import UsageError
from energon_lite.order.orders import BlendOrder, ConcatOrder
from energon_lite.order.shuffle import LeafOrder


def test_the_rest_of_a_chunk_goes_to_the_next_of_its_lane_if_a_pass_with_pushback_ends() -> None:
    kinds = [{}, {"carries": True}, {"pushback": True}, {"carries": True, "pushback": True}]
    plans = [ChunkPlan(ConcatOrder([99]), 2, chunk=3, **kind) for kind in kinds]
    assert [plan.stride(6, is_endless=True) for plan in plans] == [0, 24, 24, 24]
    assert [plan.stride(6, is_endless=False) for plan in plans] == [0, 24, 6, 6]


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


sizes = st.integers(1, 5000)


@pytest.mark.parametrize("buffer", [None, 5])
def test_what_is_no_batch_and_no_chunk(buffer: int | None) -> None:
    with pytest.raises(UsageError, match="batch_size is 0"):
        FixedPlan(ConcatOrder([5]), 0)
    with pytest.raises(UsageError, match=r"chunk_size is 0\s+fix: +give an integer, at least 1$"):
        ChunkPlan(ConcatOrder([9]), batch_size=2, chunk=0, packing_buffer_size=buffer)
    with pytest.raises(UsageError, match=r"batch_size is 0\s+fix: +give at least 1, or None"):
        ChunkPlan(ConcatOrder([9]), batch_size=0, chunk=5)
    with pytest.raises(UsageError, match="chunk_size is 4, but packing_buffer_size 5"):
        ChunkPlan(ConcatOrder([9]), batch_size=2, chunk=4, packing_buffer_size=5)
    ChunkPlan(ConcatOrder([9]), batch_size=1, chunk=5, packing_buffer_size=buffer)


@given(batch_size=sizes | st.none(), buffer=sizes | st.none(), endless=st.booleans(), carries=st.booleans())
def test_a_chunk_is_whole_buffers_and_no_more_than_it_needs(
    batch_size: int | None, buffer: int | None, endless: bool, carries: bool
) -> None:
    size = default_chunk_size(batch_size, buffer, endless=endless, carries=carries)
    batches = 8 if carries else 32
    if buffer is None:
        assert size == batches * (batch_size or 32)
        return
    buffers, rest = divmod(size, buffer)
    assert buffers >= 1 and rest == 0
    if batch_size is None or not endless:
        assert buffers == 1
    else:
        assert size >= batches * batch_size and (buffers == 1 or (buffers - 1) * buffer < batches * batch_size)


@given(world=st.integers(1, 2000))
def test_a_run_on_any_ranks_can_grow_and_shrink(world: int) -> None:
    lanes = default_lanes(world)
    assert {1, 2, 3, 4, 6, 8, 12, 24, world, 2 * world} <= set(worlds_for(lanes))
    assert lanes <= 24 * world


def test_chunks_are_made_ahead_and_errors_come_when_they_are_due() -> None:
    made: list[int] = []

    def make(pass_number: int, number: int) -> int:
        made.append(number)
        if number == 9:
            raise UsageError("no")
        return number

    plans = PlansAhead(make)
    plans.prepare(0, 3)
    assert plans.get(0, 3) == 3 and plans.get(0, 3) == 3 and made == [3]
    plans.prepare(0, 9)
    with pytest.raises(UsageError):
        plans.get(0, 9)
    for number in range(10, 20):
        plans.get(0, number)
    assert len(plans._made) == 4


@given(st.lists(st.tuples(*[st.integers(0, 9)] * 3), max_size=9))
def test_it_is_the_list_of_its_addresses(rows: list[tuple[int, int, int]]) -> None:
    addresses = AddressList(rows, 5)
    assert addresses == rows and rows == addresses and addresses.digest == 5
    back = pickle.loads(pickle.dumps(addresses))
    assert back == rows and type(back) is AddressList and back.digest == 5
    assert set_digest([(0, 1, 0, 2, 5, 1)]) != set_digest([(0, 1, 0, 2, 6, 1)]), "longer parts"


def test_places_in_a_pass() -> None:
    """Its end is one; by tokens, any number of chunks may be between two places."""
    fixed = FixedPlan(ConcatOrder([10]), 5)
    assert [fixed.has(0, (number,)) for number in (0, 2, 3)] == [True, True, False]
    plan = TokenPlan(ConcatOrder([100]), Fixed(2), [np.ones(100, dtype=np.int64)], chunk=4)
    assert [plan.has(0, place) for place in ((24, 1), (24, 2), (25, 0), (25, 1))] == [True, False, True, False]
    assert plan.ahead(0, (0, 0), 49) == ((24, 1), 49) and plan.ahead(0, (24, 1), -49) == ((0, 0), -49)
    assert plan.ahead(0, (24, 0), 9) == ((25, 0), 2)
    assert [plan.undelivered(0, (1, batch)) for batch in (0, 1, 2)] == [4, 2, 0]


def test_chunks_by_tokens_by_hand() -> None:
    lengths = [np.array([4, 2])]
    assert TokenPlan(ConcatOrder([2]), ConcatSplit(3), lengths).make(0, 0).spans(0) == [(0, 0, 0, 0, 3, 1)]
    by_key = LengthDifference(2, 0, key="prompt")
    assert len(TokenPlan(ConcatOrder([2]), by_key, lengths, key_lengths=[np.array([5, 5])]).make(0, 0)) == 1
    shuffled = TokenPlan(ConcatOrder([50]), Fixed(2, order="random"), [np.ones(50, dtype=np.int64)])
    assert shuffled.make(0, 0).batches.digest() != shuffled.make(1, 0).batches.digest()
