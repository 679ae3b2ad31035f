"""Neighbours that are read by one call, and whether that pays."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from energon_lite.storage.read.runs import Usage, fetch_neighbours
from energon_lite.storage.read.webdataset import Runs


class Shard:
    """Byte i of the shard is i % 251; reads give at most 7 bytes."""

    def __init__(self, size: int, most: int = 7):
        self.most = most
        self.data = bytes(i % 251 for i in range(size))

    def read_into(self, memory: memoryview, offset: int) -> int:
        got = self.data[offset : offset + min(self.most, len(memory))]
        memory[: len(got)] = got
        return len(got)


def test_neighbours_are_read_whole_or_not_at_all() -> None:
    shard = Shard(130)
    starts, stops = np.array([[40, 50], [60, 129]]), np.array([[50, 51], [60, 130]])
    found = fetch_neighbours(shard, starts, stops)
    assert found == [[shard.data[40:50], b""], [shard.data[50:51], shard.data[129:]]]
    assert fetch_neighbours(shard, starts, stops + 1) is None
    assert fetch_neighbours(shard, starts[:, :0], stops[:, :0]) == []


def test_threads_do_not_read_into_the_same_memory() -> None:
    shard, places = Shard(200_000, 5000), np.arange(0, 199_000, 1000)[:, None]
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(fetch_neighbours, shard, places + at, places + at + 100) for at in range(200)]
        for at, job in enumerate(jobs):
            assert job.result() == [[shard.data[place + at : place + at + 100] for place in places[:, 0].tolist()]]


def test_runs_that_others_want_do_not_pay() -> None:
    usage = Usage(Runs(50, 500), mean_bytes=6000)
    usage.read, usage.wanted = 2399, 0
    assert usage.pays  # too early to say
    usage.read, usage.wanted = 4600, 2000
    assert usage.pays  # half of what was read before the present window
    usage.wanted = 1900
    assert not usage.pays
