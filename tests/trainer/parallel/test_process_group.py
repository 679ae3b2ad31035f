"""A rank that is done leaves in peace, however late gloo's threads are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TRIALS = 2

# Late: gloo's threads get the processor only when nobody else wants it, and all share one. The interpreter ends slowly:
# while it sleeps in the middle of ending, they go on. With destroy_process_group alone, nearly every trial dies. On a
# busy machine they get it after many seconds, for which the limit of the wait must leave time.
SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
from energon_lite.trainer.parallel import mesh

mesh._LIMIT = 1000.0

class EndsSlowly:
    def __init__(self):
        self.sleep = time.sleep
    def __del__(self):
        self.sleep(0.2)

def be_late():
    for thread in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{thread}/comm") as name:
            if "gloo" in name.read():
                os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))

torch.set_num_threads(1)
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
room, trials = sys.argv[1], int(sys.argv[2])
died = 0
for trial in range(trials):
    ranks = []
    for rank in range(2):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            dist.init_process_group("gloo", init_method=f"file://{room}/{trial}", rank=rank, world_size=2)
            everyone, group = dist.group.WORLD, dist.new_group([0, 1])
            dist.all_reduce(torch.ones(1), group=group)
            be_late()
            dist.all_reduce(torch.ones(1), group=group)
            mesh.end_process_group()
            ends_slowly = EndsSlowly()
            sys.exit(0)
    died += sum(os.waitpid(rank, 0)[1] != 0 for rank in ranks)
print(died)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="needs Linux' scheduling classes")
def test_an_interpreter_ends_well_after_late_threads(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), str(TRIALS)], capture_output=True, text=True, timeout=400
    )
    assert (done.returncode, done.stdout.strip()) == (0, "0"), done.stderr
