"""Runs that end by an error while a checkpoint is being written: it is finished, or somebody says that it was not."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from energon_lite.errors import StateError
from energon_lite.trainer import Trainer
from energon_lite.trainer.checkpointing import checkpoint
from energon_lite.trainer.checkpointing.checkpoint import CheckpointSaver
from energon_lite.trainer.checkpointing.files import CheckpointFiles
from tests.fork_server import run_program
from tests.trainer.parallel.rank_processes import RankFailure, RunRanks
from tests.trainer.parallel.small_runs import heard, make_config, train
from tests.trainer.parallel.test_parity import Layout
from tests.trainer.parallel.training_part import STATE, Part


class Spoilt(Exception):
    """An error of a user's own."""


def slow_writing(wait: float | Callable[[], object]) -> None:
    """In this (forked) process, writing tensors takes so many seconds more, or waits until this returns."""
    save = checkpoint.save_tensors

    def slow(*args: Any, **how: Any) -> None:
        wait() if callable(wait) else time.sleep(wait)
        save(*args, **how)

    checkpoint.save_tensors = slow


def fail(at: int, error: type[BaseException], rank: int | None = None) -> Callable[[Trainer, int], None]:
    def disturb(trainer: Trainer, step: int) -> None:
        if step == at and rank in (None, trainer.mesh.global_rank):
            raise error("spoilt")

    return disturb


def saved(root: Path) -> list[str]:
    return CheckpointFiles(root).names()


@pytest.mark.parametrize(("error", "world"), [(Spoilt, 1), (KeyboardInterrupt, 2), (SystemExit, 1)])
def test_an_error_waits_for_the_checkpoint_that_is_being_written(
    run_ranks: RunRanks, blend: Path, tmp_path: Path, error: type[BaseException], world: int
) -> None:
    config = make_config(blend, tmp_path / "run")

    def job(rank: int) -> None:
        slow_writing(0.5)
        with pytest.raises(error, match="spoilt"):
            train(config, fail(3, error))

    run_ranks(world, job)
    assert saved(tmp_path / "run/checkpoints") == ["step-00000002"]


def test_a_signal_does_not_cut_it_off(run_ranks: RunRanks, blend: Path, tmp_path: Path) -> None:
    """What ends the other ranks of a run when one has failed, sends SIGTERM first."""
    config, raised = make_config(blend, tmp_path / "run"), threading.Event()

    def disturb(trainer: Trainer, step: int) -> None:
        if step == 3:
            raised.set()
            raise Spoilt("spoilt")

    def signalled() -> None:
        raised.wait()
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.3)

    def job(rank: int) -> None:
        slow_writing(signalled)
        with pytest.raises(Spoilt):
            train(config, disturb)

    run_ranks(1, job)
    assert saved(tmp_path / "run/checkpoints") == ["step-00000002"]


def test_a_rank_that_fails_alone_leaves_a_checkpoint_and_no_rank_that_waits(
    run_ranks: RunRanks, blend: Path, tmp_path: Path
) -> None:
    config = make_config(blend, tmp_path / "run")

    def job(rank: int) -> int:
        slow_writing(0.5)
        try:
            return train(config, fail(3, Spoilt, rank=1))
        except Spoilt:
            os._exit(1)

    with pytest.raises(RankFailure) as failure:
        run_ranks(2, job)
    assert saved(tmp_path / "run/checkpoints") == ["step-00000002"]
    assert "died without a word" in failure.value.by_rank[1]
    assert "onnection" in failure.value.by_rank[0] and "still running" not in failure.value.by_rank[0]


@pytest.mark.parametrize("stuck", [[0, 1], [1]])
def test_a_checkpoint_that_cannot_be_finished_is_given_up_with_a_word(
    run_ranks: RunRanks, blend: Path, tmp_path: Path, stuck: list[int]
) -> None:
    """Also where the other rank is stuck, and this one's share was written."""
    config = make_config(blend, tmp_path / "run", save_timeout=0.5)

    def job(rank: int) -> list[str]:
        if rank in stuck:
            slow_writing(10_000.0)
        with heard() as said, pytest.raises(Spoilt):
            train(config, fail(3, Spoilt))
        return [text for text in said if "checkpoint" in text]

    for said in run_ranks(2, job):
        assert len(said) == 1
        assert "the checkpoint of step 2 was not finished within 0.5 s" in said[0]
    assert saved(tmp_path / "run/checkpoints") == []


