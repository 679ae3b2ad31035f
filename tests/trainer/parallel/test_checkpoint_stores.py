"""Checkpoints of several ranks on what is no disk: S3, as moto's server has it, and a store without rename."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from energon_lite.trainer.checkpointing.checkpoint import CheckpointSaver, find_checkpoint, read_state, save_checkpoint
from energon_lite.trainer.checkpointing.files import CheckpointFiles
from tests.testing import nightly_but
from tests.trainer.parallel.copying_store import CopyingStore
from tests.trainer.parallel.rank_processes import RankFailure, RunRanks
from tests.trainer.parallel.test_checkpoint_crashes import kill_instead, sabotage
from tests.trainer.parallel.test_parity import Layout
from tests.trainer.parallel.training_part import STATE, Part


@pytest.fixture(params=["s3", CopyingStore.protocol, pytest.param("file", marks=pytest.mark.nightly)])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL for the checkpoints of a run."""
    if request.param != "s3":
        return f"{request.param}://{tmp_path}/run"
    return f"{request.getfixturevalue('s3')}/{tmp_path.name}/run"


def make_bucket(root: str) -> None:
    files = CheckpointFiles(root)
    bucket = files.base.partition("/")[0]
    if bucket and not files.fs.exists(bucket):
        files.fs.mkdir(bucket)


@pytest.mark.slow
def test_ranks_save_there_and_others_load(run_ranks: RunRanks, root: str) -> None:
    def save(rank: int) -> tuple[dict[str, torch.Tensor], list[str]]:
        part = Part(Layout(dp=2))
        if rank == 0:
            make_bucket(root)
        part.mesh.barrier()
        part.train(0, 1)
        saver = CheckpointSaver(root, part.mesh, keep=2)
        for step in (1, 2):
            saver.save(step, part.model, part.optimizer, STATE)
        saver.finish()
        part.train(1, 3)
        # Once more the same step, over a finished one.
        for step in (3, 3):
            save_checkpoint(root, step, part.model, part.optimizer, part.mesh, STATE, keep=2)
        return part.content(), saver.files.names()

    def load(rank: int) -> tuple[dict[str, torch.Tensor], str]:
        part = Part(Layout(tp=2), seed=99)
        path = find_checkpoint(root, part.mesh)
        assert path is not None and part.load(path) == (3, STATE) and read_state(path) == STATE
        return part.content(), str(path)

    content, names = run_ranks(2, save)[0]
    assert names == ["step-00000002", "step-00000003"]
    for loaded, path in run_ranks(2, load):
        assert path.endswith("/run/step-00000003") and loaded.keys() == content.keys()
        assert all(torch.equal(loaded[name], content[name]) for name in content)


DAMAGES = [(CopyingStore.protocol, damage) for damage in ("killed", "a part", "a bit", "manifest")]


@pytest.mark.parametrize(
    ("root", "damage"), nightly_but({0, 3, 4, 5}, [("s3", "killed"), ("s3", "a bit"), *DAMAGES]), indirect=["root"]
)
def test_what_is_not_whole_there_is_passed_over(run_ranks: RunRanks, root: str, damage: str) -> None:
    def save(rank: int) -> None:
        part = Part(Layout(dp=2))
        if rank == 0:
            make_bucket(root)
        part.mesh.barrier()
        save_checkpoint(root, 1, part.model, part.optimizer, part.mesh, STATE)
        if damage == "killed" and rank == 0:
            sabotage("CheckpointFiles.publish", lambda _: kill_instead)
        save_checkpoint(root, 2, part.model, part.optimizer, part.mesh, STATE)
        if rank == 0:
            spoil(CheckpointFiles(root), "step-00000002", damage)

    def find(rank: int) -> str:
        return os.path.basename(str(find_checkpoint(root, Part(Layout(dp=2)).mesh)))

    if damage == "killed":
        with pytest.raises(RankFailure):
            run_ranks(2, save)
    else:
        run_ranks(2, save)
    assert run_ranks(2, find) == ["step-00000001"] * 2


def spoil(files: CheckpointFiles, name: str, damage: str) -> None:
    folder = f"{files.base}/{name}"
    if damage == "manifest":
        files.fs.rm_file(f"{folder}/manifest.json")
        return
    victim = next(path for path in files.fs.ls(folder, detail=False) if path.endswith("_0.distcp"))
    data = bytearray(files.fs.cat_file(victim))
    if damage == "a part":
        del data[-1]
    else:
        data[len(data) // 2] ^= 1
    files.fs.pipe_file(victim, bytes(data))
