"""Opening large data sets: time to the first batch, and memory that each worker has for itself.

Three measurements, each in new processes, imports not counted:

* ``shards``: a data set of many tiny shards, from ``get_train_dataset`` to the first batch. Mark: 2 s for 10,000.
* ``index``: a packed index of many samples (made up; its shards do not exist), opened, and then 10,000 random samples
  looked up in each of two worker processes. Marks for 10**8: opened in 0.5 s, 50 MiB of private memory per worker.
* ``workers``: an epoch of many small samples by four workers. Mark: the private memory of each grows by less than
  20 MiB from its first batches to the end.

Private memory is what ``/proc/<pid>/smaps_rollup`` says under ``Private_*``: clean and dirty pages that no other
process maps, those of mapped files included.

    python tools/bench/open_at_scale.py [--full] [--only shards]

Without ``--full`` everything is ten times smaller, and the marks are the same. ``--full`` needs 8 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from common import fresh_process, machine, table

MIB = 1 << 20
FULL = {"shards": 10_000, "index": 10**8, "workers": 10**6}
LOOK_UPS = 10_000
#: Measured value: (mark, unit).
MARKS = {
    "first batch": (2.0, "s"),
    "opened": (0.5, "s"),
    "private memory per worker": (50.0, "MiB"),
    "growth per worker": (20.0, "MiB"),
}


def write_shard(path: Path, first: int, samples: int) -> None:
    """A tar of ``<number>.txt``, each with a short text, at the speed of the disk."""
    info = tarfile.TarInfo("00000000.txt")
    info.size = 8
    header = np.frombuffer(info.tobuf(tarfile.USTAR_FORMAT), dtype=np.uint8).astype(np.int64)
    numbers = np.arange(first, first + samples)[:, None] // 10 ** np.arange(7, -1, -1) % 10
    rows = np.zeros((samples, 1024), dtype=np.uint8)
    rows[:, :512] = header
    rows[:, :8] += numbers.astype(np.uint8)
    rows[:, 512:520] = rows[:, :8]
    checksum = header.sum() - header[148:156].sum() + 8 * ord(" ") + numbers.sum(1)
    rows[:, 148:154] = checksum[:, None] // 8 ** np.arange(5, -1, -1) % 8 + ord("0")
    with open(path, "wb") as file:
        file.write(rows.data)
        file.write(bytes(1024))


def make_dataset(folder: Path, shards: int, samples: int) -> None:
    """A prepared folder."""
    from energon_lite.storage.prepare.prepare import prepare_dataset

    folder.mkdir(parents=True)
    for shard in range(shards):
        first = samples * shard // shards
        write_shard(folder / f"shard-{shard:06d}.tar", first, samples * (shard + 1) // shards - first)
    prepare_dataset(
        folder, split_parts={"train": ".*"}, sample_type="TextSample", field_map={"text": "txt"}, sqlite=False
    )


def write_index(path: Path, samples: int, shards: int = 1000) -> None:
    """A packed index of so many samples of one part, written section by section: it never is in memory as a whole."""
    from energon_lite.storage.files.array_file import writing
    from energon_lite.storage.index.packed_index import INDEX_FILE

    names = b"\0".join(b"shard-%06d.tar" % shard for shard in range(shards))
    shard_rows = np.zeros((shards + 1, 5), dtype=np.int64)
    shard_rows[:, 3] = np.arange(shards + 1) * samples // shards

    def digits(numbers: Any) -> Any:
        return (numbers[:, None] // 10 ** np.arange(7, -1, -1) % 10 + ord("0")).astype(np.uint8)

    def rows(kind: str) -> Iterator[Any]:
        for first in range(0, samples, MIB):
            numbers = np.arange(first, min(first + MIB, samples))
            if kind == "samples":
                yield np.stack([numbers, 8 * numbers, 1024 * numbers], 1)
            elif kind == "parts":
                yield np.stack([1024 * numbers + 512, numbers % 512, 0 * numbers], 1)
            else:
                yield digits(numbers)
        if kind == "samples":
            yield np.array([samples, 8 * samples, 0], dtype=np.int64)

    meta = {"uuid": "", "digest": "", "part_names": ["txt"], "rules": 1, "notes": {}}
    with writing(str(path), INDEX_FILE, meta) as file:
        file.add("shard_names", np.frombuffer(names, dtype=np.uint8))
        file.add("shards", shard_rows)
        for name, dtype, row in (("samples", "<i8", [3]), ("parts", "<i8", [3]), ("keys", "|u1", [])):
            file.stream(name, dtype, row, (block.reshape(-1).view(np.uint8).data for block in rows(name)))
        file.add("shard_times", np.zeros(shards, dtype=np.int64))


def private_memory(process: int | str = "self") -> float:
    """MiB of memory that no other process shares."""
    with open(f"/proc/{process}/smaps_rollup") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith("Private_")) / 1024


def _loader(folder: str, workers: int, batch_size: int) -> Any:
    from energon_lite import WorkerConfig, get_savable_loader, get_train_dataset

    config = WorkerConfig(rank=0, world_size=1, num_workers=workers)
    dataset = get_train_dataset(
        folder, batch_size=batch_size, shuffle_buffer_size=None, max_samples_per_sequence=None, worker_config=config
    )
    return get_savable_loader(dataset)


def measure_shards(folder: str) -> dict[str, float]:
    """Seconds to the first batch, in this process."""
    import energon_lite

    assert energon_lite.get_train_dataset  # imported before the clock starts
    start = time.perf_counter()
    with _loader(folder, 0, 8) as loader:
        next(iter(loader))
        return {"first batch": time.perf_counter() - start}


def measure_index(path: str) -> dict[str, float]:
    """Seconds to open, and the most that a worker has for itself after its look-ups."""
    from energon_lite.storage.index.packed_index import PackedIndex

    start = time.perf_counter()
    index = PackedIndex.open(path)
    opened = time.perf_counter() - start
    results: Any = multiprocessing.get_context("fork").SimpleQueue()

    def work(seed: int) -> None:
        numbers, before = random.Random(seed), private_memory()
        for _ in range(LOOK_UPS):
            sample = numbers.randrange(len(index))
            assert (index.key(sample), index.key_and_part_rows(sample)[1][1]) == (f"{sample:08d}", sample % 512)
        results.put(private_memory() - before)

    helpers = [multiprocessing.get_context("fork").Process(target=work, args=(seed,)) for seed in range(2)]
    for helper in helpers:
        helper.start()
    for helper in helpers:
        helper.join()
    if any(helper.exitcode for helper in helpers):
        raise SystemExit("a process that makes look-ups failed")
    used = [results.get() for _ in helpers]
    return {"opened": opened, "private memory per worker": max(used)}


def measure_workers(folder: str) -> dict[str, float]:
    """The largest growth of a worker over one epoch."""
    from energon_lite.storage.index.nv_meta import read_info

    batches = sum(read_info(folder).values()) // 100
    with _loader(folder, 4, 100) as loader:
        found = iter(loader)
        for _ in range(max(100, batches // 50)):  # all workers have begun, and their caches are filled
            next(found)
        workers = [child.pid for child in multiprocessing.active_children()]
        before = {pid: private_memory(pid) for pid in workers if pid}
        for _ in range(batches - max(100, batches // 50)):
            next(found)
        assert len(before) == 4
        return {"growth per worker": max(private_memory(pid) - size for pid, size in before.items())}


MEASURE = {"shards": measure_shards, "index": measure_index, "workers": measure_workers}


def run(what: str, size: int) -> dict[str, float]:
    """Make the data and measure in a new process."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name) / "data"
        if what == "shards":
            make_dataset(place, size, 4 * size)
        elif what == "workers":
            make_dataset(place, 10, size)
        else:
            write_index(place, size)
        found: dict[str, float] = fresh_process(__file__, "--child", what, str(place))
        return found


def main() -> None:
    """Measure and print."""
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(MEASURE[sys.argv[2]](sys.argv[3])))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="10,000 shards, 10**8 and 10**6 samples")
    parser.add_argument("--only", choices=tuple(FULL), action="append")
    parser.add_argument("--json", action="store_true", help="print the numbers for a program to read")
    arguments = parser.parse_args()
    found = {}
    rows = []
    for what in arguments.only or FULL:
        size = FULL[what] if arguments.full else FULL[what] // 10
        for name, value in run(what, size).items():
            mark, unit = MARKS[name]
            found[name] = value
            rows.append([what, size, name, f"{value:.3g} {unit}", f"{mark:g} {unit}", "yes" if value <= mark else "NO"])
    if arguments.json:
        print(json.dumps(found))
        return
    print(machine())
    print(table(["data", "size", "what", "measured", "mark", "reached"], rows))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
