"""Which sample stands where in a blend of 1,000 data sets: four ways, side by side, in one run.

* greedy: one pass over all positions, each scanning all data sets for the one that lags most: the compiled helper of
  Megatron-Core, from its wheel. The helper is loaded by itself, so an environment with megatron-core and numpy is
  enough: ``python -m venv mc && mc/bin/pip install --no-deps megatron-core numpy``, and ``--megatron mc/bin/python``.
  Without the option the interpreter that runs this script is tried; where none has it, the line says so.
* largest remainder: exact counts, ``numpy.repeat``, and a shuffle of everything.
* arrays: ``build_blend_index`` of ``energon_lite.extras.tools`` with one process, at two lengths: the cost a sample
  and the memory should be the same.
* lazy: ``BlendOrder.lookup``, which builds nothing. It gives more: the sample inside the data set, and its epoch. Also
  with weights that change along the run.

Each number comes from processes of their own; ways alternate, medians (and extremes) are printed. Times are CPU time
of the process, which other programs on the machine disturb less than they do the clock; set-up is also given by the
clock.

Marks: set-up at most 5 ms, 100 ns a sample in batches of 1,024 and 80 ns in batches of 65,536, 100 MiB over the
imports; arrays at least 10 million samples a second and core; 1,000 leaves of 60,000 samples at most 200 ns and 64 MiB.

    python tools/bench/blend.py --repeats 3 --full --megatron mc/bin/python
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from common import fresh_process, machine, spread, table

LEAVES = 1000
FAR = (2 * 10**9, 10**15)
BATCHES = (1024, 65_536)

#: Runs in an interpreter that need not have this library, nor torch, which megatron.core would import.
GREEDY = """
import glob, importlib.util, json, os, resource, sys, time
import numpy as np
spec = importlib.util.find_spec("megatron")
found = [path for folder in (spec.submodule_search_locations if spec else ())
         for path in glob.glob(os.path.join(folder, "core", "datasets", "helpers_cpp*.so"))]
if not found:
    print(json.dumps({"missing": True}))
    raise SystemExit
