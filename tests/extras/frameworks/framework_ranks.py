"""Processes as torchrun starts them, but forked: the framework that runs in them makes its process group itself."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.testing import free_port
from tests.trainer.parallel.rank_processes import DIED, RankFailure, run_ranks

Job = Callable[[], Any]

# A forked child cannot use threads that its parent has started; with one thread, none are.
torch.set_num_threads(1)


def run_processes(world: int, job: Job, folder: Path, *, kill_when: Callable[[], bool] | None = None) -> list[Any]:
    """What ``job()`` returns on each of ``world`` processes.

    Args:
        job: reads ``RANK`` and the like, as under torchrun; one process has none of these.
        folder: for what the processes write.
        kill_when: SIGKILL to all of them as soon as this is true; then there are no results.
    """
    port = free_port()

    def run(rank: int) -> Any:
        if world > 1:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
            os.environ |= {"LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            os.environ |= {"TORCHELASTIC_RUN_ID": "tests", "GROUP_RANK": "0"}
        _forget_the_parent()
        if kill_when is not None:
            threading.Thread(target=_die, args=(kill_when,), daemon=True).start()
        return job()

    try:
        results = run_ranks(world, run, 100, folder=folder, group=False)
    except RankFailure as failure:
        if kill_when is None or set(failure.by_rank.values()) != {DIED[1]}:
            raise
        return []
    assert kill_when is None, "through before it was killed"
    return results


def _die(when: Callable[[], bool]) -> None:
    while not when():
        time.sleep(0.005)
    os.kill(os.getpid(), signal.SIGKILL)


def _forget_the_parent() -> None:
    """Accelerate keeps in which of how many processes it is, also over a fork."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def log_line(log: Path, **line: Any) -> None:
    """A line of JSON, whole even if the process is killed right after it."""
    with open(log, "a") as file:
        file.write(json.dumps(line) + "\n")


def logged(folder: Path, pattern: str) -> list[dict[str, Any]]:
    """The lines of all logs; one that a kill cut off is none."""
    found = []
    for path in sorted(folder.glob(pattern)):
        for line in path.read_text().splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
    return found
