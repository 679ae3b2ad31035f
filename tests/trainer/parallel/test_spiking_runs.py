"""Runs with a guard against leaps of the loss: on several layouts, resumed to the same bits."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from energon_lite.trainer import LossSums, Trainer, read_state
from tests.trainer.parallel.rank_processes import RunRanks
from tests.trainer.parallel.small_runs import heard, make_config, metrics, send, train
from tests.trainer.parallel.test_nonfinite_runs import LAYOUTS


def spoil(*at: int) -> Callable[[Trainer, int], None]:
    """Data that is much too hard, in these steps: the loss is ten times what it would be, and so are gradients."""

    def disturb(trainer: Trainer, step: int) -> None:
        if not hasattr(trainer, "now"):
            run_chunk = trainer.model.run_chunk

            def harder(*given: Any) -> Any:
                made = run_chunk(*given)
                hard = isinstance(made, LossSums) and trainer.now in at
                return made._replace(loss=made.loss * 10) if hard else made

            trainer.model.run_chunk = harder  # type: ignore[method-assign]
        trainer.now = step  # type: ignore[attr-defined]

    return disturb


def test_the_update_of_a_spike_is_left_out_counted_and_said(run_ranks: RunRanks, blend: Path, tmp_path: Path) -> None:
    config = make_config(blend, tmp_path / "run", steps=7, spike_factor=2.0, spike_window=4)

    def job(rank: int) -> tuple[bool, list[str]]:
        kept: list[list[torch.Tensor]] = []

        def disturb(trainer: Trainer, step: int) -> None:
            spoil(1, 5)(trainer, step)
            if step in (5, 6):
                trainer.optimizer.wait_parameters()
                kept.append([p.detach().clone() for p in trainer.model.parameters()])

        with heard() as said:
            train(config, disturb)
        return all(map(torch.equal, *kept)), [text for text in said if "updates nothing" in text]

    ((same, said),) = run_ranks(1, job)
    assert same, "nothing moved in step 5"
    lines = metrics(tmp_path / "run")
    # Step 1 has nothing to be compared with.
    assert [line.get("spikes", 0) for line in lines] == [0, 0, 0, 0, 1, 1, 1]
    assert [line.get("skipped_updates", 0) for line in lines] == [0, 0, 0, 0, 1, 1, 1]
    (text,) = said
    assert "step 5" in text and "2 times the median of the last 4" in text and "('batch', 0, 16)" in text


def test_layouts_leave_out_the_same_and_a_resumed_run_goes_on_to_the_same_bits(
    run_ranks: RunRanks, blend: Path, tmp_path: Path
) -> None:
    found = []
    for number, (world, mesh) in enumerate(LAYOUTS):
        config = make_config(blend, tmp_path / str(number), mesh=mesh, steps=8, spike_factor=2.0, spike_window=4)
        for stop in (None,) if number else (4, 6, None):  # in the middle of what is known, and behind a spike
            end = send(signal.SIGTERM, to_rank=world - 1, at=stop) if stop else None

            def disturb(trainer: Trainer, step: int, end: Any = end) -> None:
                spoil(5, 7)(trainer, step)
                if end is not None:
                    end(trainer, step)

            run_ranks(world, lambda rank, c=config, d=disturb: train(c, d))  # type: ignore[misc]
        found.append(metrics(tmp_path / str(number)))
    state = read_state(tmp_path / "0/checkpoints/step-00000006")["spikes"]
    assert state["left_out"] == 1 and state["losses"] == [line["loss"] for line in found[0][2:6]]
    straight = make_config(blend, tmp_path / "straight", steps=8, spike_factor=2.0, spike_window=4)
    run_ranks(1, lambda rank: train(straight, spoil(5, 7)))
    assert found[0] == metrics(tmp_path / "straight")
    for lines in found:
        assert [line.get("spikes", 0) for line in lines] == [0, 0, 0, 0, 1, 1, 2, 2]
        assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in found[0]], rel=1e-5)
