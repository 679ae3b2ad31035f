"""Runs of the demo: steps at which it acts, what is started and shown, and which rank is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.demo.errors import DemoError
from examples.demo.processes import KillWatcher, children, is_alive, rank_process
from examples.demo.run import Echo, Run
from examples.demo.steps import Steps
from tests.testing import until

# -- steps -------------------------------------------------------------------------------------------------------------


def config(path: Path, **train: int) -> Path:
    lines = ["data: {path: x}", "train:", *(f"  {key}: {value}" for key, value in train.items())]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_rank_is_killed_some_steps_after_the_last_checkpoint_before_the_end(tmp_path: Path) -> None:
    steps = Steps.of(config(tmp_path / "c.yaml", steps=400, save_every=100, keep=2))
    assert steps == Steps(total=400, resume=300, kill=333)
    assert steps.checkpoint == "step-00000300"


@pytest.mark.parametrize(
    ("train", "says"),
    [
        ({"steps": 400, "save_every": 0}, "saves too seldom"),
        ({"steps": 400, "save_every": 300}, "saves too seldom"),
        ({"steps": 4, "save_every": 2}, "saves too seldom"),
        ({"steps": 400, "save_every": 100, "keep": 1}, "set train.keep to 2"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path: Path, train: dict[str, int], says: str) -> None:
    with pytest.raises(DemoError, match=says):
        Steps.of(config(tmp_path / "c.yaml", **train))


# -- torchrun ----------------------------------------------------------------------------------------------------------


def test_the_command_is_what_one_would_type() -> None:
    run = Run(Path("c.yaml"), Path("out"), tp=2, overrides=["train.steps=3"])
    assert " ".join(run.command) == (
        "torchrun --standalone --nproc-per-node 4 examples/train.py c.yaml output=out mesh.tp=2 train.steps=3"
    )


def test_the_trainers_own_lines_are_shown_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    echo = Echo()
    echo.show(b"W1121 08:47:22.745 torch: a warning\n10:00:01 step 1 of ")
    echo.show(b"2: loss 3.0\n[rank1]: Traceback\n10:00:02 resumed from x\n10:00")
    echo.close()
    assert capsys.readouterr().out == "  10:00:01 step 1 of 2: loss 3.0\n  10:00:02 resumed from x\n"


def test_on_a_terminal_progress_takes_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    echo = Echo()
    echo.show(b"10:00:01 step 1 of 2: a\n10:00:02 step 2 of 2: b\n10:00:03 saved\n10:00:04 step 3 of 3: c\n")
    echo.close()
    shown = capsys.readouterr().out
    # What is left to see of each line is what came after the last return to its start.
    seen = [line.rpartition("\r\x1b[K")[2].strip() for line in shown.split("\n")]
    assert seen == ["10:00:02 step 2 of 2: b", "10:00:03 saved", "10:00:04 step 3 of 3: c", ""]


def test_the_end_of_a_log(tmp_path: Path) -> None:
    run = Run(Path("c.yaml"), tmp_path, tp=1)
    run.log.write_bytes(b"".join(b"%d \xff\n" % n for n in range(9)))
    assert run.tail(2) == "7 \ufffd\n8 \ufffd\n"


# -- processes ---------------------------------------------------------------------------------------------------------


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


def test_the_watcher_kills_the_rank_when_the_step_is_done_and_only_once(
    launcher: subprocess.Popen[str], tmp_path: Path
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    watcher = KillWatcher(metrics, rank=2, after_step=3)
    last, middle, first = children(launcher.pid)
    assert children(last) == [] and rank_process(launcher.pid, 3) is None

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
