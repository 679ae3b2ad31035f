"""Runs whose losses, gradients or weights become NaN, or whose losses leap: they leave out updates, or end on all
ranks, and no good checkpoint goes for it."""

from __future__ import annotations

import itertools
import math
import signal
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from energon_lite.errors import NonFiniteError
from energon_lite.trainer import LossSums, Trainer, config_to_dict, read_state
from energon_lite.trainer.checkpointing.checkpoint import save_checkpoint
from energon_lite.trainer.training.step import evaluate_each
from tests.testing import errors_of
from tests.trainer.parallel.small_runs import EACH_LAYOUT, LAYOUTS, Disturb, SmallRuns, heard, send, train

Sizes = dict[str, int]


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


def skipped_updates(runs: SmallRuns) -> list[int]:
    """How many, after each step."""
    return [line.get("skipped_updates", 0) for line in runs.metrics()]


@EACH_LAYOUT
def test_a_run_with_spoilt_weights_ends_on_all_ranks_with_the_good_checkpoints(
    runs: SmallRuns, world: int, mesh: Sizes
) -> None:
    texts = runs.errors(NonFiniteError, world, spoil_weights(4), mesh=mesh, steps=9, save_every=1)
    assert runs.saved() == [2, 3]
    assert all("weights" in text and "step 4" in text and "data.skip_steps=[4]" in text for text in texts)
    assert ".mlp." in texts[-1]
    assert [line["step"] for line in runs.metrics()] == [1, 2, 3, 4] and runs.metrics()[-1]["loss"] is None


@EACH_LAYOUT
def test_a_run_ends_after_some_steps_in_a_row_that_are_not_finite(runs: SmallRuns, world: int, mesh: Sizes) -> None:
    limits = {"steps": 9, "save_every": 1, "nonfinite_limit": 2}
    texts = runs.errors(NonFiniteError, world, spoil_gradients(3, 5, 6, 7, 8), mesh=mesh, **limits)
    for text in texts:
        assert "2 steps in a row" in text and "gradient norm nan" in text and "data.skip_steps=[5, 6]" in text
    # Each rank that loads names what it has had in the last one, of 20 to 23.
    assert all(any(f"('batch', 0, {number})" in text for text in texts) for number in range(20, 24))
    # After step 3, which changed nothing, none was saved; after step 4 one was.
    assert runs.saved() == [2, 4]
    assert skipped_updates(runs) == [0, 0, 1, 1, 2, 3]


