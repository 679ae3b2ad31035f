"""A checkpoint saved by one layout of ranks is read by every other: from a disk, from S3, as moto's server has it, and
from a store without rename; also if it is written while training goes on."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from energon_lite.errors import StateMismatchError
from energon_lite.trainer.checkpointing import checkpoint
from energon_lite.trainer.checkpointing.checkpoint import (
    CheckpointSaver,
    find_checkpoint,
    latest_checkpoint,
    read_state,
)
from energon_lite.trainer.optimizer.config import OptimizerConfig
from energon_lite.trainer.optimizer.overlapped_optimizer import OverlappedDistributedOptimizer
from tests.testing import nightly_but
from tests.trainer.parallel.copying_store import CopyingStore
from tests.trainer.parallel.late_collectives import watched_collectives
from tests.trainer.parallel.rank_processes import RankFailure, RunRanks
from tests.trainer.parallel.test_damaged_checkpoints import damage
from tests.trainer.parallel.test_parity import Layout
from tests.trainer.parallel.training_part import STATE, Part, assert_equal, die_before_publishing

Content = dict[str, torch.Tensor]
Losses = list[tuple[float, float]]
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
@pytest.mark.parametrize(
    ("saved", "others"),
    nightly_but({0}, [(LAYOUTS[6], LAYOUTS[7:]), *((layout, LAYOUTS) for layout in LAYOUTS)]),
    ids=lambda given: str(given) if isinstance(given, Layout) else f"by {len(given)}",
)
def test_each_layout_reads_others(run_ranks: RunRanks, tmp_path: Path, saved: Layout, others: list[Layout]) -> None:
    """All that was saved is read, by each of the others; then the run goes on as it would have."""
    # Tied embeddings are on two stages, and are saved once.
    shape = {"tie_embeddings": saved.pp == 1 or saved.virtual == 2}

    def save(rank: int) -> tuple[Content, Losses]:
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
            assert_equal(loaded, content)
            if layout == saved:
                assert continued == losses
            torch.testing.assert_close(continued, losses, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("layout", nightly_but({0}, [Layout(dp=2), Layout(pp=2, virtual=2, tp=2)]), ids=str)
def test_what_is_written_meanwhile_is_what_was_there_at_the_call(
    run_ranks: RunRanks, tmp_path: Path, layout: Layout
) -> None:
    """Values that were still on their way are waited for, and the state of random numbers is each rank's own."""

    def save(rank: int) -> tuple[Content, Losses, float]:
        torch.manual_seed(100 + rank)
        part = Part(layout)
        saver = CheckpointSaver(tmp_path / "run", part.mesh)
        with watched_collectives(late=True):
            part.train(0, 2)
            saver.save(2, part.model, part.optimizer, STATE)
        drawn = torch.rand(()).item()
        content, losses = part.content(), part.train(2, 4)
        saver.finish()
        return content, losses, drawn

    def load(rank: int) -> tuple[Content, Losses, float]:
        part = Part(layout, seed=99)
        path = find_checkpoint(tmp_path / "run", part.mesh)
        assert path is not None and part.load(Path(path)) == (2, STATE)
        drawn = torch.rand(()).item()
        return part.content(), part.train(2, 4), drawn

    saved, loaded = run_ranks(layout.world, save), run_ranks(layout.world, load)
    assert_equal(loaded[0][0], saved[0][0])
    assert [(losses, drawn) for _, losses, drawn in loaded] == [(losses, drawn) for _, losses, drawn in saved]
    assert len({drawn for _, _, drawn in saved}) == layout.world


def test_copies_of_a_save_go_where_those_before_were(run_ranks: RunRanks, tmp_path: Path) -> None:
    """New memory is slow."""

    def save(rank: int) -> list[list[int]]:
        part, copy, places = Part(Layout()), torch.Tensor.copy_, list[list[int]]()
        saver = CheckpointSaver(tmp_path / "run", part.mesh)

        def noted(into: torch.Tensor, given: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            places[-1].append(into.data_ptr())
            return copy(into, given, non_blocking)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "copy_", noted)
            for step in (1, 2):
                places.append([])
                saver.save(step, part.model, part.optimizer, STATE)
                saver.finish()
        return places

    ((first, second),) = run_ranks(1, save)
    assert first == second and len(first) > 100


def test_a_model_of_another_shape_is_refused_and_another_optimizer(run_ranks: RunRanks, tmp_path: Path) -> None:
    def save_and_load(rank: int) -> list[str]:
        part = Part(Layout(tp=2))
        path = part.save(tmp_path, 1)
        part.optimizer.close()
        part.optimizer = OverlappedDistributedOptimizer(part.model, part.mesh, OptimizerConfig(algorithm="sgd"))
        messages, shapes = [], [("ffn_size", 32), ("num_layers", 5), ("num_layers", 3)]
        for other in (*(Part(Layout(tp=2), **{name: size}) for name, size in shapes), part):
            with pytest.raises(StateMismatchError) as caught:
                other.load(path)
            messages.append(str(caught.value))
        return messages

    for wider, deeper, flatter, moments in run_ranks(2, save_and_load):
        assert "has model.layers.3." in flatter and ", which the model has not" in flatter
        assert ".momentum_buffer" in moments and "optimizer.algorithm" in moments and "train.init_from" in moments
        assert "has shape [24, 32] for model.layers.0.mlp.gate_proj.weight" in wider
        assert "has nothing for model.layers.4." in deeper


