"""Killed at any moment of saving: the newest checkpoint that was whole is there, and nothing else counts as one."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from energon_lite.trainer.checkpointing.checkpoint import CheckpointSaver, find_checkpoint, save_checkpoint
from energon_lite.trainer.checkpointing.files import CheckpointFiles
from tests.testing import die_at
from tests.trainer.parallel.copying_store import CopyingStore
from tests.trainer.parallel.rank_processes import RankFailure, RunRanks
from tests.trainer.parallel.test_parity import Layout
from tests.trainer.parallel.training_part import Part

LAYOUTS = [Layout(dp=2), Layout(tp=2)]


def fill(part: Part, step: int) -> None:
    """Make the step's number of all that is saved."""
    part.optimizer.wait_parameters()
    with torch.no_grad():
        for p in part.model.parameters():
            p.fill_(step)
    for shard in part.optimizer.shards():
        for tensor in shard.tensors.values():
            tensor.fill_(step)


def assert_filled(part: Part, step: int) -> None:
    values = [*part.model.parameters(), *(t for shard in part.optimizer.shards() for t in shard.tensors.values())]
    assert all(bool((value == step).all()) for value in values), f"not all of step {step} is in its checkpoint"


def go_on(part: Part, root: str) -> int:
    """Load the newest checkpoint, see that it is one step and no mixture of two, and return its number."""
    path = find_checkpoint(root, part.mesh)
    if path is None:
        return 0
    step, state = part.load(path)
    assert state == {"step": step}
    assert_filled(part, step)
    return step


def kill_after(seconds: float, pause: float, pids: list[int]) -> None:
    """From a process of its own: one rank first, the others a moment later."""
    if os.fork() == 0:
        time.sleep(seconds)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            time.sleep(pause)
        os._exit(0)


def keep_saving(part: Part, root: str, log: Path, *, first: int, last: int, meanwhile: bool) -> None:
    """Save steps ``first..last``; the log has those of which saving has returned."""
    saver = CheckpointSaver(root, part.mesh)
    for step in range(first, last + 1):
        fill(part, step)
        if meanwhile:
            saver.save(step, part.model, part.optimizer, {"step": step})
            fill(part, -1)  # training goes on
            saver.finish()
        else:
            save_checkpoint(root, step, part.model, part.optimizer, part.mesh, {"step": step})
        if part.mesh.is_main:
            with log.open("a") as stream:
                stream.write(f"{step}\n")


def check(run_ranks: RunRanks, root: str, log: Path, trials: int, seed: int) -> None:
    generator = random.Random(seed)

    def undisturbed(rank: int) -> float:
        part = Part(LAYOUTS[0], num_layers=1)
        keep_saving(part, root, log, first=1, last=1, meanwhile=True)
        began = time.perf_counter()
        keep_saving(part, root, log, first=2, last=4, meanwhile=True)
        return (time.perf_counter() - began) / 3

    of_one = run_ranks(2, undisturbed)[0]
    moments = set()
    for trial in range(trials):
        seconds, pause = generator.uniform(0.0, 3.0 * of_one), generator.choice([0.0, 0.5 * of_one])
        layout, meanwhile, first_victim = LAYOUTS[trial % 2], generator.random() < 0.5, generator.randrange(2)

        def victim(
            rank: int,
            layout: Layout = layout,
            meanwhile: bool = meanwhile,
            first_victim: int = first_victim,
            when: tuple[float, float] = (seconds, pause),
        ) -> None:
            part = Part(layout, seed=99, num_layers=1)
            found = go_on(part, root)
            known = int(log.read_text().split()[-1])
            assert found in (known, known + 1), f"step {known} was saved, {found} was found"
            pids: list[int] = [0, 0]
            dist.all_gather_object(pids, os.getpid())
            if rank == 0:
                log.write_text(f"{found}\n")
                kill_after(*when, sorted(pids, key=lambda pid: pid != pids[first_victim]))
            dist.barrier()
            keep_saving(part, root, log, first=found + 1, last=found + 10_000, meanwhile=meanwhile)

        with pytest.raises(RankFailure) as failure:
            run_ranks(2, victim)
        assert all("died without a word" in text or "onnection" in text for text in failure.value.by_rank.values()), (
            failure.value
        )
        files = CheckpointFiles(root)
        whole = files.names()
        assert len(whole) >= 1 and all(files.damage(name) is None for name in whole)
        assert all(files.fs.exists(f"{files.base}/{name}/manifest.json") for name in whole), "half of one counts"
        unfinished = [path for path in files.fs.find(files.base) if not {*path.split("/")} & {*whole, "latest"}]
        finished = log.read_text().count("\n") - 1
        moments.add((finished, len(unfinished)))
    assert len(moments) > 1 or trials < 10, "all kills came at the same moment"

    def last(rank: int) -> int:
        return go_on(Part(Layout(), seed=99, num_layers=1), root)

    known = int(log.read_text().split()[-1])
    assert run_ranks(1, last)[0] in (known, known + 1)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.usefixtures("quick_disk")
def test_a_rank_killed_at_every_step_of_saving_loses_no_whole_checkpoint(
    run_ranks: RunRanks, tmp_path: Path, victim: int
) -> None:
    """The third of three, of which two are kept: it writes, and removes the first."""
    root, layout = str(tmp_path / "run"), Layout(dp=2)

    def save(rank: int, step: int) -> None:
        part = Part(layout, seed=99, num_layers=1)
        for number in (1, 2, 3):
            fill(part, number)
            dist.barrier()
            if number == 3 and rank == victim:
                die_at(step)
            save_checkpoint(root, number, part.model, part.optimizer, part.mesh, {"step": number}, keep=2)

    found = []
    for step in itertools.count():
        shutil.rmtree(root, ignore_errors=True)
        try:
            run_ranks(2, lambda rank, step=step: save(rank, step))
        except RankFailure as failure:
            assert "died without a word" in failure.by_rank[victim], failure
        else:
            break
        files = CheckpointFiles(root)
        assert all(files.damage(name) is None for name in files.names())
        found += run_ranks(1, lambda rank: go_on(Part(Layout(), num_layers=1), root))
    assert found == sorted(found) and found[0] == 2 and (victim or found[-1] == 3), found


def root_of(kind: str, tmp_path: Path) -> str:
    return str(tmp_path / "run") if kind == "disk" else f"{CopyingStore.protocol}://{tmp_path}/run"


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["disk", "store"])
def test_a_hundred_kills_lose_no_whole_checkpoint(run_ranks: RunRanks, tmp_path: Path, kind: str) -> None:
    check(run_ranks, root_of(kind, tmp_path), tmp_path / "log", trials=100, seed=random.randrange(2**32))
