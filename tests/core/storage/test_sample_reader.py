"""Samples that are read in runs are the samples that are read one by one; neighbours that are read by one call."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite.errors import MissingShardError
from energon_lite.storage.read import runs, sample_reader
from energon_lite.storage.read.runs import Usage, fetch_neighbours
from energon_lite.storage.read.sample_reader import SampleReader
from energon_lite.storage.read.webdataset import Runs, WebdatasetSource
from tests.testing import calls_here, examples, write_dataset

FOREVER = 10**9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of 17, 1 and 30 samples; some are left out, a few have other parts, keys are not all ASCII."""
    samples = [
        (f"k{n}" if n % 5 else f"ü{n}", {"txt": b"t" * (n % 4), "bin": bytes([n]) * (300 + 3 * n)}) for n in range(48)
    ]
    for n in (33, 34, 40):
        samples[n][1]["extra"] = b"more"
    path = tmp_path_factory.mktemp("runs") / "data"
    shards = {"a.tar": samples[:17], "b.tar": samples[17:18], "c.tar": samples[18:]}
    return write_dataset(path, shards, exclude=["a.tar/k3", "c.tar/ü20", "c.tar/k21"])


def opened(folder: Path, runs: Runs | None) -> WebdatasetSource:
    source = WebdatasetSource.open(folder)
    source.runs = runs
    return source


@settings(max_examples=examples(150))
@given(
    length=st.integers(2, 20),
    window=st.integers(0, 60),
    largest=st.integers(1, 60_000),
    parts=st.sampled_from([None, frozenset({"bin"}), frozenset({"txt", "bin"}), frozenset({"extra"}), frozenset()]),
    wanted=st.lists(st.lists(st.integers(0, 44), min_size=1, max_size=8), max_size=12),
    by_columns=st.booleans(),
)
def test_the_same_as_one_by_one(
    folder: Path,
    length: int,
    window: int,
    largest: int,
    parts: frozenset[str] | None,
    wanted: list[list[int]],
    by_columns: bool,
) -> None:
    plain = SampleReader(opened(folder, None), parts)
    reader = SampleReader(opened(folder, Runs(length, window)), parts)
    reader._usage._mean_bytes = 0  # it always pays
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_reader, "LARGEST_READ", largest)
        for indices in wanted:
            expected = [plain.sample(index) for index in indices]
            found = reader.read(indices) if by_columns else None
            if found is None:
                assert [reader.sample(index) for index in indices] == expected
                continue
            assert found.keys == [raw.key for raw in expected]
            assert found.shards == [raw.source.shard_name for raw in expected]
            rows = list(zip(*found.parts.values(), strict=True)) if found.parts else [()] * len(indices)
            assert [dict(zip(found.names, row, strict=True)) for row in rows] == [raw.parts for raw in expected]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grows with each call of this thread that reads from a shard; how many buffers' worth is not told apart."""
    return calls_here(monkeypatch, os, "preadv", "pread")


def test_every_epoch_reads_a_run_once(folder: Path, reads: list[Any]) -> None:
    reader = SampleReader(opened(folder, Runs(15, FOREVER)), None)  # samples 0 to 14 lie in one shard
    reader.sample(14)
    reads.clear()
    for _ in range(3):
        for index in range(14, -1, -1):
            reader.sample(index)
    assert not reads  # no other run took its place


def test_where_runs_are_not_alike_nothing_is_read_twice(tmp_path: Path, reads: list[Any]) -> None:
    samples = [(f"k{n}", {"txt" if n < 8 else "md": b"x" * 200}) for n in range(16)]
    reader = SampleReader(opened(write_dataset(tmp_path / "data", {"a.tar": samples}), Runs(8, FOREVER)), None)
    assert reader.read([0, 1, 9, 2]) is None
    reads.clear()
    for index in (0, 1, 9, 2):
        assert reader.sample(index).key == f"k{index}"
    assert not reads


def test_the_runs_of_a_window_are_kept_and_no_more(folder: Path, reads: list[Any]) -> None:
    reader = SampleReader(opened(folder, Runs(2, 8)), None)
    for index in (0, 17, 30):
        SampleReader(opened(folder, None), None).sample(index)  # a shard's first read also looks at its beginning
    reads.clear()
    for index in [*range(16), *range(16)]:
        assert reader.sample(index).parts["bin"]
        assert len(reader._kept) <= 8
    once = len(reads)
    reader.sample(30)
    reader.sample(0)  # it had to go for the run of the other
    assert len(reads) == once + 2


def test_where_others_want_most_of_each_run_samples_are_read_one_by_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "_WORTH", 2000)  # as if samples were large
    reader = SampleReader(opened(folder, Runs(2, 5)), None)
    plain = opened(folder, None)
    for index in [*range(0, 45, 2)] * 6:  # one sample of each run, again and again
        assert reader.sample(index) == SampleReader(plain).sample(index)
    assert reader._runs is None and not reader._kept
    monkeypatch.setattr(runs, "_WORTH", 1 << 20)
    reader = SampleReader(opened(folder, Runs(2, 5)), None)
    for index in [*range(0, 45)] * 6:
        assert reader.sample(index) == SampleReader(plain).sample(index)
    assert reader._runs is not None


def test_a_shard_that_is_gone_fails_its_own_samples_only(tmp_path: Path) -> None:
    samples = [(f"k{n}", {"txt": b"%d" % n}) for n in range(12)]
    path = write_dataset(tmp_path / "data", {"a.tar": samples[:6], "b.tar": samples[6:]})
    reader = SampleReader(opened(path, Runs(12, FOREVER)), None)
    (path / "b.tar").unlink()
    for index in range(6):
        assert reader.sample(index).parts == {"txt": b"%d" % index}
    for index in range(6, 12):
        with pytest.raises(MissingShardError, match=r"b\.tar"):
            reader.sample(index)


# -- runs by themselves


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