@pytest.mark.parametrize("good", [True, False])
def test_closing_finishes_or_raises(run_ranks: RunRanks, blend: Path, tmp_path: Path, good: bool) -> None:
    config = make_config(blend, tmp_path / "run")

    def job(rank: int) -> None:
        slow_writing(0.5)
        if not good:
            (tmp_path / "run").mkdir()
            (tmp_path / "run/checkpoints").write_text("a file, not a folder")
        with Trainer(config) as trainer:
            trainer.save(1)
            if good:
                return
            with pytest.raises(StateError, match="could not be written"):
                trainer.close()

    run_ranks(1, job)
    assert not good or saved(tmp_path / "run/checkpoints") == ["step-00000001"]


#: Children end with a checkpoint under way: seconds that writing takes, and the most that are waited for it.
SCRIPT = """
import os, sys, time, torch
from energon_lite.trainer.checkpointing import checkpoint
from energon_lite.trainer.optimizer.config import OptimizerConfig
from energon_lite.trainer.optimizer.overlapped_optimizer import OverlappedDistributedOptimizer
from energon_lite.trainer.parallel.mesh import build_mesh
from energon_lite.trainer import LlamaModel, ModelConfig

folder = sys.argv[1]
for name, seconds, timeout in (("done", 0.5, 100.0), ("given up", 10_000.0, 0.5), ("no folder", 0.0, 100.0)):
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0, name
        continue
    os.dup2(os.open(f"{folder}/{name}.log", os.O_CREAT | os.O_WRONLY), 2)
    save = checkpoint.save_tensors
    checkpoint.save_tensors = lambda *args, **how: (time.sleep(seconds), save(*args, **how))
    mesh = build_mesh()
    model = LlamaModel(ModelConfig(hidden_size=8, num_layers=1, num_heads=1, ffn_size=8), mesh)
    saver = checkpoint.CheckpointSaver(f"{folder}/{name}", mesh, timeout=timeout)
    saver.save(1, model, OverlappedDistributedOptimizer(model, mesh, OptimizerConfig()), {})
    sys.exit()
"""


@pytest.mark.slow
def test_a_process_that_forgets_to_finish_ends_and_tells_what_was_lost(tmp_path: Path) -> None:
    (tmp_path / "no folder").write_text("a file, not a folder")
    command = ["-c", SCRIPT, str(tmp_path)]
    done = run_program(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert saved(tmp_path / "done") == ["step-00000001"] and saved(tmp_path / "given up") == []
    said = {name: (tmp_path / f"{name}.log").read_text() for name in ("done", "given up", "no folder")}
    assert said["done"] == "" and "was not finished within" in said["given up"], said
    assert "the checkpoint of step 1 could not be written" in said["no folder"], said


def test_a_saver_can_be_closed_twice(run_ranks: RunRanks, tmp_path: Path) -> None:
    def job(rank: int) -> None:
        part = Part(Layout())
        saver = CheckpointSaver(tmp_path / "run", part.mesh)
        saver.close()
        saver.save(1, part.model, part.optimizer, STATE)
        saver.close()
        saver.close()

    run_ranks(1, job)
    assert saved(tmp_path / "run") == ["step-00000001"]


def test_a_save_that_is_late_is_told_of(run_ranks: RunRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step waits for it: nobody should have to guess why."""
    monkeypatch.setattr(checkpoint, "_TOLD", 0.1)

    def job(rank: int) -> list[str]:
        part = Part(Layout())
        saver = CheckpointSaver(tmp_path / "run", part.mesh)
        with heard(of="energon_lite.trainer.checkpointing") as said:

            def until_told() -> None:
                while not said:
                    time.sleep(0.01)

            slow_writing(until_told)
            saver.save(1, part.model, part.optimizer, STATE)
            saver.finish()
        return said

    (said,) = run_ranks(1, job)
    assert "waiting for the checkpoint of step 1" in said[0]
