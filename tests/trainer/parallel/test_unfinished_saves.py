"""Saves that an error of the run interrupts, or for which the disk has no room: they are finished, or it is said on all
ranks that they were not, and nothing is left that takes room."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from energon_lite.errors import StateError
from energon_lite.trainer import Trainer
from energon_lite.trainer.checkpointing import checkpoint
from energon_lite.trainer.checkpointing.checkpoint import CheckpointSaver, latest_checkpoint
from energon_lite.trainer.checkpointing.files import CheckpointFiles
from tests.fork_server import run_program
from tests.testing import errors_of
from tests.trainer.parallel.rank_processes import RankFailure, RunRanks
from tests.trainer.parallel.small_runs import Disturb, SmallRuns, heard, train
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


def fail(at: int, error: type[BaseException], rank: int | None = None) -> Disturb:
    def disturb(trainer: Trainer, step: int) -> None:
        if step == at and rank in (None, trainer.mesh.global_rank):
            raise error("spoilt")

    return disturb


@pytest.mark.parametrize(("error", "world"), [(Spoilt, 1), (KeyboardInterrupt, 2), (SystemExit, 1)])
def test_an_error_waits_for_the_checkpoint_that_is_being_written(
    runs: SmallRuns, error: type[BaseException], world: int
) -> None:
    def job(rank: int) -> None:
        slow_writing(0.5)
        with pytest.raises(error, match="spoilt"):
            train(runs.config(), fail(3, error))

    runs.run_ranks(world, job)
    assert runs.saved() == [2]


def test_a_signal_does_not_cut_it_off(runs: SmallRuns) -> None:
    """What ends the other ranks of a run when one has failed, sends SIGTERM first."""
    raised = threading.Event()

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
            train(runs.config(), disturb)

    runs.run_ranks(1, job)
    assert runs.saved() == [2]


def test_a_rank_that_fails_alone_leaves_a_checkpoint_and_no_rank_that_waits(runs: SmallRuns) -> None:
    def job(rank: int) -> int:
        slow_writing(0.5)
        try:
            return train(runs.config(), fail(3, Spoilt, rank=1))
        except Spoilt:
            os._exit(1)

    with pytest.raises(RankFailure) as failure:
        runs.run_ranks(2, job)
    assert runs.saved() == [2]
    assert "died without a word" in failure.value.by_rank[1]
    assert "onnection" in failure.value.by_rank[0] and "still running" not in failure.value.by_rank[0]


@pytest.mark.parametrize("stuck", [[0, 1], [1]])
def test_a_checkpoint_that_cannot_be_finished_is_given_up_with_a_word(runs: SmallRuns, stuck: list[int]) -> None:
    """Also where the other rank is stuck, and this one's share was written."""

    def job(rank: int) -> list[str]:
        if rank in stuck:
            slow_writing(10_000.0)
        with heard() as said, pytest.raises(Spoilt):
            train(runs.config(save_timeout=0.5), fail(3, Spoilt))
        return [text for text in said if "checkpoint" in text]

    for (text,) in runs.run_ranks(2, job):
        assert "the checkpoint of step 2 was not finished within 0.5 s" in text
    assert runs.saved() == []


def test_closing_raises_what_came_of_the_last_save(runs: SmallRuns) -> None:
    def job(rank: int) -> None:
        slow_writing(0.5)
        (runs.folder / "run").mkdir()
        (runs.folder / "run/checkpoints").write_text("a file, not a folder")
        with Trainer(runs.config()) as trainer:
            trainer.save(1)
            with pytest.raises(StateError, match="could not be written"):
                trainer.close()

    runs.run_ranks(1, job)


#: Children end with a checkpoint under way: seconds that writing takes, and the most that are waited for it.
SCRIPT = """
import os, sys
from contextlib import suppress
from energon_lite.trainer.checkpointing.checkpoint import CheckpointSaver, StateError
from tests.trainer.parallel.test_unfinished_saves import STATE, Layout, Part, slow_writing

folder = sys.argv[1]
late = 10_000.0, 0.5
for name, seconds, timeout in (("done", 0.5, 100.0), ("given up", *late), ("closed", *late), ("no folder", 0.0, 100.0)):
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0, name
        continue
    os.dup2(os.open(f"{folder}/{name}.log", os.O_CREAT | os.O_WRONLY), 2)
    slow_writing(seconds)
    part = Part(Layout())
    saver = CheckpointSaver(f"{folder}/{name}", part.mesh, timeout=timeout)
    saver.save(1, part.model, part.optimizer, STATE)
    if name == "closed":
        with suppress(StateError):
            saver.close()
    sys.exit()
"""


