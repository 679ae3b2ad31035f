"""However a process ends that uses a loader, and whatever it left open: it ends, and leaves nothing behind."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.testing import nightly_but, until

PROGRAM = """
import json, sys
case, path = json.loads(sys.argv[1]), sys.argv[2]

def first_finalize():
    import tempfile
    return tempfile.TemporaryDirectory(prefix="users-own-")

if case["multiprocessing"] == "before":
    import multiprocessing.util
if case["finalize"] == "before":
    folder = first_finalize()
import torch
import multiprocessing.util
if case["finalize"] == "after":
    folder = first_finalize()

import os, signal, threading, time
from energon_lite import TaskEncoder, WorkerConfig, get_savable_loader, get_train_dataset

class Slow(TaskEncoder):
    def encode_batch(self, batch):
        time.sleep(900 if self.current_batch_index > 15 else 0)  # not beside the first: threads take turns
        return batch

def end(*_):
    if case["kill"] and multiprocessing.active_children():
        os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
    match case["ending"]:
        case "exit":
            sys.exit(3)
        case "exception":
            raise RuntimeError("a user's own")
        case "KeyboardInterrupt":
            raise KeyboardInterrupt
        case "normal":
            return
        case name:
            os.kill(os.getpid(), signal.Signals[name])
            time.sleep(10)

if __name__ == "__main__":
    slow = case["loader"] == "in a batch"
    # A spawned worker imports all anew, which takes seconds: two where one of them is killed.
    config = WorkerConfig(rank=0, world_size=1, num_workers=2 if case["kill"] or case["method"] != "spawn" else 1)
    dataset = get_train_dataset(path, batch_size=4, worker_config=config, task_encoder=Slow() if slow else None)
    loader = get_savable_loader(dataset, start_method=case["method"])
    batches = iter(loader)
    next(batches)
    print("started", flush=True)
    if case["loader"] == "closed":
        loader.close()
    elif slow and case["ending"] in ("exit", "exception", "KeyboardInterrupt"):
        signal.signal(signal.SIGALRM, end)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        for batch in batches:
            pass
    elif slow:  # the main thread ends while another one waits
        threading.Thread(target=list, args=(batches,), daemon=True).start()
        time.sleep(0.3)
    end()
"""

CHOICES: dict[str, list[Any]] = {
    "ending": ["normal", "exit", "exception", "KeyboardInterrupt", "SIGTERM", "SIGABRT", "SIGKILL"],
    "method": ["fork", "forkserver", "spawn", "thread"],
    "loader": ["open", "in a batch", "closed"],
    "finalize": ["before", "after"],
    "multiprocessing": ["before", "after"],
    "kill": [False, True],
}
CODES = {"normal": 0, "exit": 3, "exception": 1, "KeyboardInterrupt": -signal.SIGINT}


def _all_cases() -> list[dict[str, Any]]:
    return [dict(zip(CHOICES, values, strict=True)) for values in itertools.product(*CHOICES.values())]


#: Of all cases, so many that each choice is in one of them.
FIRST = {0, 161, 224, 373, 411, 495, 578}


def _name(case: dict[str, Any]) -> str:
    return "-".join(str(value).replace(" ", "_") for value in case.values())


def _living(mark: str) -> list[str]:
    """What processes there are that have inherited a mark, zombies not counted."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                if mark.encode() in (folder / "environ").read_bytes():
                    found.append((folder / "cmdline").read_text().replace("\0", " "))
            except OSError:
                pass
    return found


def _run(case: dict[str, Any], path: Path, folder: Path) -> None:
    """Run a program that ends like this."""
    program, temporary = folder / "trainer.py", folder / "t"
    program.write_text(PROGRAM)
    temporary.mkdir()
    mark = f"OF_THIS_TEST={folder}"
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": os.pathsep.join(sys.path)}
    environment["OF_THIS_TEST"] = str(folder)
    command = [sys.executable, str(program), json.dumps(case), str(path)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None and run.stderr is not None
        assert run.stdout.readline() == "started\n", run.stderr.read()
        try:
            _, errors = run.communicate(timeout=120)  # before the hook
        except subprocess.TimeoutExpired:
            run.kill()
            pytest.fail("it did not end: " + str(_living(mark)))
        wanted = CODES[case["ending"]] if case["ending"] in CODES else -signal.Signals[case["ending"]]
        assert run.returncode == wanted, errors
    assert until(lambda: not _living(mark)), _living(mark)
    assert until(lambda: {one.name.startswith("users-own-") for one in temporary.iterdir()} <= {True})


@pytest.mark.parametrize("case", nightly_but(FIRST, _all_cases()), ids=_name)
def test_choices(case: dict[str, Any], leaf_of: Any) -> None:
    with tempfile.TemporaryDirectory(prefix="exits-") as folder:  # with a short name, or no socket fits into it
        _run(case, leaf_of(50, "a"), Path(folder))
