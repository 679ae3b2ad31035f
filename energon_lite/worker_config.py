"""Who this process is for the loader: its data-parallel rank, its role in the model's parallel layout, its workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from energon_lite.errors import TopologyError, UsageError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["WorkerConfig"]

#: ``(exception, sample or list of samples or None, sources or None) -> None``; raising from it ends the iteration.
ErrorHandler = Callable[[Exception, Any, Any], None]

_MESH_DIMENSIONS = ("pp", "dp", "cp", "tp")


@dataclass(kw_only=True, slots=True)
class WorkerConfig:
    """The place of this process among those that load data.

    Two processes with the same ``rank`` get the same batches: that is how tensor-parallel peers are fed.

    Args:
        rank: data-parallel rank, 0 <= rank < world_size.
        world_size: number of data-parallel ranks.
        num_workers: worker processes of this rank; 0: load in the calling process. Never changes a batch.
        data_parallel_group: the group of the data-parallel ranks (one per tensor-parallel rank); used only by
            ``save_state_global`` and ``restore_state_global``. None: the default group.
        seed_offset: the seed of the run. Another one gives another order and other augmentations.
        loads_data: False on ranks that get no data (later pipeline stages); their loader yields None for every batch.
        saves_state: False on ranks whose state a peer saves; ``save_state_rank`` returns None there.
        global_error_handler: called with each sample that fails, in the process where it failed. None: log it.

    Raises:
        TopologyError: rank and world size do not fit together.

    Example:
        >>> WorkerConfig(rank=0, world_size=1, num_workers=2).num_workers
        2
    """

    rank: int
    world_size: int
    num_workers: int = 0
    data_parallel_group: ProcessGroup | None = None
    seed_offset: int = 0
    loads_data: bool = True
    saves_state: bool = True
    global_error_handler: ErrorHandler | None = None

    def __post_init__(self) -> None:
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise TopologyError(
                f"data-parallel rank {self.rank} of {self.world_size}",
                fix="give 0 <= rank < world_size; on ranks that load no data set loads_data=False, with any valid rank",
            )
        if self.num_workers < 0:
            raise UsageError(f"num_workers is {self.num_workers}", fix="give 0 (no worker processes) or more")

    @classmethod
    def default_worker_config(
        cls, num_workers: int = 4, data_parallel_group: ProcessGroup | None = None, *, seed_offset: int = 0
    ) -> WorkerConfig:
        """Rank and world size from ``torch.distributed`` if it is initialised, else a single rank."""
        import torch.distributed as dist

        running = dist.is_available() and dist.is_initialized()
        return cls(
            rank=dist.get_rank(data_parallel_group) if running else 0,
            world_size=dist.get_world_size(data_parallel_group) if running else 1,
            num_workers=num_workers,
            data_parallel_group=data_parallel_group,
            seed_offset=seed_offset,
        )

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh, *, num_workers: int = 4, seed_offset: int = 0) -> WorkerConfig:
        """Role of this rank in a device mesh with dimensions among ``pp``, ``dp``, ``cp`` and ``tp``.

        Ranks with the same ``dp`` coordinate get the same batches. Only the first pipeline stage loads data. The state
        is saved by the ranks whose ``pp``, ``cp`` and ``tp`` coordinates are all 0, and can be restored on every rank.

        Raises:
            TopologyError: the mesh has a dimension of another name, or this rank is not in it.

        Example:
            >>> mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
            >>> config = WorkerConfig.from_mesh(mesh, num_workers=2)
        """
        names = mesh.mesh_dim_names or ()
        unknown = [name for name in names if name not in _MESH_DIMENSIONS]
        if unknown or not names:
            raise TopologyError(
                f"a mesh with dimensions {list(names) or 'without names'}",
                fix=f"name the dimensions with mesh_dim_names, among {', '.join(_MESH_DIMENSIONS)}",
            )
        coordinates = mesh.get_coordinate()
        if coordinates is None:
            raise TopologyError("this rank is not part of the mesh", fix="build the loader only on ranks of the mesh")
        at = dict(zip(names, coordinates, strict=True))
        return cls(
            rank=at.get("dp", 0),
            world_size=mesh.size(names.index("dp")) if "dp" in names else 1,
            num_workers=num_workers,
            data_parallel_group=mesh.get_group("dp") if "dp" in names else None,
            seed_offset=seed_offset,
            loads_data=at.get("pp", 0) == 0,
            saves_state=all(at.get(name, 0) == 0 for name in ("pp", "cp", "tp")),
        )