def test_a_few_steps_that_are_not_finite_are_left_out_and_said(runs: SmallRuns) -> None:
    config = runs.config(steps=8, keep=9)

    def job(rank: int) -> tuple[int, list[str]]:
        with heard() as said:
            return train(config, spoil_gradients(4, 5, 7)), [text for text in said if "not finite" in text]

    ((done, said),) = runs.run_ranks(1, job)
    assert done == 8 and len(said) == 3
    assert "step 5" in said[1] and "2 of 3 in a row" in said[1] and "2 updates left out so far" in said[1]
    # That of step 4 was due, and is made up for when a step is finite again.
    assert runs.saved() == [2, 6, 8]
    assert skipped_updates(runs) == [0, 0, 0, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("by_sigterm", [False, True])
def test_a_last_checkpoint_after_left_out_updates_costs_no_other_and_remembers_them(
    runs: SmallRuns, by_sigterm: bool
) -> None:
    spoil = spoil_gradients(3, 4, 5, 6)

    def disturb(trainer: Trainer, step: int) -> None:
        spoil(trainer, step)
        if by_sigterm:
            send(signal.SIGTERM, to_rank=0, at=4)(trainer, step)

    assert runs.train(1, disturb, steps=9 if by_sigterm else 4, save_every=1) == [4]
    assert runs.saved() == [1, 2, 4]
    state = read_state(runs.folder / "run/checkpoints/step-00000004")
    assert state["nonfinite"] == {"in_a_row": 2, "numbers": [3, 4]}
    # The third in a row, over a restart.
    (text,) = runs.errors(NonFiniteError, 1, spoil_gradients(5, 6), steps=9, save_every=1)
    assert "steps 3 to 5" in text and "data.skip_steps=[3, 4, 5]" in text


def test_moments_that_are_not_finite_are_no_checkpoint(runs: SmallRuns) -> None:
    """Weights may be as they were, and the run is lost all the same: what is saved is looked at."""

    def disturb(trainer: Trainer, step: int) -> None:
        if step == 3 and trainer.mesh.global_rank == 0:
            next(iter(trainer.optimizer.shards())).tensors["exp_avg_sq"][0] = math.inf

    for text in runs.errors(NonFiniteError, 2, disturb, save_every=1, steps=5):
        assert "after step 3" in text
    assert runs.saved() == [1, 2]


def test_steps_passed_over_take_the_data_that_follows(runs: SmallRuns) -> None:
    """On any layout the same, and in the numbers that the error names."""

    def keys(world: int, skip: tuple[int, ...], steps: int) -> list[Any]:
        config = runs.config(f"run-{world}-{skip}", steps=steps, data={"skip_steps": skip})

        def job(rank: int) -> list[Any]:
            with Trainer(config) as trainer:
                batches: Iterator[Any] = iter(trainer.loader)
                share = range(trainer.data.micro_batches)
                return [[next(batches).__restore_key__[2] for _ in share] for _ in range(steps)]

        return [sorted(itertools.chain(*step)) for step in zip(*runs.run_ranks(world, job), strict=True)]

    straight = keys(1, (), 5)
    assert straight[1] == [4, 5, 6, 7]
    for world in (1, 2, 4):
        assert keys(world, (2, 4), 3) == [straight[0], straight[2], straight[4]]


@pytest.mark.parametrize("how", ["resumed", "init_from"])
def test_what_is_read_is_looked_at_too(runs: SmallRuns, how: str) -> None:
    """Another program may have written it, and a step with it would be blamed on the data."""
    other = "run" if how == "resumed" else "other"

    def save_spoilt(rank: int) -> None:
        with Trainer(runs.config(other)) as trainer:
            spoil_weights(1)(trainer, 1)
            state = {"loader": trainer.loader.save_state_rank(), "config": config_to_dict(trainer.config)}
            save_checkpoint(trainer.checkpoints, 1, trainer.model, trainer.optimizer, trainer.mesh, state)

    runs.run_ranks(1, save_spoilt)
    init = str(runs.folder / "other/checkpoints") if how == "init_from" else None
    for text in runs.errors(NonFiniteError, 2, init_from=init):
        assert "step-00000001" in text and "use another" in text and "skip_steps" not in text
        assert f"after step {int(how == 'resumed')}" in text


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
    runs: SmallRuns, world: int, value: float
) -> None:
    def once(trainer: Trainer, step: int) -> None:
        if step == 1:
            spoil_mask(trainer, 3, value)

    for text in runs.errors(NonFiniteError, world, once, nonfinite_limit=1, save_every=1):
        assert "up to step 3" in text and "the loss_mask of a micro-batch is not finite" in text
        assert "micro-batches of the last one on this rank: (" in text and "data.skip_steps=[3]" in text
    assert runs.saved() == [1, 2]
    assert runs.metrics()[-1] | {"step": 3, "tokens": None} == runs.metrics()[-1]

    def passed_over(rank: int) -> int:
        with Trainer(runs.config(nonfinite_limit=1, save_every=1, data={"skip_steps": [3]})) as trainer:
            spoil_mask(trainer, 3, value)
            return trainer.run()

    assert runs.run_ranks(world, passed_over) == [6] * world


