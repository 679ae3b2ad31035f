"""Topology: the rank of this process among those of a launcher, from environment variables, and the cores that it may
use; and its role in the parallel layout of a model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from energon_lite.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

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

Share = Literal["load", "broadcast"]
Stages = Literal["first", "ends", "all"]


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


def cores_per_rank() -> int:
    """Return an equal share of the machine's cores, at least 1, by the launcher's number of ranks on this machine."""
    return max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


# -- layout of a model ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Replica:
    """Ranks that use the same batches as this one: its peers along the axes ``pp``, ``cp`` and ``tp``.

    Args:
        coordinates: this rank's coordinate on each of these axes; an axis that is not named has one rank.
        groups: the process group of each axis with more than one rank.
        stages: number of pipeline stages.
        share: ``load``: every rank that needs the batch loads it; ``broadcast``: one loads it, and sends it to others.
        stages_with_data: the stages that need batches: the first, the first and the last, or all.
        last_stage_fields: the fields of a batch that the last stage needs; None: all.
    """

    coordinates: Mapping[str, int] = field(default_factory=dict)
    groups: Mapping[str, ProcessGroup] = field(default_factory=dict)
    stages: int = 1
    share: Share = "load"
    stages_with_data: Stages = "first"
    last_stage_fields: tuple[str, ...] | None = None

    @property
    def is_first(self) -> bool:
        """True on the rank that represents the replica: it saves the state."""
        return not any(self.coordinates.values())

    @property
    def needs_data(self) -> bool:
        """True if this rank's stage needs batches."""
        return self.coordinates.get("pp", 0) in self.fed_stages

    @property
    def fed_stages(self) -> tuple[int, ...]:
        """Numbers of the stages that need batches."""
        last = {"first": 1, "ends": 2, "all": self.stages}[self.stages_with_data]
        return tuple(range(self.stages)) if last >= self.stages else (0, self.stages - 1)[:last]

    @property
    def reads(self) -> bool:
        """True if this rank makes batches itself."""
        return self.is_first if self.share == "broadcast" else self.needs_data

    @property
    def is_last_stage(self) -> bool:
        return self.stages > 1 and self.coordinates.get("pp", 0) == self.stages - 1


class RankMesh(Protocol):
    """A mesh that has torch's with the same axes, or None if there is one rank, such as the trainer's."""

    @property
    def device_mesh(self) -> DeviceMesh | None: ...
