"""A checkpoint saved by one layout of ranks is read by every other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from energon_lite.errors import StateMismatchError
from energon_lite.trainer.checkpointing import checkpoint
from energon_lite.trainer.checkpointing.checkpoint import latest_checkpoint
from tests.testing import nightly_but
from tests.trainer.parallel.late_collectives import watched_collectives
from tests.trainer.parallel.rank_processes import RunRanks
from tests.trainer.parallel.test_parity import Layout
from tests.trainer.parallel.training_part import STATE, Part

LAYOUTS = [
    Layout(tp=4),
    Layout(dp=2, tp=2),
    Layout(dp=4),
    Layout(),
    Layout(pp=2, virtual=2),
    Layout(tp=2, pp=2, sp=True),
    Layout(cp=2, dp=2),
    Layout(tp=2, pp=2, cp=2),
]


@pytest.mark.slow
@pytest.mark.parametrize("saved", nightly_but({6}, LAYOUTS), ids=str)
def test_each_layout_reads_others(run_ranks: RunRanks, tmp_path: Path, saved: Layout) -> None:
    # The next in a ring; each layout writes or reads. Itself: bit for bit, in a test below.
    read_by_others(run_ranks, tmp_path, saved, [LAYOUTS[(LAYOUTS.index(saved) + 1) % len(LAYOUTS)]])


@pytest.mark.nightly
@pytest.mark.parametrize("saved", LAYOUTS, ids=str)
def test_each_layout_reads_each_other(run_ranks: RunRanks, tmp_path: Path, saved: Layout) -> None:
    read_by_others(run_ranks, tmp_path, saved, LAYOUTS)


def read_by_others(run_ranks: RunRanks, tmp_path: Path, saved: Layout, others: list[Layout]) -> None:
    """All that was saved is read, by each of the others; then the run goes on as it would have."""
    # Tied embeddings are on two stages, and are saved once.
    shape = {"tie_embeddings": saved.pp == 1 or saved.virtual == 2}

    def save(rank: int) -> tuple[dict[str, torch.Tensor], list[tuple[float, float]]]:
        part = Part(saved, **shape)
        part.train(0, 2)
        part.save(tmp_path / "run", 2)
        return part.content(), part.train(2, 5)

    content, losses = run_ranks(saved.world, save)[0]
    path = latest_checkpoint(tmp_path / "run")
    assert path is not None and Path(path).name == "step-00000002"
    for layout in others:

        def load(rank: int, layout: Layout = layout) -> tuple[Any, ...]:
            part = Part(layout, seed=99, **shape)
            got = part.load(path)
            return got, part.optimizer.updates, part.content(), part.train(2, 5)

        for got, updates, loaded, continued in run_ranks(layout.world, load):
            assert (got, updates) == ((2, STATE), 2)
            assert loaded.keys() == content.keys()
            assert all(torch.equal(loaded[name], content[name]) for name in content)
            if layout == saved:
                assert continued == losses
            torch.testing.assert_close(continued, losses, rtol=1e-10, atol=1e-10)


def test_random_state_comes_back_in_the_same_layout(run_ranks: RunRanks, tmp_path: Path) -> None:
    def save(rank: int) -> float:
        torch.manual_seed(100 + rank)
        part = Part(Layout(dp=2))
        part.save(tmp_path, 1)
        return torch.rand(()).item()

    def load(rank: int) -> float:
        part = Part(Layout(dp=2))
        part.load(tmp_path / "step-00000001")
        return torch.rand(()).item()

    drawn = run_ranks(2, save)
    assert drawn[0] != drawn[1] and run_ranks(2, load) == drawn


def test_a_model_of_another_shape_is_refused(run_ranks: RunRanks, tmp_path: Path) -> None:
    def save_and_load(rank: int) -> list[str]:
        path = Part(Layout(tp=2)).save(tmp_path, 1)
        messages = []
        shapes: list[dict[str, Any]] = [{"ffn_size": 32}, {"num_layers": 5}]
        for shape in shapes:
            with pytest.raises(StateMismatchError) as caught:
                Part(Layout(tp=2), **shape).load(path)
            messages.append(str(caught.value))
        return messages

    for wider, deeper in run_ranks(2, save_and_load):
        assert "has shape [24, 32] for model.layers.0.mlp.gate_proj.weight" in wider
        assert "has nothing for model.layers.4." in deeper


# -- values that are still on their way ------------------------------------------------------------------------------


def test_a_checkpoint_has_the_values_of_the_last_step(run_ranks: RunRanks, tmp_path: Path) -> None:
    def save(rank: int) -> dict[str, torch.Tensor]:
        part = Part(Layout(dp=2))
        with watched_collectives(late=True):
            part.train(0, 2)
            part.save(tmp_path, 2)
        return part.content()

    def load(rank: int) -> dict[str, torch.Tensor]:
        part = Part(Layout(), seed=99)
        part.load(tmp_path / "step-00000002")
        return part.content()

    content, loaded = run_ranks(2, save)[0], run_ranks(1, load)[0]
    assert all(torch.equal(loaded[name], content[name]) for name in content)


def test_bfloat16_goes_on_bit_for_bit(run_ranks: RunRanks, tmp_path: Path) -> None:
    """Its master values are saved too; those of a model in float32 are the model."""

    def straight(rank: int) -> tuple[list[tuple[float, float]], bool]:
        part = Part(Layout(dp=2), dtype="bfloat16")
        losses = part.train(0, 3)
        path = part.save(tmp_path, 3)
        names = checkpoint.CheckpointReader(path).index.state_dict_metadata
        return losses + part.train(3, 5), "optimizer.norm.weight.master" in names

    def resumed(rank: int) -> list[tuple[float, float]]:
        part = Part(Layout(dp=2), dtype="bfloat16", seed=99)
        part.load(tmp_path / "step-00000003")
        return part.train(3, 5)

    def masters(layout: Layout) -> dict[str, torch.Tensor]:
        def job(rank: int) -> dict[str, torch.Tensor]:
            part = Part(layout, dtype="bfloat16", seed=99)
            part.load(tmp_path / "step-00000003")
            return {name: value for name, value in part.content().items() if name.endswith(".master")}

        return run_ranks(layout.world, job)[0]

    losses, has_masters = run_ranks(2, straight)[0]
    wanted = masters(Layout())
    for layout in (Layout(tp=2), Layout(pp=2)):
        found = masters(layout)
        assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in found)
        assert all(value.dtype == torch.float32 for value in found.values())
    assert has_masters and losses[3:] == run_ranks(2, resumed)[0]
