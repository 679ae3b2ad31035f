"""Ranks of one machine fetch each byte of a store once, and share it in a folder."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from energon_lite import Reading, WorkerConfig, get_savable_loader, get_train_dataset
from energon_lite.storage.prepare import prepare_dataset
from energon_lite.storage.read.ranges import ReadAhead
from tests.servers import Ranges

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
    dataset = get_train_dataset(
        url,
        worker_config=WorkerConfig(rank, world),
        batch_size=2,
        shuffle_buffer_size=24,
        max_samples_per_sequence=12,
        reading=Reading(read_ahead=ReadAhead(folder=folder, hedge=False)),
    )
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
