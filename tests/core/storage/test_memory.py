"""What a worker costs in memory: next to nothing for a sample, because indexes and columns are read block by block."""

from __future__ import annotations

import dataclasses
import json
import os
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from energon_lite.storage.files.array_file import ALIGN, BLOCK
from energon_lite.storage.index.column_file import column_path, write_column_file
from energon_lite.storage.index.nv_meta import write_info
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.tar_scan import scan_shard
from tests.core.storage.memory_work import LENGTHS, open_huge, read_everything, use_huge
from tests.private_memory import private_growth

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="needs Linux")


@pytest.mark.parametrize("shards", [100, pytest.param(1000, marks=pytest.mark.nightly)])
@pytest.mark.slow
def test_four_workers_read_everything(shards: int, tmp_path: Path, make_tar: Callable[..., Path]) -> None:
    """Links to one shard of a thousand samples stand in for many; the nightly run reads 10^6 samples."""
    one = make_tar("one.tar", [(f"{i:03d}.txt", b"x" * 100) for i in range(1000)])
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


def test_an_index_of_a_hundred_million_samples(huge: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)
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
