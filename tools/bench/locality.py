"""What locality buys on slow storage: a store with 5 ms per request and 200 MB/s, read in several orders.

The store is a file system for fsspec that waits: 5 ms for each request (requests may wait together), and for the bytes,
whose 200 MB/s all requests and processes share. It waits in an event loop, as S3's, GCS's and HTTP's do; ``threads``:
in the caller's thread, as others do. The data are 20,000 records of about 7 kB. Compared are the full permutation and
runs of 100 in windows of 1,000, with one request at a time and with many, with workers, and with a folder that keeps
what was read; each in a fresh process, over the same number of samples.

How to read it: samples per second (higher is better); requests and bytes of the store per sample delivered.

    python tools/bench/locality.py [--small]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import fresh_process, machine, table, write_shards
from slow_store import STORE

BATCH = 32

ORDERS = {"full permutation": {}, "runs of 100, window 1,000": {"run": 100, "window": 1000}}
READERS = {
    "1 request at a time": {"requests": 1},
    "16 requests": {"requests": 16},
    "64 requests": {},
    "64 requests, threads": {"scheme": "slow"},
    "64 requests, folder": {"folder": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--small", action="store_true", help="2,000 samples, once")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(**json.loads(arguments.measure))))
        return
    runs, samples = (1, 2_000) if arguments.small else (arguments.runs, arguments.samples)
    with tempfile.TemporaryDirectory() as folder:
        make_data(Path(folder) / "data", samples)
        cases = list(itertools.product(ORDERS, READERS, (0, 2)))
        found: dict[Any, list[Any]] = {case: [] for case in cases}
        for case in cases * runs:
            found[case].append(run_case(folder, *case, samples))
    rows = []
    for (order, reader, workers), measured in found.items():
        rate, requests, bytes_read, first = (statistics.median(values) for values in zip(*measured, strict=True))
        rows.append([order, reader, workers, f"{rate:,.0f}", f"{requests:.3f}", f"{bytes_read:,.0f}", f"{first:.2f}"])
    print(machine())
    header = ["order", "reading", "workers", "samples/s", "requests/sample", "bytes/sample", "first batch, s"]
    print(table(header, rows))


def run_case(folder: str, order: str, reader: str, workers: int, samples: int) -> Any:
    with tempfile.TemporaryDirectory() as cache:
        settings = dict(READERS[reader])
        if settings.pop("folder", False):
            settings["folder"] = cache
        scheme = settings.pop("scheme", "far")
        # One request at a time is slow, and its rate is steady: a part will do.
        count = samples // 10 if settings.get("requests") == 1 and not ORDERS[order] else samples
        what = {"path": f"{scheme}://{folder}/data", "settings": settings, "workers": workers, "count": count}
        return fresh_process(__file__, "--measure", json.dumps(what | ORDERS[order]))


def measure(
    path: str, settings: dict[str, Any], workers: int, count: int, run: int | None = None, window: int | None = None
) -> list[float]:
    """Samples per second, requests and bytes per sample, seconds to the first batch."""
    import energon_lite as lib

    encoder = lib.DefaultTaskEncoder()
    encoder.decoder = None
    dataset = lib.get_train_dataset(
        path,
        batch_size=BATCH,
        shuffle_buffer_size=window,
        max_samples_per_sequence=run,
        worker_config=lib.WorkerConfig(rank=0, world_size=1, num_workers=workers),
        task_encoder=encoder,
        read_ahead=lib.ReadAhead(**settings),
    )
    STORE.set()
    steps, first = count // BATCH, 0.0
    start = time.perf_counter()
    with lib.get_savable_loader(dataset, start_method="fork") as loader:
        for _ in itertools.islice(loader, steps):
            first = first or time.perf_counter() - start
        seconds = time.perf_counter() - start
    done = steps * BATCH
    requests, bytes_read = STORE.counts
    return [done / seconds, requests / done, bytes_read / done, first]


def make_data(folder: Path, samples: int) -> None:
    rng = np.random.default_rng(0)
    sizes = np.clip(rng.lognormal(8.7, 0.55, samples), 1_600, 24_000).astype(int)
    parts = ({"jpg": rng.bytes(int(size)), "txt": b"a caption"} for size in sizes)
    write_shards(folder, parts, 1000, "CaptioningSample", {"image": "jpg", "caption": "txt"})


if __name__ == "__main__":
    sys.exit(main())
