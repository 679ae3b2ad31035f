"""The place of this process among those that a launcher has started, as variables of the environment tell it."""

from __future__ import annotations

import os
from typing import NamedTuple

from energon_lite.errors import UsageError

__all__ = ["LaunchedPlace", "launched_place", "place_without_group"]

#: Rank and number of processes: of torchrun (and all that follow it), srun, mpirun. A step of srun, not the job: a
#: notebook or a batch script of a job with many tasks is one process.
_VARIABLES = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
)


class LaunchedPlace(NamedTuple):
    """A place, and the variables that tell it."""

    rank: int
    world_size: int
    names: tuple[str, str]


def launched_place() -> LaunchedPlace | None:
    """The place that the first of the launchers tells; None: this process was started alone.

    Raises:
        UsageError: there are several processes, and this one has no number.
    """
    for names in _VARIABLES:
        rank, size = (os.environ.get(name, "") for name in names)
        if size in ("", "1"):
            continue
        if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
            raise UsageError(
                f"{names[0]}={rank!r} and {names[1]}={size!r} in the environment are no rank and world size",
                fix="start with torchrun, or unset both",
            )
        return LaunchedPlace(int(rank), int(size), names)
    return None


def place_without_group() -> tuple[int, int]:
    """Rank and world size where there is no process group: those of torchrun, which ``init_process_group`` takes, too.

    Raises:
        UsageError: another launcher has started several processes. What they inherit its variables for is not known:
            each may be a rank, or start ranks (``ray start``), or do all the work by itself.
    """
    place = launched_place()
    if place is None or place.names == _VARIABLES[0]:
        return (0, 1) if place is None else place[:2]
    rank, size = place.names
    raise UsageError(
        f"this is one of {place.world_size} processes ({size}={place.world_size}), and there is no process group that "
        "tells its rank: each of them would get all samples",
        fix="call torch.distributed.init_process_group before; or give WorkerConfig("
        f'rank=int(os.environ["{rank}"]), world_size=int(os.environ["{size}"])); or, if each process is to get all '
        "samples, WorkerConfig(rank=0, world_size=1)",
    )
