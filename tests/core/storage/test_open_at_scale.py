"""Opening and reading large data sets: what must not grow with their size, and what a worker costs in memory: next to
nothing for a sample, because indexes and columns are read block by block."""

from __future__ import annotations

import builtins
import dataclasses
import importlib
import json
import os
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from energon_lite.errors import MissingShardError
from energon_lite.storage.files.array_file import ALIGN, BLOCK
from energon_lite.storage.index.column_file import column_path, write_column_file
from energon_lite.storage.index.nv_meta import write_info
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.prepare import prepare_dataset
from energon_lite.storage.tar_scan import scan_shard
from tests.core.storage.memory_work import LENGTHS, look_up, open_huge, read_everything, use_huge
from tests.core.storage.test_packed_index import scan_of
from tests.private_memory import private_growth
from tests.testing import in_time, train_loader, write_members

on_linux = pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="needs Linux")
SCRIPT = Path(__file__).parents[3] / "tools/bench/open_at_scale.py"


def opened_until_the_first_batch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are opened, in order."""
    names, stats = list[str](), list[str]()

    def noting(function: Callable[..., Any], seen: list[str]) -> Callable[..., Any]:
        def noted(path: Any, *arguments: Any, **options: Any) -> Any:
            if str(path).startswith(str(folder)):
                seen.append(Path(str(path)).name)
            return function(path, *arguments, **options)

        return noted

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", noting(os.stat, stats))
        patch.setattr(builtins, "open", noting(builtins.open, names))
        patch.setattr(os, "open", noting(os.open, names))
        with train_loader(folder, batch_size=1, shuffle_buffer_size=None, max_samples_per_sequence=None) as loader:
            next(iter(loader))
    assert sum(name.endswith(".tar") for name in stats) <= 1000
    return names


@pytest.mark.usefixtures("quick_disk")
def test_opening_touches_few_shards_of_two_thousand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = {}
    for shards in (5, 2000):
        folder = tmp_path / f"d{shards}"
        whole = write_members(tmp_path / "one.tar", [("0.txt", b"text")]).read_bytes()[:2048]
        folder.mkdir()
        for shard in range(shards):
            (folder / f"{shard:04d}.tar").write_bytes(whole)
        text = {"sample_type": "TextSample", "field_map": {"text": "txt"}}
        prepare_dataset(folder, split_parts={"train": ".*"}, **text, sqlite=False, workers=1)
        opened[shards] = opened_until_the_first_batch(folder, monkeypatch)
    shards_read = [name for name in opened[2000] if name.endswith(".tar")]
    assert len(shards_read) <= 9  # one for the batch, and eight that tell the data set from others
    # Everything else is opened as often as for a small data set, whose index is read at once.
    few, many = (sorted(name for name in opened[shards] if not name.endswith(".tar")) for shards in (5, 2000))
    assert sorted([*few, "energon_lite.idx"]) == many and ".info.json" in few and "energon_lite.idx" in few
    # One whose size is not looked at.
    (folder / "0333.tar").unlink()
    with pytest.raises(MissingShardError, match=r"0333\.tar"):
        opened_until_the_first_batch(folder, monkeypatch)


@on_linux
def test_look_ups_in_a_large_index_cost_little_memory(tmp_path: Path) -> None:
    samples = 200_000
    scan = scan_of("a.tar", [(f"{n:08d}", [(1024 * n + 512, n % 512, "txt")]) for n in range(samples)])
    path = str(tmp_path / "i.idx")
    PackedIndex.from_scans([scan]).write(path)
    grown = [private_growth(look_up, path, samples, mapped, workers=1)[0] for mapped in (False, True)]
    print(f"\n{grown[0] / 2**20:.1f} MiB, mapped {grown[1] / 2**20:.1f} MiB")
    # The blocks that a process keeps, 4 MiB; and, to show that the measurement sees pages, what mapping would cost.
    assert grown[0] < 6 << 20 and grown[1] - grown[0] > os.path.getsize(path) // 2


def measured(*options: str) -> dict[str, float]:
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--json", *options], capture_output=True, text=True, env=environment, check=False
    )
    assert not done.returncode, done.stderr
    found: dict[str, float] = json.loads(done.stdout)
    return found


@pytest.mark.nightly
def test_the_marks_at_full_size() -> None:
    """10,000 shards, an index of 10**8 samples, an epoch of 10**6; 8 GB of disk."""
    found = measured("--full", "--only", "shards", "--only", "index", "--only", "workers")
    assert found["first batch"] <= 2 and found["opened"] <= 0.5
    assert found["private memory per worker"] <= 50 and found["growth per worker"] < 20


@pytest.mark.nightly
def test_the_marks_of_ten_thousand_data_sets() -> None:
    found = measured("--only", "leaves")
    assert found["processor, leaves"] <= 5 and found["samples beside share"] <= 1
    assert found["memory, leaves"] <= 64 and found["memory per worker, leaves"] <= 64


def test_a_look_up_that_fails_ends_the_measuring(ten: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process has no result to give, and the others' do not stand for it."""
    prepare_dataset(ten, split_ratio="1,0,0", crude=True)  # its keys are not those of the benchmark
    monkeypatch.syspath_prepend(SCRIPT.parent)
    measure = importlib.import_module("open_at_scale").measure_index
    with pytest.raises(SystemExit, match="look-up"):
        in_time(lambda: measure(str(ten / ".nv-meta/energon_lite.idx")))


