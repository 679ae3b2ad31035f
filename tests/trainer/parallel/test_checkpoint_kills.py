"""Killed at any step of saving: the newest checkpoint that was whole is there, and nothing else counts as one."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from energon_lite.trainer.checkpointing.checkpoint import find_checkpoint, save_checkpoint
from energon_lite.trainer.checkpointing.files import CheckpointFiles
from tests.testing import die_at, nightly_but
from tests.trainer.parallel.copying_store import CopyingStore
from tests.trainer.parallel.rank_processes import RankFailure, RunRanks
from tests.trainer.parallel.test_parity import Layout
from tests.trainer.parallel.training_part import Part


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "url"), nightly_but({0, 1}, [(0, "{}"), (1, "{}"), (0, CopyingStore.protocol + "://{}")])
)
@pytest.mark.usefixtures("quick_disk")
def test_a_rank_killed_at_every_step_of_saving_loses_no_whole_checkpoint(
    run_ranks: RunRanks, tmp_path: Path, victim: int, url: str
) -> None:
    """The third of three, of which two are kept: it writes, and removes the first."""
    root = url.format(tmp_path / "run")

    def save(rank: int, numbers: tuple[int, ...], step: int | None = None) -> None:
        part = Part(Layout(dp=2), seed=99, num_layers=1)
        for number in numbers:
            fill(part, number)
            dist.barrier()
            if step is not None and rank == victim:
                die_at(step)
            save_checkpoint(root, number, part.model, part.optimizer, part.mesh, {"step": number}, keep=2)

    run_ranks(2, lambda rank: save(rank, (1, 2)))
    (tmp_path / "run").rename(tmp_path / "two")
    found = []
    for step in itertools.count():
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        shutil.copytree(tmp_path / "two", tmp_path / "run")
        try:
            run_ranks(2, lambda rank, step=step: save(rank, (3,), step))
        except RankFailure as failure:
            assert "died without a word" in failure.by_rank[victim], failure
        else:
            break
        files = CheckpointFiles(root)
        assert all(files.damage(name) is None for name in files.names())
        found += run_ranks(1, lambda rank: go_on(Part(Layout(), num_layers=1), root))
    assert found == sorted(found) and found[0] == 2 and (victim or found[-1] == 3), found
