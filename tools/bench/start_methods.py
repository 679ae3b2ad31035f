"""Start methods of workers: seconds to the first batch, to a worker's replacement, and batches a second after that.

One fresh process for each start method and run, alternating; two workers, batches of 32 text samples. ``first`` is
from ``iter(loader)`` to the first batch, ``again`` the same after ``close()`` in the same process (a forkserver is
warm then), ``replaced`` from the death of both workers to the eighth batch after it (more than were ready),
``batches/s`` the rate of so many batches afterwards.

With ``--off`` it measures instead what the loader adds to each batch on its own (counts, waiting, cursor), in
microseconds: a loader in this process over batches that are made in no time.

    python tools/bench/start_methods.py --runs 5
    python tools/bench/start_methods.py --off
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from common import fresh_process, machine, make_dataset, spread, table

METHODS = ("fork", "forkserver", "spawn", "thread")


def child(method: str, data: str, batches: int) -> None:
    """Prints ``[first, again, replaced, batches a second]``."""
    import energon_lite as lib

    def make() -> Any:
        config = lib.WorkerConfig(rank=0, world_size=1, num_workers=2)
        return lib.get_savable_loader(
            lib.get_train_dataset(data, batch_size=32, worker_config=config), start_method=method
        )

    loader = make()
    seconds = []
    for _ in range(2):
        began = time.perf_counter()
        iterator = iter(loader)
        next(iterator)
        seconds.append(time.perf_counter() - began)
        loader.close()
    iterator = iter(loader)
    next(iterator)
    began = time.perf_counter()
    if method != "thread":
        for worker in loader._workers.executor()._workers:
            os.kill(worker.process.pid, signal.SIGKILL)
        for _ in range(8):  # more than were ready
            next(iterator)
    seconds.append(time.perf_counter() - began)
    began = time.perf_counter()
    for _ in range(batches):
        next(iterator)
    rate = batches / (time.perf_counter() - began)
    loader.close()
    print(json.dumps([*seconds, rate]))


def measure_overhead(data: str) -> None:
    """Microseconds that the loader adds to each batch."""
    import statistics

    import energon_lite as lib
    from energon_lite.loading.makers.outcomes import Result

    dataset = lib.get_train_dataset(
        data, batch_size=32, worker_config=lib.WorkerConfig(rank=0, world_size=1), task_encoder=lib.TaskEncoder()
    )
    loader = lib.get_savable_loader(dataset)
    loader._path.take()
    batch, outcomes = {"x": 1}, [0] * 32
    loader._dataset_iterator.take = lambda: Result(batch, outcomes)  # type: ignore[method-assign, assignment]
    loader._dataset_iterator.advance = lambda: None  # type: ignore[method-assign]
    found: dict[str, list[float]] = {"whole loop": [], "check": [], "count": []}
    for _ in range(7):
        iterator = iter(loader)
        began = time.process_time()
        for _ in range(20_000):
            next(iterator)
        found["whole loop"].append(1e6 * (time.process_time() - began) / 20_000)
        for name, function in (("check", loader._report.check), ("count", loader._report.count)):
            began = time.process_time()
            for _ in range(20_000):
                function(outcomes)
            found[name].append(1e6 * (time.process_time() - began) / 20_000)
    for name, values in found.items():
        print(f"{name:12}{statistics.median(values):8.2f} us of CPU a batch of 32")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--batches", type=int, default=2000)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--off", action="store_true", help="measure the loader's own cost instead")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child[0], options.child[1], int(options.child[2]))
        return
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        data = str(make_dataset(Path(folder) / "data", options.samples, payload=2000))
        if options.off:
            measure_overhead(data)
            return
        found: dict[str, list[list[float]]] = {method: [] for method in METHODS}
        for _ in range(options.runs):
            for method in METHODS:
                found[method].append(fresh_process(__file__, "--child", method, data, str(options.batches)))
    rows = []
    for method in METHODS:
        first, again, replaced, rate = zip(*found[method], strict=True)
        rows.append([method, *(spread(values, 3) for values in (first, again, replaced)), spread(rate, 0)])
    print(table(["start method", "first s", "again s", "replaced s", "batches/s"], rows))


if __name__ == "__main__":
    main()
