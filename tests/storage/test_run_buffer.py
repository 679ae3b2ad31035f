"""Samples that are read in runs are the samples that are read one by one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite.errors import MissingShardError
from energon_lite.storage.read import run_buffer as run_shelf
from energon_lite.storage.read.part_columns import PartColumns
from energon_lite.storage.read.run_buffer import RunBuffer, Runs, Scratch, Usage
from energon_lite.storage.read.webdataset import WebdatasetSource

FOREVER = 10**9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, write_dataset: Callable[..., Path]) -> Path:
    """Shards of 17, 1 and 30 samples; some are left out, a few have other parts, keys are not all ASCII."""
    samples = [
        (f"k{n}" if n % 5 else f"ü{n}", {"txt": b"t" * (n % 4), "bin": bytes([n]) * (300 + 3 * n)}) for n in range(48)
    ]
    for n in (33, 34, 40):
        samples[n][1]["extra"] = b"more"
    path = tmp_path_factory.mktemp("shelf") / "data"
    shards = {"a.tar": samples[:17], "b.tar": samples[17:18], "c.tar": samples[18:]}
    return write_dataset(path, shards, exclude=["a.tar/k3", "c.tar/ü20", "c.tar/k21"])


def opened(folder: Path, runs: Runs | None) -> WebdatasetSource:
    source = WebdatasetSource.open(folder)
    source.runs = runs
    return source


@pytest.fixture(autouse=True)
def own_shelf(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_shelf._threads, "shelf", None, raising=False)


@settings(max_examples=examples(150))
@given(
    length=st.integers(2, 20),
    memory=st.integers(1, 400_000),
    parts=st.sampled_from([None, frozenset({"bin"}), frozenset({"txt", "bin"}), frozenset({"extra"}), frozenset()]),
    wanted=st.lists(st.lists(st.integers(0, 44), min_size=1, max_size=8), max_size=12),
    by_columns=st.booleans(),
)
def test_the_same_as_one_by_one(
    folder: Path, length: int, memory: int, parts: frozenset[str] | None, wanted: list[list[int]], by_columns: bool
) -> None:
    run_shelf._threads.shelf = None
    plain = opened(folder, None)
    reader = PartColumns(opened(folder, Runs(length, FOREVER, memory)), parts)
    for indices in wanted:
        expected = [plain.read(index, parts) for index in indices]
        found = reader.read(indices) if by_columns else None
        if found is None:
            assert [reader.sample(index) for index in indices] == expected
        else:
            assert found.keys == [raw.key for raw in expected]
            assert found.shards == [raw.source.shard_name for raw in expected]
            rows = list(zip(*found.parts.values(), strict=True)) if found.parts else [()] * len(indices)
            assert [dict(zip(found.names, row, strict=True)) for row in rows] == [raw.parts for raw in expected]


def reads_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each call that reads from a shard; how many buffers' worth is not told apart."""
    calls: list[int] = []
    preadv, pread = os.preadv, os.pread
    monkeypatch.setattr(os, "preadv", lambda fd, memory, at: calls.append(at) or preadv(fd, memory, at))
    monkeypatch.setattr(os, "pread", lambda fd, size, at: calls.append(at) or pread(fd, size, at))
    return calls


def test_every_epoch_reads_a_run_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = opened(folder, Runs(15, FOREVER, 1 << 20))  # samples 0 to 14 lie in one shard
    reader = PartColumns(source, None)
    reader.sample(14)
    calls = reads_of(monkeypatch)
    for _ in range(3):
        for index in range(14, -1, -1):
            reader.sample(index)
    # The first sample of an epoch is not told from one that is wanted twice before most of the run was handed out.
    assert len(calls) <= 6


