"""Processes as torchrun starts them, but forked: the framework that runs in them makes its process group itself."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Job = Callable[[], Any]

# A forked child cannot use threads that its parent has started; with one thread, none are.
torch.set_num_threads(1)


def run_processes(world: int, job: Job, folder: Path, *, kill_when: Callable[[], bool] | None = None) -> list[Any]:
    """What ``job()`` returns on each of ``world`` processes, as JSON knows it.

    Args:
        job: reads ``RANK`` and the like, as under torchrun; one process has none of these.
        folder: for what the processes return.
        kill_when: SIGKILL to all of them as soon as this is true; then there are no results.
    """
    context = multiprocessing.get_context("fork")
    port = _free_port()
    results = [folder / f"result-{world}-{rank}" for rank in range(world)]
    for result in results:
        result.unlink(missing_ok=True)
    processes = [context.Process(target=_main, args=(rank, world, port, job, results[rank])) for rank in range(world)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + 100
    try:
        while any(process.is_alive() for process in processes):
            if kill_when is not None and kill_when():
                for process in processes:
                    process.kill()
                break
            failed = next((process.exitcode for process in processes if process.exitcode), None)
            assert failed is None and time.monotonic() < deadline, [
                path.read_text() for path in results if path.exists()
            ] or "too slow"
            time.sleep(0.005)
    finally:
        for process in processes:
            process.kill()
            process.join()
    if kill_when is not None:
        assert all(process.exitcode == -signal.SIGKILL for process in processes), "through before it was killed"
        return []
    assert not any(process.exitcode for process in processes), [path.read_text() for path in results if path.exists()]
    return [json.loads(path.read_text()) for path in results]


def _main(rank: int, world: int, port: int, job: Job, result: Path) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if world > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= {"TORCHELASTIC_RUN_ID": "tests", "GROUP_RANK": "0"}
    _forget_the_parent()
    try:
        result.write_text(json.dumps(job()))
    except BaseException:
        result.write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)  # exit handlers and buffers belong to the parent


def _forget_the_parent() -> None:
    """Accelerate keeps in which of how many processes it is, also over a fork."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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
