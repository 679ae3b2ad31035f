"""Does planning by tokens hold up a training loop? Time to plan a chunk, and what a rank waits for its batches.

A data set of token arrays (log-normal lengths, a column of lengths) is walked endlessly by one rank of eight. Plan
chunks are as large as by default, so the walk crosses from chunk to chunk; a step of 8 ms is simulated by sleeping.
"wait" is how long ``next`` takes. The rows differ in whether chunks and steps are planned ahead in the background.

How to read it: the first chunk is planned before the first batch, which is told apart. After that the longest waits
should be those of a busy machine: compare them with those of the row without batching by tokens.

    python tools/bench/token_plans.py [--samples 20000] [--chunks 2] [--workers 1]
"""

from __future__ import annotations

import argparse
import io
import itertools
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import machine, table

from energon_lite import BestFit, Capacity, WorkerConfig, get_savable_loader, get_train_dataset
from energon_lite.batching.strategy import CHUNK
from energon_lite.batching.token_plan import PlansAhead
from energon_lite.storage.index.columns import write_column
from energon_lite.storage.prepare import prepare_dataset
from energon_lite.trainer import TokenizedTaskEncoder

WORLD, CAPACITY, MEAN = 8, 2048, 100
STEP_SECONDS = 0.008


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--chunks", type=int, default=2, help="plan chunks to walk through")
    parser.add_argument("--workers", type=int, default=1)
    arguments = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as name:
        folder = make_data(Path(name) / "data", arguments.samples)
        plan = dataset(folder, batching=BestFit(Capacity(CAPACITY))).plan
        times = []
        for number in range(3):
            start = time.process_time()
            batches = len(plan.make(0, number))
            times.append(time.process_time() - start)
        print(
            f"\na chunk of {CHUNK:,} samples, order and lengths looked up and planned: {min(times):.2f} s of processor "
            f"time, {CHUNK / min(times) / 1e6:.2f} M samples/s, {batches:,} micro-batches"
        )
        turns = arguments.chunks * batches // WORLD
        rows: list[list[object]] = []
        cases: dict[str, tuple[dict[str, Any], bool]] = {
            "fixed number of samples": ({"batch_size": CAPACITY // MEAN}, True),
            "best_fit": ({"batching": BestFit(Capacity(CAPACITY))}, True),
            "best_fit, steps of 64": ({"batching": BestFit(Capacity(CAPACITY)), "micro_batches_per_step": 64}, True),
            "best_fit, steps of 64, nothing ahead": (
                {"batching": BestFit(Capacity(CAPACITY)), "micro_batches_per_step": 64},
                False,
            ),
        }
        for label, (settings, ahead) in cases.items():
            first, waits = walk(folder, settings, turns, arguments.workers, ahead=ahead)
            worst = [f"{wait:.1f}" for wait in waits[:3]]
            middle, rare = np.quantile(waits, (0.5, 0.99))
            rows.append([label, f"{first:.0f}", f"{middle:.2f}", f"{rare:.2f}", ", ".join(worst)])
        print(f"\n{turns} turns of rank 0 of {WORLD}, {arguments.workers} workers; ms")
        print(table(["batches", "first", "median wait", "99 %", "longest three"], rows))


def make_data(folder: Path, samples: int) -> Path:
    """A prepared folder as ``energon-lite tokenize`` makes it."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    lengths = np.clip(np.rint(rng.lognormal(np.log(MEAN) - 0.125, 0.5, samples)), 2, CAPACITY).astype(np.int64)
    with tarfile.open(folder / "tokens-000000.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
        for number, length in enumerate(lengths.tolist()):
            stream = io.BytesIO()
            np.save(stream, rng.integers(0, 32_000, length, dtype=np.int32))
            info = tarfile.TarInfo(f"{number:09d}.tokens.npy")
            info.size = stream.tell()
            stream.seek(0)
            tar.addfile(info, stream)
    prepare_dataset(folder, split_parts={"train": ".*"}, crude=True, workers=1)
    write_column(folder, "length", lengths)
    return folder


def dataset(folder: Path, workers: int = 0, **settings: Any) -> Any:
    config = WorkerConfig(rank=0, world_size=WORLD, num_workers=workers)
    return get_train_dataset(
        folder, worker_config=config, task_encoder=TokenizedTaskEncoder(), **({"batch_size": None} | settings)
    )


def walk(folder: Path, settings: dict[str, Any], turns: int, workers: int, *, ahead: bool) -> tuple[float, list[float]]:
    """Milliseconds of the first batch, and of the others, the longest first."""
    prepare = PlansAhead.prepare
    if not ahead:
        PlansAhead.prepare = lambda self, *numbers: None  # type: ignore[method-assign]
    waits = []
    try:
        with get_savable_loader(dataset(folder, workers, **settings), prefetch_factor=4) as loader:
            batches = iter(loader)
            for _ in itertools.repeat(None, turns):
                start = time.perf_counter()
                next(batches)
                waits.append(1000 * (time.perf_counter() - start))
                time.sleep(STEP_SECONDS)
    finally:
        PlansAhead.prepare = prepare  # type: ignore[method-assign]
    return waits[0], sorted(waits[1:], reverse=True)


if __name__ == "__main__":
    main()
