"""What a chunk may be, its default length, and the default number of lanes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.batching.plan import ChunkPlan, default_chunk_size, default_lanes, worlds_for
from energon_lite.errors import UsageError
from energon_lite.order.orders import ConcatOrder

sizes = st.integers(1, 5000)


@pytest.mark.parametrize("buffer", [None, 5])
def test_what_is_no_chunk(buffer: int | None) -> None:
    with pytest.raises(UsageError, match=r"chunk_size is 0\s+fix: +give at least 1$"):
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
