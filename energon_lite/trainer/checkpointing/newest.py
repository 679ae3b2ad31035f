"""Selection of the checkpoint that a run resumes from: the newest complete one. Skipped ones are logged.

If checkpoints exist and none is complete, that is an error: the user must decide whether to restart at step 0.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from energon_lite.errors import StateError
from energon_lite.trainer.checkpointing.files import CheckpointFiles
from energon_lite.trainer.parallel.mesh import ParallelMesh

logger = logging.getLogger(__name__)

T = TypeVar("T")
Place = Path | str


def latest_checkpoint(root: str | os.PathLike[str]) -> Place | None:
    """Return the newest checkpoint under ``root`` whose files all exist, or None if there is none.

    Contents are not read.

    Each that is passed over is reported as a warning.

    Raises:
        StateError: checkpoints exist and none is complete; the message lists them.
    """
    files = CheckpointFiles(root)
    return _first_whole(files, files.newest_first(), lambda name: files.damage(name, sums=False), tell=True)


def find_checkpoint(root: str | os.PathLike[str], mesh: ParallelMesh) -> Place | None:
    """Return the newest undamaged checkpoint, or None if there is none.

    Every rank must call it, and reads a share of the files.

    Each that is passed over is reported as a warning, by the main rank.

    Raises:
        StateError: on all ranks: checkpoints exist and none is complete; the message lists them.
    """
    files = CheckpointFiles(root)

    def damage(name: str) -> str | None:
        mine = files.damage(name, share=slice(mesh.global_rank, None, mesh.world_size))
        return next(filter(None, of_all(mine, mesh.world_size)), None)

    return _first_whole(files, of_main(files.newest_first(), mesh), damage, tell=mesh.is_main)


def _first_whole(
    files: CheckpointFiles, names: list[str], damage: Callable[[str], str | None], *, tell: bool
) -> Place | None:
    """Return the first checkpoint without damage, or None if there are no names."""
    wrong: list[str] = []
    for name in names:
        if (problem := damage(name)) is None:
            break
        wrong.append(problem)
    else:
        if wrong:
            raise StateError(
                f"there are {len(wrong)} checkpoints, and none of them is whole: {'; '.join(wrong)}",
                where=files.root,
                fix="copy one of them there again, whole; or, to begin at step 0, move this folder away or name "
                "another one (train.checkpoints): what the former run wrote is kept",
            )
        return None
    behind = [other for other in names[names.index(name) + 1 :] if int(other[5:]) > int(name[5:])]
    wrong += [f"{other} is behind the one that `latest` names" for other in behind]
    if wrong and tell:
        logger.warning("%s: passed over, %s is used", "; ".join(wrong), name)
    return files.place(name)


def of_main(value: T, mesh: ParallelMesh, group: dist.ProcessGroup | None = None) -> T:
    """Return the main rank's value. Every rank (of a group of all of them) must call it."""
    values = [value]
    if mesh.world_size > 1:
        dist.broadcast_object_list(values, src=0, group=group)
    return values[0]


def of_all(value: T, ranks: int, group: dist.ProcessGroup | None = None) -> list[T]:
    """Gather the values of all ranks."""
    values = [value] * ranks
    if ranks > 1:
        dist.all_gather_object(values, value, group=group)
    return values
