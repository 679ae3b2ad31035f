"""Time that importing all names of ``energon_lite`` adds to ``import torch``, in ms. The mark is 150 ms.

Each run is a fresh interpreter that does one of the two: ``import torch``, or ``import torch`` and then ``from
energon_lite import *``; they alternate. The clock starts inside the interpreter, just before the import, so its own
start does not count.

How to read it: "extra" is the difference of the two medians, once by the clock on the wall and once by the processor
time of the process, which a busy machine disturbs less. The ranges tell how much to trust it: if they are wider than
the difference, run it again on a quieter machine. The list below the table names the modules that cost most, from one
run with ``-X importtime``; it runs slower than the others, so look at the order, not at the numbers.

    python tools/bench/import_time.py --runs 9
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

from common import fresh_process, machine, spread, table

MARK = 150.0
_CODE = """
import time
wall, processor = time.perf_counter(), time.process_time()
{imports}
print([(time.perf_counter() - wall) * 1e3, (time.process_time() - processor) * 1e3])
"""
#: Names are imported at their first use: ``import energon_lite`` alone imports next to nothing.
_NAMES = "from energon_lite import *"
_KINDS = {"import torch": "import torch", f"import torch; {_NAMES}": f"import torch\n{_NAMES}"}


def slowest_modules(count: int) -> list[tuple[float, str]]:
    """Own milliseconds of the modules that ``energon_lite`` loads after torch, the slowest first."""
    code = f"import torch, sys; print('--', file=sys.stderr); {_NAMES}"
    command = [sys.executable, "-X", "importtime", "-c", code]
    trace = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    lines = [line for line in trace.split("--\n", 1)[1].splitlines() if line.startswith("import time:")]
    found = [line.removeprefix("import time:").split("|") for line in lines]
    return sorted(((int(own) / 1e3, name.strip()) for own, _, name in found), reverse=True)[:count]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=9, help="fresh interpreters of each kind")
    parser.add_argument("--modules", type=int, default=5, help="slowest modules to list")
    options = parser.parse_args()
    times: dict[str, list[list[float]]] = {kind: [] for kind in _KINDS}
    for run in range(-1, options.runs):  # the first pair only warms the page cache
        for kind, imports in _KINDS.items():
            found = fresh_process(code=_CODE.format(imports=imports))
            if run >= 0:
                times[kind].append(found)
    print(machine())
    rows = [
        [kind, *(spread(column, 0) for column in zip(*found, strict=True)), len(found)] for kind, found in times.items()
    ]
    print(table(["", "wall ms, median (min-max)", "processor ms, median (min-max)", "runs"], rows))
    for place, clock in enumerate(("wall", "processor")):
        bare, full = (statistics.median(found[place] for found in runs) for runs in times.values())
        print(f"extra, {clock}: {full - bare:.0f} ms (mark: {MARK:.0f} ms), ratio {full / bare:.3f}")
    print("\nslowest modules by themselves:")
    for milliseconds, name in slowest_modules(options.modules):
        print(f"  {milliseconds:6.1f} ms  {name}")


if __name__ == "__main__":
    main()