@pytest.mark.slow
def test_a_process_that_forgets_to_finish_ends_and_tells_what_was_lost(tmp_path: Path) -> None:
    (tmp_path / "no folder").write_text("a file, not a folder")
    done = run_program(["-c", SCRIPT, tmp_path], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert CheckpointFiles(tmp_path / "done").names() == ["step-00000001"]
    assert CheckpointFiles(tmp_path / "given up").names() == []
    said = {name: (tmp_path / f"{name}.log").read_text() for name in ("done", "given up", "closed", "no folder")}
    assert said["done"] == said["closed"] == "" and "was not finished within" in said["given up"], said
    assert "the checkpoint of step 1 could not be written" in said["no folder"], said


def test_a_save_that_is_late_is_told_of_and_a_saver_can_be_closed_twice(
    run_ranks: RunRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
            saver.close()
            saver.save(1, part.model, part.optimizer, STATE)
            saver.close()
            saver.close()
        assert 0 <= saver.seconds_blocked < 100 and 0 < saver.seconds_written < 100
        return said

    (said,) = run_ranks(1, job)
    assert "waiting for the checkpoint of step 1" in said[0]
    assert CheckpointFiles(tmp_path / "run").names() == ["step-00000001"]


# -- disks without room ------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(run_ranks: RunRanks, tmp_path: Path) -> Iterator[Path]:
    """A file system with room for one checkpoint and a half."""
    whole = run_ranks(1, lambda rank: Part(Layout(), num_layers=3).save(tmp_path / "measured", 1))[0]
    room = 3 * sum(file.stat().st_size for file in whole.iterdir()) // 2
    place = tmp_path / "disk"
    place.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={room}", "tmpfs", place]).returncode:
        pytest.skip("only root may mount")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def refused(part: Part, root: Path, step: int, *, meanwhile: bool) -> StateError:
    """The error of a save."""
    with pytest.raises(StateError) as caught:
        if meanwhile:
            saver = CheckpointSaver(root, part.mesh)
            saver.save(step, part.model, part.optimizer, STATE)
            saver.finish()
        else:
            part.save(root, step)
    return caught.value


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("meanwhile", [True, False])
def test_a_full_disk_is_said_with_what_is_needed_and_free(
    run_ranks: RunRanks, small_disk: Path, world: int, meanwhile: bool
) -> None:
    def save(rank: int) -> tuple[str, list[str], str]:
        part = Part(Layout(dp=world), num_layers=3)
        part.save(small_disk / "run", 1)
        error = refused(part, small_disk / "run", 2, meanwhile=meanwhile)
        part.mesh.barrier()  # the main rank has removed what there was
        left = sorted(path.name for path in (small_disk / "run").iterdir())
        part.mesh.barrier()
        (small_disk / "run/step-00000001").rename(small_disk / "run/.deleted-step-00000001") if rank == 0 else None
        part.mesh.barrier()
        return str(error), left, str(part.save(small_disk / "run", 3))  # the advice ends it: room was made

    for text, left, third in run_ranks(world, save):
        assert "there is no room for the checkpoint (No space left on device)" in text, text
        takes, free = (float(text.split(word)[1].split(" MiB")[0]) for word in ("it takes ", " MiB, "))
        assert 0.0 < free < takes, text
        assert str(small_disk / "run/.saving-00000002") in text and "train.keep" in text
        assert left == ["latest", "step-00000001"]
        assert third.endswith("step-00000003")


@pytest.mark.parametrize("world", [1, 2])
def test_a_limit_on_files_is_said_too(run_ranks: RunRanks, tmp_path: Path, world: int) -> None:
    """Of one rank, on all of them."""

    def save(rank: int) -> str:
        part = Part(Layout(dp=world))
        part.save(tmp_path / "run", 1)
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        if rank == world - 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
        error = refused(part, tmp_path / "run", 2, meanwhile=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        return str(error)

    for text in run_ranks(world, save):
        assert "there is no room for the checkpoint (File too large)" in text and "ulimit -f" in text, text
    assert latest_checkpoint(tmp_path / "run") == tmp_path / "run/step-00000001"


class Unsendable(Exception):
    """An error of a store's client that cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle a lock")


DENIED = PermissionError(13, "Permission denied", "/there")


@pytest.mark.parametrize(
    ("place", "error", "kind", "said"),
    [
        *((place, DENIED, OSError, "[Errno 13] Permission denied: '/there'") for place in ("begin", "publish")),
        ("publish", Unsendable("no token"), StateError, "Unsendable('no token')"),
    ],
    ids=["begin", "publish", "client"],
)
def test_what_the_main_rank_alone_cannot_do_ends_all_ranks_at_once(
    run_ranks: RunRanks, tmp_path: Path, place: str, error: Exception, kind: type[Exception], said: str
) -> None:
    def save(rank: int) -> None:
        part = Part(Layout(dp=2))

        def fail(*_: object) -> None:
            raise error

        setattr(CheckpointFiles, place, fail)
        part.save(tmp_path / "run", 1)

    assert errors_of(run_ranks, 2, kind, save) == [said] * 2


def test_what_no_living_save_owns_goes_before_the_next_one_is_written(tmp_path: Path) -> None:
    root, context = tmp_path / "run", multiprocessing.get_context("fork")
    begun, may_end = context.Event(), context.Event()

    def save(step: int, wait: bool) -> None:
        files = CheckpointFiles(root)
        Path(files.begin(step), "part").write_bytes(b"x" * 1000)
        begun.set()
        if wait:
            assert may_end.wait(60)
            files.publish(step, {})

    killed = context.Process(target=save, args=(2, False))
    killed.start()
    killed.join(60)
    living = context.Process(target=save, args=(5, True))
    begun.clear()
    living.start()
    assert begun.wait(60)
    files = CheckpointFiles(root)
    try:
        assert sorted(path.name for path in root.iterdir()) == [".saving-00000005"], "the killed one's is gone"
        files.begin(7)
        assert sorted(path.name for path in root.iterdir()) == [".saving-00000005", ".saving-00000007"]
        with pytest.raises(StateError, match="another process is saving step 5"):
            CheckpointFiles(root).begin(5)
    finally:
        may_end.set()
        living.join(60)
    assert living.exitcode == 0
    assert latest_checkpoint(root) == root / "step-00000005"
    foreign = root / ".venv-3.11" / "bin"
    foreign.mkdir(parents=True)
    CheckpointFiles(root).begin(9)
    assert sorted(path.name for path in root.glob(".saving-*")) == [".saving-00000007", ".saving-00000009"]
    assert foreign.exists(), "it is of no save"
    del files  # it has not published, nor failed: it is gone
    CheckpointFiles(root).begin(9)
    assert sorted(path.name for path in root.glob(".saving-*")) == [".saving-00000009"]
