"""Find a rank among the processes of ``torchrun``, and kill it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from examples.demo.losses import last_step


def children(pid: int) -> list[int]:
    """The living child processes of ``pid``, oldest first; an empty list if it has ended."""
    if Path("/proc/self/stat").exists():
        pairs = _pairs_of_proc()
    else:
        listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True)
        pairs = [(int(a), int(b)) for a, b in (line.split() for line in listed.stdout.splitlines())]
    return sorted(child for child, parent in pairs if parent == pid)


def rank_process(launcher: int, rank: int) -> int | None:
    """The process of a rank; None: it has not started, or has ended.

    Args:
        launcher: the process of ``torchrun``.
        rank: 0 for the first.
    """
    started = children(launcher)
    for pid in started:
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            # No /proc on this system, or the process has just ended. torchrun starts ranks in their order.
            return started[rank] if rank < len(started) else None
        if f"RANK={rank}".encode() in environment:
            return pid
    return None


def is_alive(pid: int) -> bool:
    """True if a process exists and is not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z"
    except OSError:
        if Path("/proc/self/stat").exists():
            return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@dataclass(frozen=True)
class Kill:
    """A rank that was killed.

    Args:
        rank: which.
        pid: its process.
        step: the last step that the metrics file had then.
        others: the processes of the other ranks, and the loader workers of all.
    """

    rank: int
    pid: int
    step: int
    others: tuple[int, ...]

    def survivors(self, patience: float = 10.0) -> list[int]:
        """Those of :attr:`others` that still live after ``patience`` seconds; returns as soon as there is none."""
        deadline = time.monotonic() + patience
        while True:
            alive = [pid for pid in self.others if is_alive(pid)]
            if not alive or time.monotonic() > deadline:
                return alive
            time.sleep(0.05)


class KillWatcher:
    """Kills one rank with SIGKILL after a given step.

    Args:
        metrics: the run's metrics file.
        rank: the rank to kill.
        after_step: the step to wait for.

    Example:
        >>> watcher = KillWatcher(output / "metrics.jsonl", rank=3, after_step=340)
        >>> while watcher.kill is None:
        ...     watcher.look(torchrun.pid)
    """

    def __init__(self, metrics: Path, *, rank: int, after_step: int):
        self.metrics, self.rank, self.after_step = metrics, rank, after_step
        self.kill: Kill | None = None

    def look(self, launcher: int) -> None:
        """Kill the rank if the step is done and it still lives. To be called often.

        Args:
            launcher: the process of ``torchrun``.
        """
        if self.kill is not None:
            return
        step = last_step(self.metrics)
        if step < self.after_step:
            return
        pid = rank_process(launcher, self.rank)
        if pid is None:
            return
        ranks = children(launcher)
        workers = [worker for rank in ranks for worker in children(rank)]
        os.kill(pid, signal.SIGKILL)
        self.kill = Kill(self.rank, pid, step, tuple(other for other in [*ranks, *workers] if other != pid))


def _pairs_of_proc() -> list[tuple[int, int]]:
    """(process, parent) of all processes, from Linux' /proc."""
    pairs = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # The program's name stands in parentheses and may contain anything; the parent is the second field after.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        pairs.append((int(entry.name), int(fields[1])))
    return pairs