def test_a_loss_mask_of_a_validation_set_that_is_not_finite_is_an_error_too(runs: SmallRuns) -> None:
    def evaluate(rank: int) -> None:
        with Trainer(runs.config(eval_every=1)) as trainer:
            batches = [batch for _, batches in trainer.data.validation() for batch in batches]
            batches[0].loss_mask[0, 0] = math.nan  # type: ignore[union-attr]
            batches[0].counted = float(batches[0].loss_mask.sum())  # type: ignore[union-attr]
            evaluate_each(trainer.model, [("books", batches)], trainer.mesh)

    for text in errors_of(runs.run_ranks, 2, NonFiniteError, evaluate):
        assert "loss mask of a validation set is not finite" in text and "books" in text


def test_what_is_passed_over_already_is_said_again(runs: SmallRuns) -> None:
    (text,) = runs.errors(NonFiniteError, 1, spoil_gradients(3), nonfinite_limit=1, data={"skip_steps": [2]})
    assert "data.skip_steps=[2, 4]" in text, "the third step has the fourth's data"


# -- leaps of the loss -------------------------------------------------------------------------------------------------

GUARDED: dict[str, Any] = {"spike_factor": 2.0, "spike_window": 4}


def harden(trainer: Trainer, step: int, *, at: tuple[int, ...]) -> None:
    """Data that is much too hard, in these steps: the loss is ten times what it would be, and so are gradients."""
    if not hasattr(trainer, "now"):
        run_chunk = trainer.model.run_chunk

        def harder(*given: Any) -> Any:
            made = run_chunk(*given)
            hard = isinstance(made, LossSums) and trainer.now in at
            return made._replace(loss=made.loss * 10) if hard else made

        trainer.model.run_chunk = harder  # type: ignore[method-assign]
    trainer.now = step  # type: ignore[attr-defined]


def spikes(lines: list[dict[str, Any]]) -> list[int]:
    return [line.get("spikes", 0) for line in lines]


def test_the_update_of_a_spike_is_left_out_counted_and_said(runs: SmallRuns) -> None:
    config = runs.config(steps=7, **GUARDED)

    def job(rank: int) -> tuple[bool, list[str]]:
        kept: list[list[torch.Tensor]] = []

        def disturb(trainer: Trainer, step: int) -> None:
            harden(trainer, step, at=(1, 5))
            if step in (5, 6):
                trainer.optimizer.wait_parameters()
                kept.append([p.detach().clone() for p in trainer.model.parameters()])

        with heard() as said:
            train(config, disturb)
        return all(map(torch.equal, *kept)), [text for text in said if "updates nothing" in text]

    ((same, (text,)),) = runs.run_ranks(1, job)
    assert same, "nothing moved in step 5"
    # Step 1 has nothing to be compared with.
    assert spikes(runs.metrics()) == skipped_updates(runs) == [0, 0, 0, 0, 1, 1, 1]
    assert "step 5" in text and "2 times the median of the last 4" in text and "('batch', 0, 16)" in text


def test_layouts_leave_out_the_same_and_a_resumed_run_goes_on_to_the_same_bits(runs: SmallRuns) -> None:
    for number, (world, mesh) in enumerate(LAYOUTS):
        for stop in (0,) if number else (4, 6, 0):  # in the middle of what is known, and behind a spike
            end = send(signal.SIGTERM, to_rank=world - 1, at=stop)

            def disturb(trainer: Trainer, step: int, end: Disturb = end) -> None:
                harden(trainer, step, at=(5, 7))
                end(trainer, step)

            runs.train(world, disturb, name=str(number), mesh=mesh, steps=8, **GUARDED)
    found = [runs.metrics(str(number)) for number in range(len(LAYOUTS))]
    state = read_state(runs.folder / "0/checkpoints/step-00000006")["spikes"]
    assert state["left_out"] == 1 and state["losses"] == [line["loss"] for line in found[0][2:6]]
    runs.train(1, partial(harden, at=(5, 7)), name="straight", steps=8, **GUARDED)
    assert found[0] == runs.metrics("straight")
    for lines in found:
        assert spikes(lines) == [0, 0, 0, 0, 1, 1, 2, 2]
        assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in found[0]], rel=1e-5)