@pytest.mark.parametrize("shards", [100, pytest.param(1000, marks=pytest.mark.nightly)])
@pytest.mark.slow
@on_linux
def test_four_workers_read_everything(shards: int, tmp_path: Path) -> None:
    """Links to one shard of a thousand samples stand in for many; the nightly run reads 10^6 samples."""
    one = write_members(tmp_path / "one.tar", [(f"{i:03d}.txt", b"x" * 100) for i in range(1000)])
    scan = scan_shard(str(tmp_path), "one.tar")
    names = [f"{number:04d}.tar" for number in range(shards)]
    (tmp_path / "d/.nv-meta").mkdir(parents=True)
    for name in names:
        os.link(one, tmp_path / "d" / name)
    scans = [dataclasses.replace(scan, name=name) for name in names]
    PackedIndex.from_scans(scans).write(str(tmp_path / "d/.nv-meta/energon_lite.idx"))
    write_info(str(tmp_path / "d"), dict.fromkeys(names, 1000))
    excluded = [(name, "007") for name in names]
    growth = private_growth(read_everything, str(tmp_path / "d"), excluded, 999 * shards)
    print(f"\n{999 * shards} samples: {max(growth) / 2**20:.1f} MiB a worker")
    assert max(growth) < 20 << 20


SHARDS, PER_SHARD = 10_000, 10_000


@pytest.fixture
def huge(tmp_path: Path) -> Path:
    """An index of 10^8 samples without parts, and a column of skips: one file with holes, and one with zeros."""
    sections = {
        "shard_names": ("|u1", [6 * SHARDS - 1]),
        "shards": ("<i8", [SHARDS + 1, 5]),
        "samples": ("<i8", [SHARDS * PER_SHARD + 1, 3]),
        "parts": ("<i8", [0, 3]),
        "keys": ("|u1", [0]),
        "shard_times": ("<i8", [SHARDS]),
    }
    places, end = {}, ALIGN
    for name, (dtype, shape) in sections.items():
        places[name] = [dtype, shape, end]
        end += -(-int(np.prod(shape)) * np.dtype(dtype).itemsize // 64) * 64
    meta = {"uuid": "u", "digest": "d", "part_names": [], "rules": 1, "notes": {}}
    table = json.dumps({"arrays": places, "meta": meta}).encode()
    shards = np.zeros((SHARDS + 1, 5), dtype="<i8")
    shards[:, 3] = np.arange(SHARDS + 1) * PER_SHARD
    path = tmp_path / ".nv-meta/energon_lite.idx"
    path.parent.mkdir()
    filled = places["samples"][2]
    with open(path, "w+b") as file:
        file.seek(places["shard_names"][2])
        file.write("\0".join(f"{number:05d}" for number in range(SHARDS)).encode())
        file.seek(places["shards"][2])
        file.write(shards.tobytes())
        sums = np.full(-(-end // BLOCK), zlib.crc32(bytes(BLOCK)), dtype="<u4")
        for block in (*range(filled // BLOCK + 1), len(sums) - 1):
            start = max(block * BLOCK, ALIGN)
            size = min((block + 1) * BLOCK, end) - start
            file.seek(start)
            sums[block] = zlib.crc32(file.read(size).ljust(size, b"\0"))
        file.seek(end)
        file.write(sums.tobytes() + table)
        head = struct.pack("<IQQI28x", 3, end, len(table), zlib.crc32(sums.tobytes() + table))
        file.seek(0)
        file.write(struct.pack("<8sI", b"ENRGLIDX", zlib.crc32(head)) + head)
    return tmp_path


@on_linux
@pytest.mark.usefixtures("quick_disk")
def test_an_index_of_a_hundred_million_samples(huge: Path) -> None:
    path = str(huge / ".nv-meta/energon_lite.idx")
    index = PackedIndex.open(path)
    (huge / ".nv-meta/energon_lite.columns").mkdir()
    block = np.zeros(PER_SHARD, dtype=np.uint8)
    block[::3] = 1
    column = column_path(str(huge / ".nv-meta/energon_lite.columns"), "skip")
    write_column_file(column, "skip", index, lambda: (block for _ in range(SHARDS)), dtype="|u1", maker={})
    numbers = np.random.default_rng(0).integers(0, 66_660_000, 300).tolist()
    growth = private_growth(use_huge, path, str(huge), numbers, False, workers=2)
    assert max(growth) < 50 << 20
    # To show that the measurement sees what a worker has for itself: a column in memory.
    assert min(private_growth(use_huge, path, str(huge), numbers, True, workers=2)) > 60 << 20
    times = []
    for skips in (None, "skip"):
        start = time.thread_time()
        assert len(open_huge(path, str(huge), skips)) == LENGTHS[skips]
        times.append(time.thread_time() - start)
    assert times[0] < 0.5  # a tenth of that; with skips each sample's flag is looked at once
    print(f"\nopened in {times[0]:.3f} s, with skips in {times[1]:.3f} s; {max(growth) / 2**20:.1f} MiB a worker")
