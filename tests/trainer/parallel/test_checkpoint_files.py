"""Checkpoints that are written while training goes on, to other places than a disk, and that were damaged since."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from energon_lite.errors import StateError
from energon_lite.trainer.checkpointing.checkpoint import CheckpointSaver, find_checkpoint, latest_checkpoint
from tests.trainer.parallel.rank_processes import RunRanks
from tests.trainer.parallel.test_parity import Layout
from tests.trainer.parallel.training_part import STATE, Part


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(pp=2, virtual=2, tp=2)], ids=str)
def test_what_is_written_meanwhile_is_what_was_there_at_the_call(
    run_ranks: RunRanks, tmp_path: Path, layout: Layout
) -> None:
    def save(rank: int) -> tuple[dict[str, torch.Tensor], list[tuple[float, float]]]:
        part = Part(layout)
        part.train(0, 2)
        content = part.content()
        saver = CheckpointSaver(tmp_path / "run", part.mesh)
        saver.save(2, part.model, part.optimizer, STATE)
        losses = part.train(2, 4)
        saver.finish()
        return content, losses

    def load(rank: int) -> tuple[dict[str, torch.Tensor], list[tuple[float, float]]]:
        part = Part(layout, seed=99)
        path = find_checkpoint(tmp_path / "run", part.mesh)
        assert path is not None and part.load(Path(path)) == (2, STATE)
        return part.content(), part.train(2, 4)

    (content, losses), (loaded, continued) = run_ranks(layout.world, save)[0], run_ranks(layout.world, load)[0]
    assert continued == losses and content.keys() == loaded.keys()
    assert all(torch.equal(loaded[name], content[name]) for name in content)


def test_a_place_that_is_no_disk(run_ranks: RunRanks) -> None:
    def save_and_load(rank: int) -> bool:
        part, root = Part(Layout()), "memory://run"
        saver = CheckpointSaver(root, part.mesh, keep=2)
        for step in (1, 2, 3):
            part.train(step - 1, step)
            saver.save(step, part.model, part.optimizer, STATE)
        saver.finish()
        content, other = part.content(), Part(Layout(), seed=99)
        path = latest_checkpoint(root)
        assert path is not None and other.load(path) == (3, STATE)
        assert saver.files.names() == ["step-00000002", "step-00000003"]
        return all(torch.equal(value, content[name]) for name, value in other.content().items())

    assert run_ranks(1, save_and_load) == [True]


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def test_a_checkpoint_that_cannot_be_written_is_an_error_at_the_next_call(run_ranks: RunRanks, tmp_path: Path) -> None:
    def save(rank: int) -> str:
        part = Part(Layout())
        (tmp_path / "run").write_text("a file, not a folder")
        saver = CheckpointSaver(tmp_path / "run", part.mesh)
        saver.save(1, part.model, part.optimizer, STATE)
        with pytest.raises(StateError) as caught:
            saver.finish()
        saver.finish()
        return str(caught.value)

    assert "could not be written" in run_ranks(1, save)[0]
