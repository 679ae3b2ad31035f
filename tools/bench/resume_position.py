"""Time from ``restore_state_rank`` to the first batch, at the start of an endless blend and far into it.

A restored loader computes where it is; it replays nothing. So the time must not depend on the position. The mark: at
10**9 micro-batches at most 1.1 times as long as at 0.

Each process makes fresh data sets and loaders, several at each position, in an order that rotates from round to round
and from process to process. "first" are the measurements that come first in their process, with cold caches and modules
to be imported; "later" are the others. With worker processes, the time includes starting them.

How to read it: the ratios are those of the medians and of the minima to position 0. On a busy machine the medians of
two equal things differ by 10 % and more; the minima are steadier.

    python tools/bench/resume_position.py --processes 12 --rounds 8
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from common import fresh_process, machine, make_blend, spread, table

POSITIONS = (0, 10**9, 10**12)
MARK = 1.1
#: Samples of the data sets; above 1,024 a permutation is computed, below it is a table.
_SIZES = (300, 2_000, 5_000, 700, 40)


def measure(blend: str, workers: int, position: int) -> float:
    """Milliseconds from restoring to the first batch, with a loader of its own."""
    from energon_lite import WorkerConfig, get_savable_loader, get_train_dataset

    config = WorkerConfig(rank=0, world_size=1, num_workers=workers)
    dataset = get_train_dataset(
        blend, batch_size=8, shuffle_buffer_size=1000, max_samples_per_sequence=100, worker_config=config
    )
    with get_savable_loader(dataset) as loader:
        state = loader.state_dict() | {"position": position}
        start = time.perf_counter()
        loader.restore_state_rank(state)
        next(iter(loader))
        return (time.perf_counter() - start) * 1e3


def child(blend: str, workers: int, rounds: int, shift: int) -> None:
    """All measurements of one process: ``[[position, milliseconds], ...]``."""
    done = []
    for round_ in range(rounds):
        turn = (round_ + shift) % len(POSITIONS)
        done += [[p, measure(blend, workers, p)] for p in (*POSITIONS[turn:], *POSITIONS[:turn])]
    print(json.dumps(done))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=12, help="fresh processes for each number of workers")
    parser.add_argument("--rounds", type=int, default=8, help="loaders at each position in a process")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--child", nargs=4, metavar=("BLEND", "WORKERS", "ROUNDS", "SHIFT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child[0], *map(int, options.child[1:]))
        return
    times: dict[tuple[int, int, bool], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        blend = str(make_blend(Path(folder), _SIZES))
        for number in range(options.processes):
            for workers in options.workers:
                arguments = [blend, str(workers), str(options.rounds), str(number)]
                for place, (position, ms) in enumerate(fresh_process(__file__, "--child", *arguments)):
                    times.setdefault((workers, position, place == 0), []).append(ms)
    rows = []
    for workers in options.workers:
        for first in (True, False):
            base = times.get((workers, POSITIONS[0], first))
            for position in POSITIONS:
                values = times.get((workers, position, first))
                if values and base:
                    ratios = [f"{of(values) / of(base):.3f}" for of in (statistics.median, min)]
                    when = "first" if first else "later"
                    rows.append([workers, when, f"{position:.0e}", spread(values), len(values), *ratios])
    print(machine())
    print(table(["workers", "loader", "position", "ms, median (min-max)", "runs", "ratio", "ratio of minima"], rows))
    print(f"\nmark: ratio at 1e+09 at most {MARK}")


if __name__ == "__main__":
    main()
