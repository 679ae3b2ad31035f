"""Checkpoints that are written while training goes on, to other places than a disk, and that were damaged since."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from energon_lite.trainer.checkpointing.checkpoint import CheckpointSaver, find_checkpoint
from tests.testing import nightly_but
from tests.trainer.parallel.rank_processes import RunRanks
from tests.trainer.parallel.test_parity import Layout
from tests.trainer.parallel.training_part import STATE, Part


@pytest.mark.parametrize("layout", nightly_but({0}, [Layout(dp=2), Layout(pp=2, virtual=2, tp=2)]), ids=str)
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


def test_copies_of_a_save_are_waited_for_together_and_go_where_those_before_were(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    """On a GPU, a copy that blocks waits for all work before it: one wait for each tensor. New memory is slow."""

    def save(rank: int) -> tuple[int, int, bool]:
        part, copy = Part(Layout()), torch.Tensor.copy_
        saver, blocking, places = CheckpointSaver(tmp_path / "run", part.mesh), list[bool](), list[list[int]]()

        def counted(into: torch.Tensor, given: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            blocking.append(not non_blocking)
            places[-1].append(into.data_ptr())
            return copy(into, given, non_blocking)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "copy_", counted)
            for step in (1, 2):
                places.append([])
                saver.save(step, part.model, part.optimizer, STATE)
                saver.finish()
        return len(blocking), sum(blocking), places[0] == places[1]

    ((copies, waits, is_same),) = run_ranks(1, save)
    assert copies > 100 and waits == 0 and is_same


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])
