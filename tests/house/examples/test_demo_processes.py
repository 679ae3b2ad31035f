from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.demo.processes import KillWatcher, children, is_alive, rank_process
from tests.testing import until

# Starts ranks as torchrun does, the last one first, so that order does not tell who is who; when all run, says so.
LAUNCHER = """
import os, subprocess, sys
sleeper = [sys.executable, "-S", "-c", "import time; print(flush=True); time.sleep(1000)"]
pipe = subprocess.PIPE
ranks = [subprocess.Popen(sleeper, env=os.environ | {"RANK": str(rank)}, stdout=pipe) for rank in (2, 1, 0)]
for rank in ranks:
    rank.stdout.readline()
print("started", flush=True)
codes = [rank.wait() for rank in ranks[:1]]
for rank in ranks[1:]:
    rank.terminate()
    rank.wait()
sys.exit(1)
"""


@pytest.fixture
def launcher() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-S", "-c", LAUNCHER], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        started = children(process.pid)
        yield process
        for pid in [process.pid, *started]:
            if is_alive(pid):
                os.kill(pid, 9)


def append(path: Path, *steps: int) -> None:
    with open(path, "a") as stream:
        stream.writelines(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in steps)


def test_children_are_those_of_one_process(launcher: subprocess.Popen[str]) -> None:
    assert len(children(launcher.pid)) == 3
    assert launcher.pid in children(os.getpid())
    assert children(children(launcher.pid)[0]) == []


def test_a_rank_is_found_by_its_number(launcher: subprocess.Popen[str]) -> None:
    last, middle, first = children(launcher.pid)
    assert [rank_process(launcher.pid, rank) for rank in range(4)] == [first, middle, last, None]


def test_the_watcher_kills_the_rank_when_the_step_is_done_and_only_once(
    launcher: subprocess.Popen[str], tmp_path: Path
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    watcher = KillWatcher(metrics, rank=2, after_step=3)
    last, middle, first = children(launcher.pid)

    watcher.look(launcher.pid)
    append(metrics, 1, 2)
    watcher.look(launcher.pid)
    assert watcher.kill is None
    assert launcher.poll() is None

    append(metrics, 3, 4)
    watcher.look(launcher.pid)
    kill = watcher.kill
    assert kill is not None
    assert (kill.rank, kill.pid, kill.step) == (2, last, 4)
    assert sorted(kill.others) == sorted([middle, first])

    append(metrics, 5)
    watcher.look(launcher.pid)
    assert watcher.kill is kill
    assert launcher.wait(timeout=100) == 1
    assert kill.survivors(patience=10.0) == []
    assert not is_alive(last)


def test_survivors_are_reported(launcher: subprocess.Popen[str], tmp_path: Path) -> None:
    append(tmp_path / "metrics.jsonl", 1)
    watcher = KillWatcher(tmp_path / "metrics.jsonl", rank=0, after_step=1)
    watcher.look(launcher.pid)
    assert watcher.kill is not None
    # This launcher looks at rank 2 only: the others live on.
    assert sorted(watcher.kill.survivors(patience=0.0)) == sorted(watcher.kill.others)


def test_a_process_that_has_ended_is_not_alive() -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as process:
        # Nobody has waited for it yet, so it is still in the table of processes.
        assert until(lambda: not is_alive(process.pid), 100)
    assert not is_alive(process.pid)
    assert is_alive(os.getpid())