def test_bfloat16_goes_on_bit_for_bit(run_ranks: RunRanks, tmp_path: Path) -> None:
    """Its master values are saved too; those of a model in float32 are the model."""

    def straight(rank: int) -> tuple[Losses, bool]:
        part = Part(Layout(dp=2), dtype="bfloat16")
        losses = part.train(0, 3)
        path = part.save(tmp_path, 3)
        names = checkpoint.CheckpointReader(path).index.state_dict_metadata
        return losses + part.train(3, 5), "optimizer.norm.weight.master" in names

    def resumed(rank: int) -> Losses:
        part = Part(Layout(dp=2), dtype="bfloat16", seed=99)
        part.load(tmp_path / "step-00000003")
        return part.train(3, 5)

    def masters(layout: Layout) -> Content:
        def job(rank: int) -> Content:
            part = Part(layout, dtype="bfloat16", seed=99)
            part.load(tmp_path / "step-00000003")
            return {name: value for name, value in part.content().items() if name.endswith(".master")}

        return run_ranks(layout.world, job)[0]

    losses, has_masters = run_ranks(2, straight)[0]
    wanted = masters(Layout())
    for layout in (Layout(tp=2), Layout(pp=2)):
        assert_equal(masters(layout), wanted)
    assert all(value.dtype == torch.float32 for value in wanted.values())
    assert has_masters and losses[3:] == run_ranks(2, resumed)[0]


@pytest.mark.parametrize(("there", "here"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_another_type_rounds_no_master_values(run_ranks: RunRanks, tmp_path: Path, there: str, here: str) -> None:
    def masters(content: Content, dtype: str) -> Content:
        narrow = dtype == "bfloat16"
        return {
            name: content[f"{name}.master"] if narrow else content[name]
            for name in content
            if f"{name}.master" in content
        }

    def save(rank: int) -> Content:
        part = Part(Layout(dp=2), dtype=there)
        part.train(0, 2)
        part.save(tmp_path, 2)
        return masters(part.content(), there)

    def load(rank: int) -> tuple[Content, Content]:
        part = Part(Layout(tp=2), dtype=here, seed=99)
        part.load(tmp_path / "step-00000002")
        content = part.content()
        return masters(content, here), content

    saved, (loaded, content) = run_ranks(2, save)[0], run_ranks(2, load)[0]
    assert_equal(loaded, saved)
    assert all(torch.equal(content[name], value.to(content[name].dtype)) for name, value in saved.items())


# -- what is no disk ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ranks_save_there_and_others_load(run_ranks: RunRanks, root: str) -> None:
    def save(rank: int) -> tuple[Content, list[str]]:
        part = Part(Layout(dp=2))
        part.train(0, 1)
        saver = CheckpointSaver(root, part.mesh, keep=2)
        for step in (1, 2):
            saver.save(step, part.model, part.optimizer, STATE)
        saver.finish()
        part.train(1, 3)
        # Once more the same step, over a finished one.
        for step in (3, 3):
            part.save(root, step)
        return part.content(), saver.files.names()

    def load(rank: int) -> tuple[Content, str]:
        part = Part(Layout(tp=2), seed=99)
        path = find_checkpoint(root, part.mesh)
        assert path is not None and part.load(path) == (3, STATE) and read_state(path) == STATE
        return part.content(), str(path)

    content, names = run_ranks(2, save)[0]
    assert names == ["step-00000002", "step-00000003"]
    for loaded, path in run_ranks(2, load):
        assert path.endswith("/far/step-00000003")
        assert_equal(loaded, content)


KILLED = "killed"


@pytest.mark.parametrize(
    ("root", "how"),
    [("s3", KILLED), *((CopyingStore.protocol, how) for how in (KILLED, "cut", "flipped", "manifest lost"))],
    indirect=["root"],
)
def test_what_is_not_whole_there_is_passed_over(run_ranks: RunRanks, tmp_path: Path, root: str, how: str) -> None:
    def save(rank: int) -> None:
        part = Part(Layout(dp=2))
        part.save(root, 1)
        if how == KILLED and rank == 0:
            die_before_publishing()
        part.save(root, 2)

    def find(rank: int) -> str:
        return os.path.basename(str(find_checkpoint(root, Part(Layout(dp=2)).mesh)))

    with pytest.raises(RankFailure) if how == KILLED else nullcontext():
        run_ranks(2, save)
    if how != KILLED:
        damage(tmp_path / "far", "step-00000002", how)
    assert run_ranks(2, find) == ["step-00000001"] * 2
