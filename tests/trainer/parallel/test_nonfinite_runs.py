"""Runs whose losses, gradients or weights become NaN: they end, on all ranks, and no good checkpoint goes for it."""

from __future__ import annotations

import dataclasses
import itertools
import math
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from energon_lite.errors import NonFiniteError
from energon_lite.trainer import Trainer, config_to_dict, read_state
from energon_lite.trainer.checkpointing.checkpoint import save_checkpoint
from energon_lite.trainer.checkpointing.files import CheckpointFiles
from energon_lite.trainer.training.step import evaluate_each
from tests.testing import errors_of, nightly_but
from tests.trainer.parallel.rank_processes import RunRanks
from tests.trainer.parallel.small_runs import heard, make_config, metrics, send, train

Disturb = Callable[[Trainer, int], None]

LAYOUTS = [(1, {}), (2, {"pp": 2}), (2, {"tp": 2}), (2, {})]
NAMES = ["alone", "pp 2", "tp 2", "dp 2"]
EACH_LAYOUT = pytest.mark.parametrize(("world", "mesh"), nightly_but({1}, LAYOUTS), ids=NAMES)


def spoil_weights(at: int, value: float = math.nan) -> Disturb:
    """One number on the last rank, before step ``at``."""

    def disturb(trainer: Trainer, step: int) -> None:
        if step == at and trainer.mesh.global_rank == trainer.mesh.world_size - 1:
            trainer.optimizer.wait_parameters()
            shard = next(shard for shard in trainer.optimizer.shards() if "mlp" in shard.name)
            shard.tensors["master"][-1] = value
            shard.parameter.data.view(-1)[shard.stop - 1] = value

    return disturb


def spoil_gradients(*at: int) -> Disturb:
    """Of the last rank, in these steps."""
    now = 0

    def spoil(grad: torch.Tensor) -> torch.Tensor:
        return grad * math.nan if now in at else grad

    def disturb(trainer: Trainer, step: int) -> None:
        nonlocal now
        if not now and trainer.mesh.global_rank == trainer.mesh.world_size - 1:
            dict(trainer.model.named_parameters())["layers.2.mlp.down_proj.weight"].register_hook(spoil)
        now = step

    return disturb


def saved(output: Path) -> list[int]:
    return [int(name.removeprefix("step-")) for name in CheckpointFiles(output / "checkpoints").names()]


def ends(run_ranks: RunRanks, world: int, config: Any, disturb: Disturb) -> list[str]:
    """What each rank's run ends with."""
    return errors_of(run_ranks, world, NonFiniteError, lambda rank: train(config, disturb))


@EACH_LAYOUT
def test_a_run_with_spoilt_weights_ends_on_all_ranks_with_the_good_checkpoints(
    run_ranks: RunRanks, blend: Path, tmp_path: Path, world: int, mesh: dict[str, int]
) -> None:
    config = make_config(blend, tmp_path / "run", mesh=mesh, steps=9, save_every=1)
    texts = ends(run_ranks, world, config, spoil_weights(4))
    assert saved(tmp_path / "run") == [2, 3]
    assert all("weights" in text and "step 4" in text and "data.skip_steps=[4]" in text for text in texts)
    assert ".mlp." in texts[-1]
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3, 4]
    assert metrics(tmp_path / "run")[-1]["loss"] is None


@EACH_LAYOUT
def test_a_run_ends_after_some_steps_in_a_row_that_are_not_finite(
    run_ranks: RunRanks, blend: Path, tmp_path: Path, world: int, mesh: dict[str, int]
) -> None:
    config = make_config(blend, tmp_path / "run", mesh=mesh, steps=9, save_every=1, nonfinite_limit=2)
    texts = ends(run_ranks, world, config, spoil_gradients(3, 5, 6, 7, 8))
    for text in texts:
        assert "2 steps in a row" in text and "gradient norm nan" in text and "data.skip_steps=[5, 6]" in text
    # Each rank that loads names what it has had in the last one, of 20 to 23.
    assert all(any(f"('batch', 0, {number})" in text for text in texts) for number in range(20, 24))
    # After step 3, which changed nothing, none was saved; after step 4 one was.
    assert saved(tmp_path / "run") == [2, 4]
    assert [line.get("skipped_updates", 0) for line in metrics(tmp_path / "run")] == [0, 0, 1, 1, 2, 3]


