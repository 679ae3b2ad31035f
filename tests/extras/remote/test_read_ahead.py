"""Read-ahead: the same bytes with fewer requests, whatever is kept; ranks of one machine fetch each byte once."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite import Reading, WorkerConfig, get_savable_loader, get_train_dataset
from energon_lite.errors import ShardChangedError, UsageError
from energon_lite.extras.remote import checked_folder, read_ahead
from energon_lite.extras.remote.read_ahead import RangeCache, RunReader
from energon_lite.storage.files.shard_store import ShardRange, ShardStore
from energon_lite.storage.prepare import prepare_dataset
from energon_lite.storage.read.ranges import ReadAhead
from energon_lite.storage.read.runs import read_in_runs
from energon_lite.storage.read.sample_reader import SampleReader, fetch_samples
from energon_lite.storage.read.webdataset import Runs, WebdatasetSource
from tests.extras.remote.stored_files import files_in, parts_of, size_of
from tests.servers import Ranges
from tests.testing import examples


@pytest.fixture
def source(ten: Path) -> WebdatasetSource:
    prepare_dataset(ten, split_ratio="1,0,0")
    return WebdatasetSource.open(ten)


@pytest.fixture
def requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """What the store is asked for by this test: shard, start, size."""
    made: list[tuple[str, int, int]] = []
    read = ShardStore.read
    monkeypatch.setattr(read_ahead, "_shared", {})

    def counting(self: ShardStore, path: str, identity: object, offset: int, size: int) -> bytes:
        if path.startswith(str(tmp_path)):
            made.append((os.path.basename(path), offset, size))
        return read(self, path, identity, offset, size)  # type: ignore[arg-type]

    monkeypatch.setattr(ShardStore, "read", counting)
    return made


def ranges_of(source: WebdatasetSource) -> list[ShardRange]:
    """Of each sample, where it is read by itself."""
    return [one for index in range(10) for one in RunReader(source, None).ranges(index)]


def test_a_run_is_one_request(source: WebdatasetSource, requests: list[tuple[str, int, int]]) -> None:
    plain, some = parts_of(source), (2, 0, 3, 1)
    requests.clear()
    read_in_runs([source], ReadAhead(), run=4, window=8)
    assert parts_of(source, some) == [plain[index] for index in some]
    # From the first payload (512) to the end of the last (each sample: two members of 1,024 bytes).
    assert requests == [("a.tar", 512, 7 * 1024 + 1)]
    assert parts_of(source, range(4, 10)) == plain[4:]
    # Samples 4-6 are in b.tar, 7 begins c.tar, 8 and 9 are the last run.
    assert [(name, size // 1024) for name, _, size in requests[1:]] == [("b.tar", 5), ("c.tar", 1), ("c.tar", 3)]


def test_only_wanted_parts_are_fetched(
    make_tar: Callable[..., Path], tmp_path: Path, requests: list[tuple[str, int, int]]
) -> None:
    members = []
    for key in "01":
        members += [(f"{key}.json", b"{}"), (f"{key}.mp4", key.encode() * (1 << 19)), (f"{key}.txt", b"")]
    make_tar("d/a.tar", members)
    prepare_dataset(tmp_path / "d", split_ratio="1,0,0")
    source = WebdatasetSource.open(tmp_path / "d")
    read_in_runs([source], ReadAhead(), run=2, window=2)
    requests.clear()
    reader = SampleReader(source, frozenset(["json", "txt"]))
    assert [reader.sample(index).parts for index in (1, 0)] == [{"json": b"{}", "txt": b""}] * 2
    assert [size for _, _, size in requests] == [2, 2]
    assert SampleReader(source).sample(1).parts["mp4"] == b"1" * (1 << 19)


@settings(max_examples=examples(30))
@given(
    order=st.lists(st.integers(0, 9), min_size=1, max_size=30),
    length=st.integers(1, 11),
    memory=st.sampled_from([1, 3000, 1 << 20]),
    largest=st.sampled_from([1, 2500, 1 << 20]),
    folder=st.sampled_from([None, 1, 4000, 1 << 20]),
    jobs=st.integers(1, 5),
    by_columns=st.booleans(),
)
def test_the_same_bytes(source: WebdatasetSource, tmp_path: Path, order: list[int], jobs: int, **how: Any) -> None:
    source.read_ahead = source.runs = None
    plain, folder = [SampleReader(source).sample(index) for index in range(10)], how["folder"]
    place = None if folder is None else str(tmp_path / f"cache-{folder}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read_ahead, "_LARGEST", how["largest"])
        patch.setattr(read_ahead, "_shared", {})
        source.read_ahead, source.runs = ReadAhead(how["memory"], 3, place, folder or 1), Runs(how["length"])
        reader = SampleReader(source)
        for start in range(0, len(order), jobs):
            job = order[start : start + jobs]
            fetch_samples((reader, index) for index in job)
            if how["by_columns"]:
                columns = reader.read(job)
                assert columns is not None and columns.keys == [plain[index].key for index in job]
                assert columns.parts["txt"] == [plain[index].parts["txt"] for index in job]
            assert [reader.sample(index) for index in job] == [plain[index] for index in job]


def test_requests_of_a_job_are_made_at_the_same_time(source: WebdatasetSource, monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(3, timeout=30)
    read = ShardStore.read

    def waiting(self: ShardStore, *arguments: object) -> bytes:
        together.wait()
        return read(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(ShardStore, "read", waiting)
    monkeypatch.setattr(read_ahead, "_shared", {})
    source.read_ahead = ReadAhead(requests=3, hedge=False)
    reader = SampleReader(source)
    fetch_samples((reader, index) for index in (0, 5, 9))  # hangs if they came one after the other
    assert [reader.sample(index).parts["txt"] for index in (0, 5, 9)] == [b"text 0", b"text 5", b"text 9"]


def test_memory_is_bounded(source: WebdatasetSource) -> None:
    cache = RangeCache(ReadAhead(memory_bytes=2500))
    for one in ranges_of(source):
        cache.get(one)
        assert sum(data.nbytes for data in cache._kept.values()) == cache._bytes <= 2500
    assert len(cache._kept) == 2
    tiny = RangeCache(ReadAhead(memory_bytes=1))
    assert bytes(tiny.get(one)) == bytes(cache.get(one)) and [*tiny._kept] == [one]  # one stays, whatever its size


def test_a_folder_is_shared_and_bounded(
    source: WebdatasetSource, tmp_path: Path, requests: list[tuple[str, int, int]]
) -> None:
    chosen = ReadAhead(folder=str(tmp_path / "cache"), folder_bytes=4000)
    ranges = ranges_of(source)
    one, other = RangeCache(chosen), RangeCache(chosen)
    assert bytes(one.get(ranges[0])) == bytes(other.get(ranges[0])) == bytes(RangeCache(chosen).get(ranges[0]))
    assert len(requests) == 1
    for wanted in ranges:
        one.get(wanted)
    kept = files_in(tmp_path / "cache")
    assert len(kept) >= 2 and size_of(kept) <= 4000


def test_ranges_of_a_folder_are_mapped_without_open_files(source: WebdatasetSource, tmp_path: Path) -> None:
    chosen = ReadAhead(folder=str(tmp_path / "cache"))
    ranges = ranges_of(source)
    first, second = RangeCache(chosen), RangeCache(chosen)
    fetched = [bytes(first.get(wanted)) for wanted in ranges]
    assert [bytes(second.get(wanted)) for wanted in ranges] == fetched
    open_files = {os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")}
    assert len(second._kept) == 10 and not any(path.startswith(str(tmp_path / "cache")) for path in open_files)


def test_a_folder_that_cannot_be_written(
    source: WebdatasetSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = RangeCache(ReadAhead(folder=str(tmp_path / "cache")))

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checked_folder, "replacing", full)
    for number, one in enumerate(ranges_of(source)):
        assert bytes(cache.get(one)).startswith(b"text %d" % number)
    assert caplog.text.count("No space left") == 1


def test_a_window_that_does_not_fit_is_not_fetched_in_runs(
    source: WebdatasetSource, caplog: pytest.LogCaptureFixture
) -> None:
    read_in_runs([source], None, run=4, window=8)
    assert source.read_ahead is None, "local sources are read directly unless asked"
    read_in_runs([source], ReadAhead(memory_bytes=4000), run=4, window=8)
    assert source.read_ahead is not None and source.runs == Runs(1)
    assert "raise memory_bytes" in caplog.text
    read_in_runs([source], ReadAhead(memory_bytes=4000, folder="unused"), run=4, window=8)
    assert source.runs == Runs(4)
    with pytest.raises(UsageError, match="requests is 0"):
        ReadAhead(requests=0)


def test_errors_come_with_the_read_and_survive_pickling(source: WebdatasetSource, ten: Path) -> None:
    read_ahead._shared.clear()
    read_in_runs([source], ReadAhead(), run=4, window=8)
    again = pickle.loads(pickle.dumps(source))
    assert again.runs == Runs(4) and parts_of(again, [9]) == parts_of(source, [9])
    source.store.close()
    path = ten / "a.tar"
    path.write_bytes(b"x" + path.read_bytes()[1:])
    fetch_samples((SampleReader(source), index) for index in (0, 5))
    assert SampleReader(source).sample(5).parts["cls"] == b"5"
    with pytest.raises(ShardChangedError, match=r"a\.tar"):
        SampleReader(source).sample(0)


# -- ranks that share what they read -----------------------------------------------------------------------------------


SAMPLES = 96


class Counted(Ranges):
    """Names versions, as object stores do, and counts how often each byte of a shard is asked for."""

    protocol_version = "HTTP/1.1"

    def __init__(self, *arguments: Any, counts: dict[str, np.ndarray], lock: threading.Lock, **options: Any):
        self.counts, self.lock = counts, lock
        super().__init__(*arguments, **options)

    def end_headers(self) -> None:
        self.send_header("ETag", '"first"')
        super().end_headers()

    def do_GET(self) -> None:
        wanted, name = self.asked.match(self.headers.get("Range", "")), self.path.rsplit("/", 1)[-1]
        if wanted is not None and name in self.counts:
            with self.lock:
                self.counts[name][int(wanted[1]) : int(wanted[2]) + 1] += 1
        super().do_GET()


Served = tuple[str, dict[str, np.ndarray]]


@pytest.fixture
def served(serve: Callable[..., str], make_tar: Any, tmp_path: Path) -> Served:
    """URL of a data set of four shards, and how often each of their bytes has been asked for."""
    for shard in range(4):
        numbers = range(shard * SAMPLES // 4, (shard + 1) * SAMPLES // 4)
        make_tar(f"data/{shard}.tar", [(f"{number:04d}.txt", b"%04d" % number * 500) for number in numbers])
    prepare_dataset(tmp_path / "data", split_ratio="1,0,0", sample_type="TextSample", field_map={"text": "txt"})
    counts = {path.name: np.zeros(path.stat().st_size, int) for path in (tmp_path / "data").glob("*.tar")}
    return f"{serve(Counted, counts=counts, lock=threading.Lock())}/data", counts


def _rank(url: str, rank: int, world: int, folder: str | None, tell: Callable[[list[str]], None], start: Any) -> None:
    start.wait()
    how: dict[str, Any] = {"batch_size": 2, "shuffle_buffer_size": 24, "max_samples_per_sequence": 12}
    reading = Reading(read_ahead=ReadAhead(folder=folder, hedge=False))
    dataset = get_train_dataset(url, worker_config=WorkerConfig(rank, world), reading=reading, **how)
    start.wait()
    start.wait()
    with get_savable_loader(dataset) as loader:
        batches = [batch.__key__ for _, batch in zip(range(SAMPLES // 2 // world), loader, strict=False)]
    tell([key for keys in batches for key in keys])


@pytest.mark.slow
@pytest.mark.parametrize(("world", "shares"), [(2, True), (4, True), (2, False)])
def test_each_byte_is_fetched_once(served: Served, tmp_path: Path, world: int, shares: bool) -> None:
    url, counts = served
    folder = str(tmp_path / "ranges") if shares else None
    processes = multiprocessing.get_context("fork")
    keys, start = processes.Queue(), processes.Barrier(world + 1, timeout=120)
    ranks = [processes.Process(target=_rank, args=(url, rank, world, folder, keys.put, start)) for rank in range(world)]
    for process in ranks:
        process.start()
    start.wait()  # all are forked before the server's threads have anything to do
    start.wait()
    for count in counts.values():  # of what each rank looks at to know the data
        count[:] = 0
    start.wait()
    read = [key for _ in ranks for key in keys.get(timeout=120)]
    for process in ranks:
        process.join()
    assert len(read) == len({*read}) == SAMPLES
    # Each rank compares the first block of each shard with the one that was prepared.
    asked = np.concatenate([counts[name][1024:-1024] for name in sorted(counts)])
    if shares:
        assert asked.max() == 1
    else:
        assert asked.mean() > 1.5