spec = importlib.util.spec_from_file_location("helpers_cpp", found[0])
helpers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(helpers)
leaves, n = map(int, sys.argv[1:])
share = np.random.default_rng(0).random(leaves)
share /= share.sum()
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
memory, start = peak(), time.process_time()
leaf, sample = np.zeros(n, dtype=np.int16), np.zeros(n, dtype=np.int64)
helpers.build_blending_indices(leaf, sample, share, leaves, n, False)
print(json.dumps({"seconds": time.process_time() - start, "MiB": peak() - memory}))
"""

#: Weights that go in a straight line to other ones, over 2 x 10^15 positions.
RAMP = ", ramp"

LENGTHS: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "10^5 to 10^7": lambda rng: rng.integers(10**5, 10**7, LEAVES),
    "60,000": lambda rng: np.full(LEAVES, 60_000),
    "1,025 to 65,535": lambda rng: rng.integers(1025, 65_536, LEAVES),
    "300 to 1,024": lambda rng: rng.integers(300, 1025, LEAVES),
}


def weights() -> np.ndarray:
    return np.random.default_rng(0).random(LEAVES)


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def timed(work: Callable[[], object]) -> dict[str, float]:
    """CPU seconds, and the growth of peak memory in MiB."""
    memory, start = peak_mib(), time.process_time()
    work()
    return {"seconds": time.process_time() - start, "MiB": peak_mib() - memory}


# -- one way, in its own process ------------------------------------------------------------------------------------


def greedy(n: int, interpreter: str) -> dict[str, Any]:
    command = [interpreter, "-c", GREEDY, str(LEAVES), str(n)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{interpreter} failed:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def remainder(n: int) -> dict[str, Any]:
    def build() -> None:
        ideal = weights() / weights().sum() * n
        counts = ideal.astype(np.int64)
        counts[np.argsort(counts - ideal)[: n - counts.sum()]] += 1
        leaf = np.repeat(np.arange(LEAVES, dtype=np.int16), counts)
        sample = np.concatenate([np.arange(count) for count in counts])
        order = np.random.default_rng(1).permutation(n)
        leaf[order], sample[order]

    return timed(build)


def arrays(n: int) -> dict[str, Any]:
    from energon_lite.extras.tools.order_arrays import build_blend_index

    folder = tempfile.mkdtemp()
    try:
        return timed(lambda: build_blend_index(weights().tolist(), n, f"{folder}/index", workers=1))
    finally:
        shutil.rmtree(folder)


def lazy(which: str) -> dict[str, Any]:
    from energon_lite.extras.blends.staged_run import Stages
    from energon_lite.extras.blends.stages import WeightStage
    from energon_lite.order.orders import BlendOrder
    from energon_lite.order.shuffle import LeafOrder

    lengths = LENGTHS[which.removesuffix(RAMP)](np.random.default_rng(1)).tolist()
    shares: Any = weights().tolist()
    if which.endswith(RAMP):
        last = tuple(shares[::-1])
        shares = Stages((WeightStage(0, tuple(shares), last), WeightStage(2 * FAR[1], last)))
    BlendOrder([LeafOrder(10, 0)] * 2, [1, 2], key=0).lookup(np.arange(3))  # what is done once in a process
    memory = peak_mib()
    leaves = [LeafOrder(length, number) for number, length in enumerate(lengths)]
    found: dict[str, Any] = {"set-up": [], "first": []}
    for _ in range(5):
        start = time.perf_counter()
        order = BlendOrder(leaves, shares, key=1)
        found["set-up"].append((time.perf_counter() - start) * 1e3)
        order.lookup(np.arange(FAR[0], FAR[0] + 8))
        found["first"].append((time.perf_counter() - start) * 1e3)
    for position in FAR:
        for batch in BATCHES:
            found[f"{batch} at {position:.0e}"] = per_sample(order, position, batch)
    return {**{name: float(np.median(values)) for name, values in found.items()}, "MiB": peak_mib() - memory}


def per_sample(order: Any, position: int, batch: int) -> list[float]:
    """Nanoseconds, over stretches of 2**17 consecutive samples after a first one that fills what is kept."""
    times = []
    for _ in range(6):
        start = time.process_time()
        for at in range(position, position + (1 << 17), batch):
            order.lookup(np.arange(at, at + batch))
        times.append((time.process_time() - start) * 1e9 / (1 << 17))
        position += 1 << 17
    return times[1:]


# -- all of them ----------------------------------------------------------------------------------------------------


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="processes for each number")
    parser.add_argument("--full", action="store_true", help="also 10^7 and 10^8 samples: 2.5 GB, minutes")
    parser.add_argument("--megatron", default=sys.executable, help="an interpreter that has megatron-core")
    parser.add_argument("--child", nargs=2, metavar=("WAY", "ARGUMENT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        way, argument = options.child
        print(
            json.dumps(
                lazy(argument) if way == "lazy" else {"remainder": remainder, "arrays": arrays}[way](int(argument))
            )
        )
        return
    built = {"greedy": [10**6], "remainder": [10**7], "arrays": [10**6, 10**7]}
    if options.full:
        built = {"greedy": [10**6, 10**7], "remainder": [10**7, 10**8], "arrays": [10**7, 10**8]}
    jobs = [(way, str(n)) for way, lengths in built.items() for n in lengths]
    first = next(iter(LENGTHS))
    jobs += [("lazy", which) for which in (first, first + RAMP, *list(LENGTHS)[1:])]
    results: dict[tuple[str, str], list[dict[str, Any]]] = {job: [] for job in jobs}
    for _ in range(options.repeats):
        for way, argument in jobs:
            if way == "greedy":
                done = greedy(int(argument), options.megatron)
            else:
                done = fresh_process(__file__, "--child", way, argument)
            results[way, argument].append(done)
    print(machine())
    print_built(results)
    print_lazy(results)


def print_built(results: dict[tuple[str, str], list[dict[str, Any]]]) -> None:
    rows = []
    for (way, argument), runs in results.items():
        if way == "lazy":
            continue
        n = int(argument)
        if "missing" in runs[0]:
            rows.append(["greedy", f"{n:.0e}", "not measured: no megatron-core, see --megatron", "", ""])
            continue
        nanoseconds = [run["seconds"] / n * 1e9 for run in runs]
        extrapolated = f"{np.median(nanoseconds) * FAR[0] / 1e9:,.0f} s"
        rows.append([way, f"{n:.0e}", spread(nanoseconds, 1), extrapolated, spread([run["MiB"] for run in runs], 0)])
    print("\nBuilt, all positions, one core")
    print(table(["way", "samples", "ns a sample", "2e9 samples (extrapolated)", "added peak MiB"], rows))


def print_lazy(results: dict[tuple[str, str], list[dict[str, Any]]]) -> None:
    rows = []
    for (way, which), runs in results.items():
        if way == "lazy":
            names = [name for name in runs[0] if " at " in name]
            rows.append([which, *(spread([run[name] for run in runs], 0) for name in names)])
            rows[-1][1:1] = [spread([run[name] for run in runs], 1) for name in ("set-up", "first")]
            rows[-1].append(spread([run["MiB"] for run in runs], 0))
    header = ["samples of a leaf", "set-up ms", "+ first ms", *(f"ns, {name}" for name in names), "added MiB"]
    print("\nLazy: nothing is built; ns a sample in batches of 1,024 and 65,536, at two positions")
    print(table(header, rows))


if __name__ == "__main__":
    main()
