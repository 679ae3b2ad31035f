"""Large results in memory that both sides see: nothing is overwritten that somebody looks into, and nothing stays."""

from __future__ import annotations

import gc
import multiprocessing
import os
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.loading.executors.segments import SegmentReader, Segments, SegmentWriter
from energon_lite.loading.executors.transport import pack, send
from tests.testing import descriptors, received

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="the system has no such memory")


class Pair:
    """Trainer and worker in one process."""

    def __init__(self, count: int = 3):
        segments = Segments(count)
        self.ours, self.theirs = multiprocessing.Pipe()
        self.reader, self.writer = SegmentReader(segments), SegmentWriter(segments)

    def travel(self, value: Any) -> Any:
        self.writer.release(self.reader.take_released())
        send(self.theirs, pack(value), self.writer)
        return received(self.ours, self.reader)


@given(kept=st.lists(st.tuples(st.integers(1, 60_000), st.booleans()), max_size=30))
def test_what_is_kept_is_not_overwritten(kept: list[tuple[int, bool]]) -> None:
    pair = Pair()
    held: list[tuple[int, int, Any]] = []
    for number, (length, keep) in enumerate(kept):
        value = {"x": torch.full((length,), number, dtype=torch.int32), "y": [torch.tensor(number)], "z": b"raw" * 9}
        if len(held) == 3:
            held.pop(0)
        again = pair.travel(value)
        assert again["z"] == value["z"] and (length < 9_000 or again["x"].data_ptr() % 64 == 0)
        if keep:
            held.append((number, length, again["x"]))
        del again
        for mark, size, tensor in held:
            assert tensor.shape == (size,) and bool((tensor == mark).all())


def test_a_view_of_a_view_keeps_its_segment() -> None:
    pair = Pair(1)
    part = pair.travel([torch.arange(50_000)])[0][10:20].view(torch.uint8)
    gc.collect()
    assert pair.reader.take_released() == []
    in_the_pipe, sent = [torch.zeros(9_000, dtype=torch.uint8)], pair.travel  # no free segment: through the pipe
    # A pipe holds little, so the message must be small enough for it, and large enough to want a segment.
    pair.writer.worth = 1
    assert torch.equal(sent(in_the_pipe)[0], in_the_pipe[0])
    assert torch.equal(part.view(torch.int64), torch.arange(10, 20))
    del part
    assert pair.reader.take_released() == [0]


def test_bytes_are_copied_and_the_segment_is_free_at_once() -> None:
    pair = Pair(1)
    for number in range(5):
        data = bytes([number]) * 100_000
        assert pair.travel([data]) == [data]


def test_few_segments_are_used_if_few_are_needed() -> None:
    pair = Pair(6)
    for _ in range(20):
        pair.travel([torch.zeros(100_000)])
    assert sum(size > 0 for size in pair.writer._sizes) == 1


def test_descriptors_are_closed() -> None:
    before = descriptors()
    pair = Pair()
    kept = pair.travel([torch.arange(100_000)])[0]
    pair.reader.close()
    pair.ours.close()
    pair.theirs.close()
    assert len(descriptors() - before) <= 1  # the map of what is kept has one
    assert torch.equal(kept, torch.arange(100_000))
    del kept
    assert not descriptors() - before
