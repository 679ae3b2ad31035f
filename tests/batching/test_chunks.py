"""The default length of a chunk, and the default number of lanes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from energon_lite.batching.chunks import default_chunk_size, default_lanes, worlds_for

sizes = st.integers(1, 5000)


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
