"""Opening large data sets: time to the first batch, and memory that each worker has for itself.

Four measurements, each in new processes, imports not counted:

* ``shards``: a data set of many tiny shards, from ``get_train_dataset`` to the first batch. Mark: 2 s for 10,000.
* ``index``: a packed index of many samples (made up; its shards do not exist), opened, and then 10,000 random samples
  looked up in each of two worker processes. Marks for 10**8: opened in 0.5 s, 50 MiB of private memory per worker.
* ``leaves``: a blend of many data sets, which are hard links to a few. The first start opens all of them (``made``); a
  second one in a new process reads what the first wrote down, from ``get_train_dataset`` to the first batch. Marks for
  100,000: 5 s, 64 MiB of private memory in the trainer without workers, and in each of two workers, above what torch
  and the library take; each data set within one sample of its share.
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
FULL = {"shards": 10_000, "index": 10**8, "leaves": 100_000, "workers": 10**6}
LOOK_UPS = 10_000
#: Measured value: (mark, unit).
MARKS = {
    "first batch": (2.0, "s"),
    "opened": (0.5, "s"),
    "private memory per worker": (50.0, "MiB"),
    "growth per worker": (20.0, "MiB"),
    "made": (float("inf"), "s"),
    "first batch, leaves": (5.0, "s"),
    "processor, leaves": (5.0, "s"),
    "memory, leaves": (64.0, "MiB"),
    "memory per worker, leaves": (64.0, "MiB"),
    "samples beside share": (1.0, ""),
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
    from energon_lite.storage.prepare import prepare_dataset

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


def make_blend(folder: Path, leaves: int) -> None:
    """A blend of prepared folders of four samples; of 20,000 all are links to the files of one."""
    from energon_lite.storage.prepare import prepare_dataset

    folder.mkdir(parents=True)
    firsts = [folder / f"first-{number}" for number in range(-(-leaves // 20_000))]
    for number, first in enumerate(firsts):
        first.mkdir()
        write_shard(first / "0.tar", 4 * number, 4)
        prepare_dataset(
            first, split_parts={"train": ".*"}, sample_type="TextSample", field_map={"text": "txt"}, sqlite=False
        )
    files = [path.relative_to(firsts[0]) for path in firsts[0].rglob("*") if path.is_file()]
    for leaf in range(leaves):
        for path in files:
            there = folder / f"leaf-{leaf}" / path
            os.makedirs(there.parent, exist_ok=True)
            os.link(firsts[leaf % len(firsts)] / path, there)
    blend = [{"path": f"leaf-{leaf}", "weight": 1 + leaf % 7} for leaf in range(leaves)]
    document = {"__class__": "MetadatasetV2", "__module__": "megatron.energon", "splits": {"train": {"blend": blend}}}
    (folder / "blend.yaml").write_text(json.dumps(document))


def measure_leaves(folder: str) -> dict[str, float]:
    """The first start, and the second one in processes of their own."""
    os.environ["ENERGON_LITE_CACHE"] = folder + ".cache"
    made = fresh_process(__file__, "--child", "start", folder, "0")
    found = [fresh_process(__file__, "--child", "start", folder, str(workers)) for workers in (0, 2)]
    return {
        "made": made["seconds"],
        "first batch, leaves": found[0]["seconds"],
        "processor, leaves": found[0]["processor"],
        "memory, leaves": found[0]["memory"],
        "memory per worker, leaves": found[1]["worker"],
        "samples beside share": found[0]["beside"],
    }


def measure_start(folder: str, workers: str) -> dict[str, float]:
    """From the call to the first batch, in this process, and what memory it and its workers have for themselves."""
    import energon_lite

    assert energon_lite.get_train_dataset and energon_lite.get_savable_loader and energon_lite.WorkerConfig
    before, start, busy = private_memory(), time.perf_counter(), time.process_time()
    with _loader(folder + "/blend.yaml", int(workers), 8) as loader:
        batches = iter(loader)
        next(batches)
        found = {"seconds": time.perf_counter() - start, "processor": time.process_time() - busy}
        found["memory"] = private_memory() - before
        for _ in range(50):
            next(batches)
        found["worker"] = max([private_memory(child.pid) for child in multiprocessing.active_children()], default=0.0)
        order, weights = loader.dataset.plan.order, np.array(loader.dataset.weights)
        positions = [4096, 4096 * 77, 4096 * 123_456_789]
        beside = [np.abs(order.counts_before(one) - weights / weights.sum() * one).max() for one in positions]
        return found | {"beside": float(max(beside))}


MEASURE: dict[str, Any] = {"shards": measure_shards, "index": measure_index, "workers": measure_workers}
MEASURE |= {"leaves": measure_leaves, "start": measure_start}


def run(what: str, size: int) -> dict[str, float]:
    """Make the data and measure in a new process."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name) / "data"
        if what == "shards":
            make_dataset(place, size, 4 * size)
        elif what == "leaves":
            make_blend(place, size)
            found: dict[str, float] = measure_leaves(str(place))
            return found
        elif what == "workers":
            make_dataset(place, 10, size)
        else:
            write_index(place, size)
        found = fresh_process(__file__, "--child", what, str(place))
        return found


def main() -> None:
    """Measure and print."""
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(MEASURE[sys.argv[2]](*sys.argv[3:])))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="10,000 shards, 100,000 data sets, 10**8 and 10**6 samples")
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
