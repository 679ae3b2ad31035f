"""How near `energon-lite tune` comes to the best setting of a grid, where hooks sleep, compute, or both.

On a machine on which others work, only those that sleep say something, with `--times 10`, which makes all of it so many
times slower.

python tools/bench/tune.py --runs 3            # minutes
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from common import machine, make_dataset, spread, table  # type: ignore[import-not-found]

from energon_lite.extras.inspect.tuning.search import Bounds, Setting, tune
from energon_lite.extras.inspect.tuning.trials import Trials, What

ENCODERS = '''
import fcntl, os, threading, time
from energon_lite import TaskEncoder, stateless

TIMES = float(os.environ["STAGED_TIMES"])

def sleep(seconds):
    time.sleep(TIMES * seconds)

def busy(seconds):
    end = time.thread_time() + TIMES * seconds
    while time.thread_time() < end:
        pass

class Sleeps(TaskEncoder):
    """Waits for something, 2 ms: as many workers as there may be."""
    @stateless(restore_seeds=False)
    def encode_sample(self, sample):
        sleep(0.002)
        return {"key": sample.__key__}

class Computes(TaskEncoder):
    """Holds a core, and Python's lock: as many processes as there are cores."""
    @stateless(restore_seeds=False)
    def encode_sample(self, sample):
        busy(0.001)
        return {"key": sample.__key__}

class Both(TaskEncoder):
    """Half of either."""
    @stateless(restore_seeds=False)
    def encode_sample(self, sample):
        sleep(0.002)
        busy(0.0005)
        return {"key": sample.__key__}

class Shared(TaskEncoder):
    """Waits 2 ms, then half a millisecond for something that one process after the other gets: five workers pay."""
    @stateless(restore_seeds=False)
    def encode_sample(self, sample):
        sleep(0.002)
        with open(__file__) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            sleep(0.0004)
        return {"key": sample.__key__}

LOCK = threading.Lock()

class Locked(TaskEncoder):
    """Waits with a lock of its process, as Python's lock is one: threads do not pay."""
    @stateless(restore_seeds=False)
    def encode_sample(self, sample):
        with LOCK:
            sleep(0.002)
        return {"key": sample.__key__}

class Uneven(TaskEncoder):
    """Every 100th sample takes 50 times as long: batches ahead pay."""
    @stateless(restore_seeds=False)
    def encode_sample(self, sample):
        sleep(0.05 if hash(sample.__key__) % 100 == 0 else 0.001)
        return {"key": sample.__key__}
'''
NAMES = ("Sleeps", "Shared", "Locked", "Uneven", "Computes", "Both")


def grid(workers: int) -> list[Setting]:
    """All that is compared with."""
    numbers = sorted({0, 1, 2, 3, 4, 6, 8, workers} & set(range(workers + 1)))
    every = [Setting(number, 2, method) for number in numbers if number for method in ("fork", "thread")]
    return [Setting(0), *every, *(Setting(number, 8) for number in numbers if number > 1)]


def measured(what: What, settings: list[Setting], rounds: int) -> dict[Setting, float]:
    """Samples a second of each, the median of several rounds."""
    found: dict[Setting, list[float]] = {one: [] for one in settings}
    with Trials(what, None) as trials:
        for _ in range(rounds):
            for one in settings:
                found[one].append(trials(one).samples)
    return {one: statistics.median(speeds) for one, speeds in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="Of tune.")
    parser.add_argument("--rounds", type=int, default=3, help="Of the grid.")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60.0, help="Of a run of tune.")
    parser.add_argument(
        "--times", type=float, default=1.0, help="Hooks take so many times as long, in smaller batches."
    )
    parser.add_argument("--hooks", nargs="*", default=NAMES, choices=NAMES)
    asked = parser.parse_args()
    os.environ["STAGED_TIMES"] = str(asked.times)
    batch_size = max(1, round(8 / asked.times))
    rows: list[list[Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "staged_hooks.py").write_text(ENCODERS)
        os.chdir(folder)  # where the hooks are looked for
        path = str(make_dataset(Path(folder, "text"), 20_000))
        for name in asked.hooks:
            what = What(path, f"staged_hooks:{name}", {"batch_size": batch_size}, False, asked.seconds / 32)
            settings = grid(asked.workers)
            found = []
            for _ in range(asked.runs):
                with Trials(what, None) as trials:
                    best = tune(trials, Bounds(asked.workers, asked.seconds)).best
                assert best is not None
                found.append(best.setting)
            speeds = measured(what, list(dict.fromkeys([*settings, *found])), asked.rounds)
            top = max(settings, key=lambda one: speeds[one])
            shares = [speeds[one] / speeds[top] for one in found]
            for setting, speed in speeds.items():
                print(f"  {name}: {setting}: {speed:,.0f} samples/s", flush=True)
            rows.append([name, str(top), f"{speeds[top]:,.0f}", "; ".join(map(str, found)), spread(shares)])
            print(rows[-1], flush=True)
        print(machine())  # here, since some libraries look for the folder that they are in
        print(table(["hooks", "best of the grid", "samples/s", "proposed", "share of the best"], rows))


if __name__ == "__main__":
    main()
