"""Neighbours that are read by one call, and whether that pays."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from energon_lite.storage.files.shard_store import LocalFile
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


def test_a_shard_that_shrinks_while_it_is_read_is_no_death_of_the_process(tmp_path: Path) -> None:
    """Reads of a file that is cut give the bytes, zeros where it grew again, or nothing; a mapped file is a SIGBUS."""
    path, size = tmp_path / "shard", 1 << 20
    path.write_bytes(b"x" * size)
    shard, ends = LocalFile(str(path)), threading.Event()

    def cut_and_restore() -> None:
        with path.open("r+b") as file:
            while not ends.is_set():
                file.truncate(4096)
                file.truncate(size)

    starts = np.arange(0, size, 4096)[:, None]
    thread = threading.Thread(target=cut_and_restore)
    thread.start()
    try:
        found = [fetch_neighbours(shard, starts, starts + 4096) for _ in range(100)]
    finally:
        ends.set()
        thread.join()
    # A page may change while it is copied.
    assert all(rows is None or {*b"".join(rows[0])} <= {*b"x\0"} for rows in found)
    assert all(rows is None or {*map(len, rows[0])} == {4096} for rows in found)
    path.write_bytes(b"x" * 4096)
    assert fetch_neighbours(shard, starts, starts + 4096) is None


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