def test_a_few_steps_that_are_not_finite_are_left_out_and_said(
    run_ranks: RunRanks, blend: Path, tmp_path: Path
) -> None:
    config = make_config(blend, tmp_path / "run", steps=8, save_every=2, keep=9)

    def job(rank: int) -> tuple[int, list[str]]:
        with heard() as said:
            return train(config, spoil_gradients(4, 5, 7)), [text for text in said if "not finite" in text]

    ((done, said),) = run_ranks(1, job)
    assert done == 8 and len(said) == 3
    assert "step 5" in said[1] and "2 of 3 in a row" in said[1] and "2 updates left out so far" in said[1]
    # That of step 4 was due, and is made up for when a step is finite again.
    assert saved(tmp_path / "run") == [2, 6, 8]
    assert [line.get("skipped_updates", 0) for line in metrics(tmp_path / "run")] == [0, 0, 0, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("by_sigterm", [False, True])
def test_a_last_checkpoint_after_left_out_updates_costs_no_other_and_remembers_them(
    run_ranks: RunRanks, blend: Path, tmp_path: Path, by_sigterm: bool
) -> None:
    spoil = spoil_gradients(3, 4, 5, 6)

    def disturb(trainer: Trainer, step: int) -> None:
        spoil(trainer, step)
        if by_sigterm:
            send(signal.SIGTERM, to_rank=0, at=4)(trainer, step)

    steps = 9 if by_sigterm else 4
    config = make_config(blend, tmp_path / "run", steps=steps, save_every=1)
    assert run_ranks(1, lambda rank: train(config, disturb)) == [4]
    assert saved(tmp_path / "run") == [1, 2, 4]
    assert read_state(tmp_path / "run/checkpoints/step-00000004")["nonfinite"] == {"in_a_row": 2, "numbers": [3, 4]}
    # The third in a row, over a restart.
    again = make_config(blend, tmp_path / "run", steps=9, save_every=1)
    (text,) = ends(run_ranks, 1, again, spoil_gradients(5, 6))
    assert "steps 3 to 5" in text and "data.skip_steps=[3, 4, 5]" in text


def test_moments_that_are_not_finite_are_no_checkpoint(run_ranks: RunRanks, blend: Path, tmp_path: Path) -> None:
    """Weights may be as they were, and the run is lost all the same: what is saved is looked at."""

    def disturb(trainer: Trainer, step: int) -> None:
        if step == 3 and trainer.mesh.global_rank == 0:
            next(iter(trainer.optimizer.shards())).tensors["exp_avg_sq"][0] = math.inf

    config = make_config(blend, tmp_path / "run", save_every=1, steps=5)
    for text in ends(run_ranks, 2, config, disturb):
        assert "after step 3" in text
    assert saved(tmp_path / "run") == [1, 2]


def test_steps_passed_over_take_the_data_that_follows(run_ranks: RunRanks, blend: Path, tmp_path: Path) -> None:
    """On any layout the same, and in the numbers that the error names."""

    def keys(world: int, skip: tuple[int, ...], steps: int) -> list[Any]:
        def job(rank: int) -> list[Any]:
            config = make_config(blend, tmp_path / f"run-{world}-{skip}", steps=steps)
            config = dataclasses.replace(config, data=dataclasses.replace(config.data, skip_steps=skip))
            with Trainer(config) as trainer:
                batches: Iterator[Any] = iter(trainer.loader)
                share = range(trainer.data.micro_batches)
                return [[next(batches).__restore_key__[2] for _ in share] for _ in range(steps)]

        return [sorted(itertools.chain(*step)) for step in zip(*run_ranks(world, job), strict=True)]

    straight = keys(1, (), 5)
    assert straight[1] == [4, 5, 6, 7]
    for world in (1, 2, 4):
        assert keys(world, (2, 4), 3) == [straight[0], straight[2], straight[4]]


@pytest.mark.parametrize("how", ["resumed", "init_from"])
def test_what_is_read_is_looked_at_too(run_ranks: RunRanks, blend: Path, tmp_path: Path, how: str) -> None:
    """Another program may have written it, and a step with it would be blamed on the data."""
    other = tmp_path / ("run" if how == "resumed" else "other")

    def save_spoilt(rank: int) -> None:
        with Trainer(make_config(blend, other)) as trainer:
            spoil_weights(1)(trainer, 1)
            state = {"loader": trainer.loader.save_state_rank(), "config": config_to_dict(trainer.config)}
            save_checkpoint(trainer.checkpoints, 1, trainer.model, trainer.optimizer, trainer.mesh, state)

    run_ranks(1, save_spoilt)
    init = str(other / "checkpoints") if how == "init_from" else None
    for text in ends(run_ranks, 2, make_config(blend, tmp_path / "run", init_from=init), lambda *_: None):
        assert "step-00000001" in text and "use another" in text and "skip_steps" not in text


def spoil_mask(trainer: Trainer, number: int, value: float) -> None:
    """In a batch of the data of a step, on the last rank, one label counts not a number of times."""
    take = trainer.data.take_step

    def spoilt(batches: Any) -> Any:
        taken = take(batches)
        if number in trainer.data.last_step.numbers and trainer.mesh.global_rank == trainer.mesh.world_size - 1:
            taken[0].loss_mask[0, 0] = value  # type: ignore[union-attr]
            taken[0].counted = float(taken[0].loss_mask.sum())  # type: ignore[union-attr]  # as the loader does
        return taken

    trainer.data.take_step = spoilt  # type: ignore[method-assign]


@pytest.mark.parametrize(("world", "value"), [(1, math.inf), (2, math.nan)])
def test_a_loss_mask_that_is_not_finite_is_named_with_its_step_and_can_be_passed_over(
    run_ranks: RunRanks, blend: Path, tmp_path: Path, world: int, value: float
) -> None:
    config = make_config(blend, tmp_path / "run", nonfinite_limit=1, save_every=1)
    skipping = dataclasses.replace(config, data=dataclasses.replace(config.data, skip_steps=(3,)))

    def once(trainer: Trainer, step: int) -> None:
        if step == 1:
            spoil_mask(trainer, 3, value)

    for text in ends(run_ranks, world, config, once):
        assert "up to step 3" in text and "the loss_mask of a micro-batch is not finite" in text
        assert "micro-batches of the last one on this rank: (" in text and "data.skip_steps=[3]" in text
    assert saved(tmp_path / "run") == [1, 2]
    assert metrics(tmp_path / "run")[-1] | {"step": 3, "tokens": None} == metrics(tmp_path / "run")[-1]

    def passed_over(rank: int) -> int:
        with Trainer(skipping) as trainer:
            spoil_mask(trainer, 3, value)
            return trainer.run()

    assert run_ranks(world, passed_over) == [6] * world


def test_a_loss_mask_of_a_validation_set_that_is_not_finite_is_an_error_too(
    run_ranks: RunRanks, blend: Path, tmp_path: Path
) -> None:
    def evaluate(rank: int) -> None:
        with Trainer(make_config(blend, tmp_path / "run", eval_every=1)) as trainer:
            batches = [batch for _, batches in trainer.data.validation() for batch in batches]
            batches[0].loss_mask[0, 0] = math.nan  # type: ignore[union-attr]
            batches[0].counted = float(batches[0].loss_mask.sum())  # type: ignore[union-attr]
            evaluate_each(trainer.model, [("books", batches)], trainer.mesh)

    for text in errors_of(run_ranks, 2, NonFiniteError, evaluate):
        assert "loss mask of a validation set is not finite" in text and "books" in text


def test_what_is_passed_over_already_is_said_again(run_ranks: RunRanks, blend: Path, tmp_path: Path) -> None:
    config = make_config(blend, tmp_path / "run", nonfinite_limit=1)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, skip_steps=(2,)))
    (text,) = ends(run_ranks, 1, config, spoil_gradients(3))
    assert "data.skip_steps=[2, 4]" in text, "the third step has the fourth's data"
