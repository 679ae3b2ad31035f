"""The default length of a chunk."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from energon_lite.batching.chunks import default_chunk_size

sizes = st.integers(1, 5000)


@given(batch_size=sizes | st.none(), buffer=sizes | st.none(), endless=st.booleans())
def test_a_chunk_is_whole_buffers_and_no_more_than_it_needs(
    batch_size: int | None, buffer: int | None, endless: bool
) -> None:
    size = default_chunk_size(batch_size, buffer, endless=endless)
    if buffer is None:
        assert size == 32 * (batch_size or 32)
        return
    buffers, rest = divmod(size, buffer)
    assert buffers >= 1 and rest == 0
    if batch_size is None or not endless:
        assert buffers == 1
    else:
        assert size >= 32 * batch_size and (buffers == 1 or (buffers - 1) * buffer < 32 * batch_size)
