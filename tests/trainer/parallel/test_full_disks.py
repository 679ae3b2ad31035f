"""A disk that is full while a checkpoint is saved: that is said, on all ranks, and nothing is left that takes room."""

from __future__ import annotations

import multiprocessing
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from energon_lite.errors import StateError
from energon_lite.trainer.checkpointing.checkpoint import CheckpointSaver, latest_checkpoint, save_checkpoint
from energon_lite.trainer.checkpointing.files import CheckpointFiles
from tests.testing import errors_of
from tests.trainer.parallel.rank_processes import RunRanks
from tests.trainer.parallel.test_parity import Layout
from tests.trainer.parallel.training_part import STATE, Part


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


@pytest.mark.parametrize("place", ["begin", "publish"])
def test_what_the_main_rank_alone_cannot_do_ends_all_ranks_at_once(
    run_ranks: RunRanks, tmp_path: Path, place: str
) -> None:
    def save(rank: int) -> None:
        part = Part(Layout(dp=2))

        def fail(*_: object) -> None:
            raise PermissionError(13, "Permission denied", "/there")

        setattr(CheckpointFiles, place, fail)
        save_checkpoint(tmp_path / "run", 1, part.model, part.optimizer, part.mesh, STATE)

    assert errors_of(run_ranks, 2, PermissionError, save) == ["[Errno 13] Permission denied: '/there'"] * 2


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
    CheckpointFiles(root).begin(9)
    assert sorted(path.name for path in root.glob(".saving-*")) == [".saving-00000007", ".saving-00000009"]
    del files  # it has not published, nor failed: it is gone
    CheckpointFiles(root).begin(9)
    assert sorted(path.name for path in root.glob(".saving-*")) == [".saving-00000009"]
