"""A save that is killed leaves the former checkpoint; what is no checkpoint is not taken for one."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from energon_lite.errors import StateError
from energon_lite.trainer.checkpointing import checkpoint
from energon_lite.trainer.checkpointing import files as checkpoint_files
from energon_lite.trainer.checkpointing.checkpoint import latest_checkpoint, read_state
from tests.trainer.parallel.rank_processes import RankFailure, RunRanks
from tests.trainer.parallel.test_parity import Layout
from tests.trainer.parallel.training_part import Part


def kill_instead(*args: Any, **kwargs: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def die_when(condition: Callable[[Path], bool]) -> Callable[..., Any]:
    """Dies at the first change of a folder after which ``condition`` holds."""

    def wrap(change: Callable[..., Any]) -> Callable[..., Any]:
        def dying(folder: Path, *args: Any) -> Any:
            change(folder, *args)
            if condition(folder.parent if folder.name.startswith(("step", ".")) else folder):
                kill_instead()

        return dying

    return wrap


def without_name(folder: Path) -> bool:
    return (folder / ".replaced-step-00000002").exists() and not (folder / "step-00000002").exists()


def test_a_crash_while_a_checkpoint_is_replaced_leaves_the_one_before_it(run_ranks: RunRanks, tmp_path: Path) -> None:
    def die(rank: int) -> None:
        part = Part(Layout())
        part.save(tmp_path, 1)
        part.save(tmp_path, 2)
        sabotage("checkpoint_files.Path.rename", die_when(without_name))
        part.save(tmp_path, 2)

    with pytest.raises(RankFailure, match="died without a word"):
        run_ranks(1, die)
    assert latest_checkpoint(tmp_path) == tmp_path / "step-00000001"


def sabotage(where: str, wrap: Callable[[Any], Any]) -> None:
    """Put ``wrap(f)`` in the place of a function ``f`` that the checkpoint module uses. For a process that will die."""
    *path, name = where.split(".")
    owner: Any = checkpoint_files if path and path[0] == "checkpoint_files" else checkpoint
    path = [part for part in path if part != "checkpoint_files"]
    for part in path:
        owner = getattr(owner, part)
    setattr(owner, name, wrap(getattr(owner, name)))


def test_without_latest_the_newest_finished_one_counts(tmp_path: Path) -> None:
    for name in ("step-00000001", "step-00000002", "step-00000004", ".saving-00000003", ".deleted-step-00000009"):
        (tmp_path / name).mkdir()
        if name != "step-00000004":
            (tmp_path / name / "manifest.json").write_text('{"files": {}}')
    assert latest_checkpoint(tmp_path) == tmp_path / "step-00000002"
    (tmp_path / "latest").write_text("step-00000001\n")
    assert latest_checkpoint(tmp_path) == tmp_path / "step-00000001"
    (tmp_path / "latest").write_text("step-00000007\n")
    assert latest_checkpoint(tmp_path) == tmp_path / "step-00000002"
    assert latest_checkpoint(tmp_path / "nothing") is None


class Bomb:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_a_checkpoint_cannot_run_code(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    with pytest.raises(StateError, match=r"posix\.mkdir does not belong"):
        read_state(tmp_path)
    assert not (tmp_path / "exploded").exists() and (tmp_path / ".metadata").exists()


def test_what_is_no_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="not a readable checkpoint"):
        read_state(tmp_path)
