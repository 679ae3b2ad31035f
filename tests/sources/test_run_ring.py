from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from energon_lite.sources.run_ring import RunRing, ring_of_this_thread


class Shard:
    """Byte i of the shard is i % 251; reads give at most 7 bytes."""

    def __init__(self, size: int):
        self.data = bytes(i % 251 for i in range(size))

    def read_into(self, memory: memoryview, offset: int) -> int:
        got = self.data[offset : offset + min(7, len(memory))]
        memory[: len(got)] = got
        return len(got)


@given(
    size=st.integers(1, 100),
    wanted=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40)), max_size=60),
)
def test_what_is_found_is_what_was_read(size: int, wanted: list[tuple[int, int]]) -> None:
    ring, shard = RunRing(size), Shard(1000)
    sizes: dict[int, int] = {}
    for number, length in wanted:
        at = ring.find(number)
        if at is None:
            sizes[number] = length
            at = ring.load(number, shard, number * 100, length)
            assert (at is None) == (length > size)
        for key in range(10):
            begin = ring.find(key)
            if begin is not None:
                assert ring.memory[begin : begin + sizes[key]] == shard.data[key * 100 : key * 100 + sizes[key]]


def test_the_newest_pieces_are_kept() -> None:
    ring, shard = RunRing(100), Shard(1000)
    for number in range(20):
        ring.load(number, shard, 0, 24)
        assert [key for key in range(20) if ring.find(key) is not None] == list(range(max(0, number - 3), number + 1))


def test_a_shard_that_is_too_short() -> None:
    ring = RunRing(100)
    assert ring.load(1, Shard(30), 20, 20) is None and ring.find(1) is None


def test_one_ring_a_thread_that_grows() -> None:
    small = ring_of_this_thread(10)
    assert ring_of_this_thread(5) is small
    assert len(ring_of_this_thread(len(small) + 1)) == len(small) + 1
