"""How much memory forked workers make their own, measured in a fresh interpreter.

The test process is no place for it: it has the heap of thousands of tests, and a worker copies each page of that whose
reference counts it touches.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Does what is measured, in each worker, and returns whether it went well.
Work = Callable[[], bool]


def private_growth(make_work: Callable[..., Work], *arguments: Any, workers: int = 4) -> list[int]:
    """By how many bytes the private memory of each worker grows, measured while all of them are alive.

    Args:
        make_work: a function at the top of a file that imports little more than what is measured. It is called in a
            fresh interpreter; workers forked from that do the work that it returns.
        arguments: for ``make_work``; numbers, texts and the like, as they go through JSON.
        workers: how many there are.
    """
    file = inspect.getsourcefile(make_work)
    told = json.dumps([file, make_work.__name__, arguments, workers])
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, __file__, told], capture_output=True, text=True, timeout=300, env=environment, check=False
    )
    assert not done.returncode, done.stderr
    growth: list[int] = json.loads(done.stdout)
    return growth


def _grown(work: Work, workers: int) -> list[int]:
    gc.collect()
    gc.freeze()  # else a collection in a child copies what it shares with this process
    ready, go, leave = os.pipe(), os.pipe(), os.pipe()
    answers = []
    for _ in range(workers):
        answer = os.pipe()
        if not os.fork():
            try:
                before = _private_memory()
                os.write(ready[1], b"." if work() else b"!")
                os.read(go[0], 1)  # a page counts as shared while another worker has it, too
                os.write(answer[1], str(_private_memory() - before).encode())
                os.read(leave[0], 1)  # none leaves before all have measured
                os._exit(0)
            except BaseException:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
        os.close(answer[1])
        answers.append(answer[0])
    os.close(ready[1])
    assert b"".join(os.read(ready[0], 1) for _ in range(workers)) == b"." * workers, "a worker failed"
    os.write(go[1], b"." * workers)
    growth = [int(os.read(end, 30)) for end in answers]
    os.write(leave[1], b"." * workers)
    assert all(os.wait()[1] == 0 for _ in range(workers)), "a worker failed"
    return growth


def _private_memory() -> int:
    """Bytes of this process that no other one shares, without those that are free."""
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) << 10 for line in file if line.startswith("Private_"))


if __name__ == "__main__":
    _file, _name, _arguments, _workers = json.loads(sys.argv[1])
    print(json.dumps(_grown(runpy.run_path(_file)[_name](*_arguments), _workers)))
