"""Rank of this process among those of a launcher, from environment variables, and the cores that it may use."""

from __future__ import annotations

import os
from typing import NamedTuple

from energon_lite.errors import UsageError

#: Variables of the rank and of the number of processes: torchrun (and launchers that follow it), srun, Open MPI, MPICH
#: (and Intel's and Cray's MPI, which derive from it), MVAPICH. Those of srun are the step's, not the job's: a
#: notebook or a batch script in a job with many tasks is one process.
_VARIABLES = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
)


class LaunchedPlace(NamedTuple):
    """Rank and world size of a launched process, and the variables that they come from."""

    rank: int
    world_size: int
    names: tuple[str, str]


def launched_place() -> LaunchedPlace | None:
    """Read the place from the variables of the first launcher that set them; None: the process was started alone.

    Raises:
        UsageError: there are several processes, and the rank of this one is missing or invalid.
    """
    for names in _VARIABLES:
        rank, size = (os.environ.get(name, "") for name in names)
        if size in ("", "1"):
            continue
        if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
            raise UsageError(
                f"{names[0]}={rank!r} and {names[1]}={size!r} in the environment are not a rank and a world size",
                fix="start with torchrun, or unset both",
            )
        return LaunchedPlace(int(rank), int(size), names)
    return None


def place_without_group() -> tuple[int, int]:
    """Return rank and world size without a process group: those of torchrun, as in ``init_process_group``; or (0, 1).

    Raises:
        UsageError: another launcher has started several processes. The role of these processes is unknown: each may be
            a rank, or start ranks (``ray start``), or do all the work by itself.
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


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