def test_where_runs_are_not_alike_nothing_is_read_twice(
    write_dataset: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = [(f"k{n}", {"txt" if n < 8 else "md": b"x" * 200}) for n in range(16)]
    reader = PartColumns(opened(write_dataset(tmp_path / "data", {"a.tar": samples}), Runs(8, FOREVER, 1 << 20)), None)
    calls = reads_of(monkeypatch)
    assert reader.read([0, 1, 9, 2]) is None
    calls.clear()
    for index in (0, 1, 9, 2):
        assert reader.sample(index).key == f"k{index}"
    assert not calls


def test_what_was_handed_out_is_not_kept(folder: Path) -> None:
    import gc
    import sys

    source = opened(folder, Runs(15, FOREVER, 1 << 20))
    reader = PartColumns(source, None)
    data = reader.sample(9).parts["bin"]
    gc.collect()
    assert sys.getrefcount(data) == 2


def test_where_others_want_most_of_each_run_samples_are_read_one_by_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_shelf, "_WORTH", 2000)  # as if samples were large
    reader = PartColumns(opened(folder, Runs(2, 5, 1 << 15)), None)
    plain = opened(folder, None)
    for index in [*range(0, 45, 2)] * 6:  # one sample of each run, again and again
        assert reader.sample(index) == plain.read(index)
    assert reader._runs is None
    monkeypatch.setattr(run_shelf, "_WORTH", 1 << 20)
    reader = PartColumns(opened(folder, Runs(2, 5, 1 << 15)), None)
    for index in [*range(0, 45)] * 6:
        assert reader.sample(index) == plain.read(index)
    assert reader._runs is not None


def test_a_shard_that_is_gone_fails_its_own_samples_only(write_dataset: Callable[..., Path], tmp_path: Path) -> None:
    samples = [(f"k{n}", {"txt": b"%d" % n}) for n in range(12)]
    path = write_dataset(tmp_path / "data", {"a.tar": samples[:6], "b.tar": samples[6:]})
    reader = PartColumns(opened(path, Runs(12, FOREVER, 1 << 20)), None)
    (path / "b.tar").unlink()
    for index in range(6):
        assert reader.sample(index).parts == {"txt": b"%d" % index}
    for index in range(6, 12):
        with pytest.raises(MissingShardError, match=r"b\.tar"):
            reader.sample(index)


# -- the shelf by itself ---------------------------------------------------------------------------------------------


@given(st.integers(1, 100), st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(1, 40)), max_size=60))
def test_the_newest_runs_that_fit_are_kept(size: int, puts: list[tuple[int, int, int]]) -> None:
    shelf, usage = RunBuffer(size), Usage(Runs(1, 1, size), 1.0)
    kept: list[tuple[int, int, int]] = []
    for owner, number, bytes_ in puts:
        if number in shelf.runs(owner):
            shelf.drop(owner, number)
            kept = [one for one in kept if one[:2] != (owner, number)]
        shelf.put(owner, number, [None], bytes_, usage)
        kept.append((owner, number, bytes_))
        while len(kept) > 1 and sum(one[2] for one in kept) > size:
            kept.pop(0)
        assert {(o, n) for o in range(3) for n in shelf.runs(o)} == {one[:2] for one in kept}


class Shard:
    """Byte i of the shard is i % 251; reads give at most 7 bytes."""

    def __init__(self, size: int):
        self.data = bytes(i % 251 for i in range(size))

    def read_into(self, memory: memoryview, offset: int) -> int:
        got = self.data[offset : offset + min(7, len(memory))]
        memory[: len(got)] = got
        return len(got)


def test_scratch_reads_all_or_nothing() -> None:
    scratch, shard = Scratch(100), Shard(130)
    memory = scratch.read(shard, 40, 90)
    assert memory is not None and memory[:90] == shard.data[40:]
    assert scratch.read(shard, 41, 90) is None


def test_one_shelf_a_thread_that_grows_and_none_after_a_fork() -> None:
    small = run_shelf.shelf_of_this_thread(10)
    assert run_shelf.shelf_of_this_thread(5) is small
    assert run_shelf.shelf_of_this_thread(small.size + 1).size == small.size + 1
    child = os.fork()
    if not child:
        os._exit(int(run_shelf._threads.shelf is not None))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
