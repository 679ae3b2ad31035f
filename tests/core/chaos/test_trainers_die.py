"""Trainers that are killed, stopped or restarted: every step's samples are those of a run that nobody disturbed."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fork_server import run_program
from tests.testing import take, train_loader

STEPS = 60


def _train(path: Path, folder: Path, workers: int, pause: float = 0.002) -> None:
    """A loop as users write it: log each step, save every third, begin where the newest state says."""
    loader = train_loader(path, workers, batch_size=3)
    state = folder / "state.pt"
    step = 0
    if state.exists():
        saved = torch.load(state, weights_only=True)
        step = saved["step"]
        loader.restore_state_rank(saved["loader"])
    if step == STEPS:
        return
    with loader, open(folder / "log", "a") as log:
        log.write("\n")  # a killed run may have left half a line
        for batch in loader:
            step += 1
            log.write(json.dumps([step, batch.__key__]) + "\n")
            log.flush()
            time.sleep(pause)
            if step % 3 == 0:
                torch.save({"step": step, "loader": loader.save_state_rank()}, folder / "state.new")
                os.replace(folder / "state.new", state)
            if step == STEPS:
                break


def _logged(log: Path) -> list[tuple[int, tuple[str, ...]]]:
    """The steps in a log and the keys that each of them saw, as often as they were logged."""
    found = []
    for line in log.read_text().splitlines():
        try:
            step, keys = json.loads(line)
        except ValueError:
            continue  # empty, or cut off by a kill
        found.append((step, tuple(keys)))
    return found


@pytest.fixture(scope="module")
def undisturbed(leaf_of: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[str, ...]]:
    folder = tmp_path_factory.mktemp("undisturbed")
    _train(leaf_of(50, "a"), folder, 0, pause=0.0)
    return dict(_logged(folder / "log"))


@pytest.mark.parametrize(
    "workers, kills", [(0, 8), (2, 8), pytest.param(2, 100, marks=pytest.mark.nightly, id="2-nightly")]
)
def test_a_trainer_killed_again_and_again_sees_what_it_should(
    workers: int, kills: int, leaf_of: Any, tmp_path: Path, undisturbed: dict[int, tuple[str, ...]]
) -> None:
    draw = random.Random(workers)
    context = multiprocessing.get_context("fork")

    def start() -> Any:
        trainer = context.Process(target=_train, args=(leaf_of(50, "a"), tmp_path, workers))
        trainer.start()
        return trainer

    for _ in range(kills):
        trainer = start()
        trainer.join(draw.uniform(0.02, 0.2))
        if trainer.exitcode is None:
            os.kill(trainer.pid, signal.SIGKILL)
        else:  # through too early: once more from the start
            (tmp_path / "state.pt").unlink()
        trainer.join()
        assert trainer.exitcode in (0, -signal.SIGKILL)
    last = start()
    last.join(300)
    assert last.exitcode == 0
    logged = _logged(tmp_path / "log")
    assert {step for step, _ in logged} == set(range(1, STEPS + 1))
    for step, keys in logged:
        assert keys == undisturbed[step], step


PROGRAM = """
import json, os, random, signal, sys, threading, time
import torch, torch.distributed as dist
from energon_lite import WorkerConfig, get_savable_loader, get_train_dataset

path, folder, steps, kills, part = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
# Each attempt has entries of its own, or gloo would look for the ranks of the attempt before.
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 2, is_master=False)
store = dist.PrefixStore(f"attempt-{attempt}", store)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
config = WorkerConfig.default_worker_config(num_workers=1)
loader = get_savable_loader(get_train_dataset(path, batch_size=3, worker_config=config))
step, state = 0, os.path.join(folder, "state.pt")
if os.path.exists(state):
    saved = torch.load(state, weights_only=True)
    step = saved["step"]
    loader.restore_state_global(saved["loader"])
dist.barrier()
if attempt < kills:  # both ranks at about the same moment
    moment = random.Random(100 * part + attempt).uniform(0.0, 0.3)
    threading.Timer(moment, os.kill, (os.getpid(), signal.SIGKILL)).start()
with loader, open(os.path.join(folder, f"log-{rank}"), "a") as log:
    log.write("\\n")
    for batch in loader:
        step += 1
        log.write(json.dumps([step, batch.__key__]) + "\\n")
        log.flush()
        if step % 2 == 0:
            whole = loader.save_state_global()
            if rank == 0:
                torch.save({"step": step, "loader": whole}, state + ".new")
                os.replace(state + ".new", state)
        time.sleep(0.01)
        dist.barrier()
        if step >= steps and attempt >= kills:
            break
dist.destroy_process_group()
"""


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(5))
def test_torchrun_restarts_a_killed_trainer_and_nothing_is_lost(leaf_of: Any, tmp_path: Path, part: int) -> None:
    """Fifty kills in all, ten in each part."""
    program, steps, kills = tmp_path / "trainer.py", 40, 10
    program.write_text(PROGRAM)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["--monitor-interval=0.1", f"--max-restarts={kills + 5}"]
    command += [str(program), str(leaf_of(50, "a")), str(tmp_path), str(steps), str(kills), str(part)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = run_program(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]

    for rank in range(2):
        logged = _logged(tmp_path / f"log-{rank}")
        last = max(step for step, _ in logged)
        loader = train_loader(leaf_of(50, "a"), rank=rank, world_size=2, batch_size=3)
        expected = [tuple(batch.__key__) for batch in take(loader, last)]
        assert len(logged) > last, "nothing was done twice: no rank was restarted"
        assert {step for step, _ in logged} == set(range(1, last + 1))
        assert all(keys == expected[step - 1] for step, keys in logged)


def test_sigterm_leaves_time_for_an_emergency_save(leaf_of: Any, tmp_path: Path) -> None:
    """As a cluster does it: every process of the group gets the signal, workers included."""
    context, stop = multiprocessing.get_context("fork"), list[int]()
    busy, build = context.Event(), partial(train_loader, leaf_of(50, "a"), batch_size=3)

    def train() -> None:
        os.setsid()
        signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
        with build(2) as loader:
            for step, _ in enumerate(loader):
                if step == 5:
                    busy.set()
                time.sleep(0.005)
                if stop:
                    next_batch = next(iter(loader))  # the workers are still there
                    torch.save([loader.save_state_rank(), next_batch.__key__], tmp_path / "state.pt")
                    break

    trainer = context.Process(target=train)
    trainer.start()
    assert busy.wait(120)
    os.killpg(trainer.pid or 0, signal.SIGTERM)
    trainer.join(300)
    assert trainer.exitcode == 0
    state, key = torch.load(tmp_path / "state.pt", weights_only=True)
    keys = [batch.__key__ for batch in take(build(), state["position"] + 1)]
    assert keys[state["position"] - 1] == key
    assert next(iter(build().with_restored_state_rank(state))).__key__ == keys[state["position"]]
