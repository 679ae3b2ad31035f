"""Runs that are asked to stop or to save, that have a time limit, or whose data ends: all ranks, with a checkpoint."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from energon_lite.trainer import Trainer, TrainerConfig
from energon_lite.trainer.parallel.mesh import build_mesh
from energon_lite.trainer.training import process
from energon_lite.trainer.training.process import Requests
from tests.testing import nightly_but
from tests.trainer.parallel.rank_processes import RunRanks
from tests.trainer.parallel.small_runs import EACH_LAYOUT, Disturb, SmallRuns, heard, line, send, train


def said(config: TrainerConfig, disturb: Disturb | None = None) -> tuple[int, list[str]]:
    """Steps that one rank's run has done, and what it said."""
    with heard(logging.INFO) as texts:
        return train(config, disturb), texts


def test_sigusr1_saves_and_stops_as_sigterm_does(runs: SmallRuns) -> None:
    config = runs.config(mesh={"pp": 2}, save_every=0)

    results = runs.run_ranks(2, lambda rank: said(config, send(signal.SIGUSR1, to_rank=1, at=3)))
    assert [done for done, _ in results] == [3, 3] and runs.saved() == [3]
    assert "stopped after step 3 of 6 by SIGUSR1" in results[0][1]
    assert runs.train(1) == [6]


def test_sigusr2_saves_after_the_next_step_and_goes_on(runs: SmallRuns) -> None:
    assert runs.train(2, send(signal.SIGUSR2, to_rank=1, at=3), save_every=0, keep=9) == [6, 6]
    assert runs.saved() == [4, 6]


def test_who_listens_to_a_signal_already_keeps_it(runs: SmallRuns) -> None:
    """As one does who has stacks shown by SIGUSR1; and the others are given back after the run."""

    def job(rank: int) -> tuple[int, list[int], bool]:
        came: list[int] = []
        signal.signal(signal.SIGUSR1, lambda number, _: came.append(number))
        done = train(runs.config(steps=3), send(signal.SIGUSR1, to_rank=0, at=2))
        return done, came, signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL

    assert runs.run_ranks(1, job) == [(3, [signal.SIGUSR1], True)]


@EACH_LAYOUT
def test_a_run_is_over_before_its_time_limit(runs: SmallRuns, world: int, mesh: dict[str, int]) -> None:
    """By a clock of the test's: steps of a quarter of a second, on the last rank only."""
    limit = 3.0
    config = runs.config(mesh=mesh, steps=999, time_limit=limit)

    def job(rank: int) -> tuple[int, list[str], float]:
        now = 0.0

        def disturb(trainer: Trainer, step: int) -> None:
            nonlocal now
            now += 0.25 * (trainer.mesh.global_rank == world - 1)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(process, "time", SimpleNamespace(monotonic=lambda: now))
            return (*said(config, disturb), now)

    results = runs.run_ranks(world, job)
    steps = {done for done, _, _ in results}
    assert len(steps) == 1 and 1 <= min(steps) <= limit / 0.25
    assert runs.saved()[-1] == min(steps) == runs.metrics()[-1]["step"]
    assert any("by train.time_limit" in text for text in results[0][1])
    assert all(seconds <= limit for _, _, seconds in results)


def test_ranks_whose_clocks_differ_save_once_to_know_how_long_that_takes(run_ranks: RunRanks) -> None:
    def job(rank: int) -> int:
        now, saves = 0.0, 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(process.time, "monotonic", lambda: now)
            asked, why = Requests(100.0, build_mesh()), ""
            now = 1.5 * rank  # the last rank is half of the time ahead some steps before the first
            with asked.listening():
                while not why:
                    now += 1.0
                    why, save, *_ = asked.agreed()
                    saves += save
        return saves

    assert run_ranks(2, job) == [1, 1]


#: Texts, of which a run sees each once.
NUMBER, ONCE = 29, {"repeat": False, "micro_batch_size": 2}


@pytest.fixture
def finite(run_ranks: RunRanks, write_dataset: Callable[..., Path], tmp_path: Path) -> SmallRuns:
    shards = {"a.tar": [line(number) for number in range(NUMBER)]}
    return SmallRuns(run_ranks, write_dataset(tmp_path / "texts", shards, splits={"train": ["a.tar"]}), tmp_path)


@pytest.mark.parametrize(
    ("world", "mesh", "data"),
    nightly_but(
        {0, 2, 4},
        [
            (1, {}, {"workers": 2}),
            (2, {}, {}),
            (4, {"tp": 2}, {"share": "broadcast"}),
            (3, {"pp": 3, "order": "pp-dp"}, {}),
            (4, {"pp": 2, "virtual": 1}, {"workers": 1}),
        ],
    ),
    ids=str,
)
def test_a_run_ends_with_its_data(finite: SmallRuns, world: int, mesh: dict[str, Any], data: dict[str, Any]) -> None:
    """29 texts in micro-batches of 2, 4 of them in a step: the last step has three, of which one is short."""
    config = finite.config(mesh=mesh, data=ONCE | data, steps=99)
    results = finite.run_ranks(world, lambda rank: said(config))
    assert {done for done, _ in results} == {4} and finite.saved() == [2, 4]
    assert "stopped after step 4 of 99 by the end of the data" in results[0][1]
    lines = finite.metrics()
    # A row has a label per byte and one for the end; at most 12.
    assert sum(entry["tokens"] for entry in lines) == sum(min(12, len(line(n)[1]["txt"]) + 1) for n in range(NUMBER))
    # Once more: it has seen all, and neither begins again nor saves.
    assert [done for done, _ in finite.run_ranks(world, lambda rank: said(config))] == [4] * world
    assert finite.metrics() == lines and finite.saved() == [2, 4]


def test_a_run_that_was_stopped_before_the_end_of_its_data_sees_the_rest(finite: SmallRuns) -> None:
    """On another layout, too; and the last step is not due to be saved."""
    losses = []
    for name, stops in (("straight", ((1, 99),)), ("moved", ((1, 2), (2, 99), (1, 99)))):
        for world, steps in stops:
            stop = send(signal.SIGTERM, to_rank=0, at=steps)
            finite.train(world, stop, name=name, data=ONCE, steps=99, save_every=3)
        assert finite.saved(name)[-1] == 4
        losses.append([entry["loss"] for entry in finite.metrics(name)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and len(losses[1]) == 4
