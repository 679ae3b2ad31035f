"""What a run reports while it goes on, and where: sinks of the user's, numbers read late, checkpoints far away."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from energon_lite.errors import ConfigError
from energon_lite.trainer import Trainer, read_state
from energon_lite.trainer.checkpointing.files import CheckpointFiles
from energon_lite.trainer.optimizer.config import ParameterGroup
from energon_lite.trainer.training.metrics import StepMetrics
from tests.testing import nightly_but
from tests.trainer.parallel.copying_store import CopyingStore
from tests.trainer.parallel.rank_processes import RunRanks
from tests.trainer.parallel.small_runs import make_config, metrics, send, train
from tests.trainer.parallel.test_checkpoint_stores import make_bucket


def test_a_sink_of_the_users_gets_the_numbers_on_the_main_rank(
    run_ranks: RunRanks, blend: Path, tmp_path: Path
) -> None:
    def job(rank: int, steps: int) -> list[Any]:
        told: list[Any] = []

        class Sink:
            def __init__(self, after: int):
                told.append(after)

            def write(self, values: Mapping[str, Any]) -> None:
                told.append(values["step"])

            def close(self) -> None:
                told.append("closed")

        with Trainer(make_config(blend, tmp_path / "run", steps=steps), sinks=[Sink]) as trainer:
            trainer.run()
        return told

    assert run_ranks(2, lambda rank: job(rank, 2)) == [[0, 1, 2, "closed"], []]
    assert run_ranks(2, lambda rank: job(rank, 4)) == [[2, 3, 4, "closed"], []]


def test_numbers_are_read_when_the_next_step_is_under_way_unless_it_is_to_be_saved(
    run_ranks: RunRanks, blend: Path, tmp_path: Path
) -> None:
    """Each with the time that it took, its data's included, and the learning rate of each group."""

    def job(rank: int) -> list[tuple[str, int]]:
        done: list[tuple[str, int]] = []
        config = make_config(blend, tmp_path / "run", steps=5, save_every=3)
        groups = (ParameterGroup(match="*norm*", lr_scale=0.5),)
        config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, groups=groups))
        with Trainer(config) as trainer:
            launch, take = trainer.launch, trainer.data.take_step

            def noted_launch(step: int, batches: Any) -> Any:
                done.append(("launch", step))
                return launch(step, batches)

            class NotedNumbers(StepMetrics):
                def __call__(self, running: Any) -> Any:
                    done.append(("numbers", running.step))
                    return super().__call__(running)

            def slow(batches: Any) -> Any:
                time.sleep(0.1)
                return take(batches)

            trainer.launch = noted_launch  # type: ignore[method-assign]
            trainer.numbers = NotedNumbers(config, trainer.mesh)
            trainer.data.take_step = slow  # type: ignore[method-assign]
            trainer.run()
        return done

    began = time.perf_counter()
    (done,) = run_ranks(1, job)
    took = time.perf_counter() - began
    order = "launch 1, launch 2, numbers 1, launch 3, numbers 2, numbers 3, launch 4, launch 5, numbers 4, numbers 5"
    assert ", ".join(f"{what} {step}" for what, step in done) == order
    lines = [json.loads(text) for text in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert all(0.1 <= entry["data_wait"] < entry["seconds"] for entry in lines)
    assert sum(entry["seconds"] for entry in lines) < took
    assert all(entry["lr *norm*"] == 0.5 * entry["lr"] for entry in lines)


@pytest.mark.parametrize("store", nightly_but({1}, ["s3", CopyingStore.protocol]))
def test_checkpoints_at_a_url_and_some_that_stay(
    run_ranks: RunRanks, blend: Path, tmp_path: Path, store: str, request: pytest.FixtureRequest
) -> None:
    """Metrics stay here."""
    root = f"{store}://{tmp_path}/far"
    if store == "s3":
        root = f"{request.getfixturevalue('s3')}/{tmp_path.name}/far"
    for steps in (5, 7):
        config = make_config(blend, tmp_path / "run", steps=9, save_every=1, checkpoints=root, keep_every=3)
        stop = send(signal.SIGTERM, to_rank=0, at=steps)

        def job(rank: int, config: Any = config, stop: Any = stop) -> int:
            if rank == 0:
                make_bucket(root)
            return train(config, stop)

        assert run_ranks(2, job) == [steps] * 2

    def look(rank: int) -> tuple[list[str], str]:
        return CheckpointFiles(root).names(), read_state(f"{root}/step-00000003")["config"]["train"]["checkpoints"]

    assert run_ranks(1, look) == [([f"step-{step:08d}" for step in (3, 6, 7)], root)]
    assert os.listdir(tmp_path / "run") == ["metrics.jsonl"] and len(metrics(tmp_path / "run")) == 7


def test_metrics_need_a_folder_and_the_error_names_the_setting_for_checkpoints(tmp_path: Path) -> None:
    config = make_config(tmp_path, tmp_path)
    with pytest.raises(ConfigError, match=r"train\.checkpoints"):
        dataclasses.replace(config, output="s3://bucket/run")


def test_which_checkpoints_stay(tmp_path: Path) -> None:
    """The first at or after each multiple, wherever checkpoints are made, and the newest."""
    files = CheckpointFiles(tmp_path)
    for step in (7, 9, 12, 15, 21, 22, 30, 31, 32):
        files.begin(step)
        files.publish(step, {})
        files.prune(2, 10)
    assert files.names() == [f"step-{step:08d}" for step in (12, 21, 30, 31, 32)]
    files.prune(1)
    assert files.names() == ["step-00000032"]
