"""Who this process is for the loader: its data-parallel rank, its role in the model's parallel layout, its workers."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from energon_lite.errors import TopologyError, UsageError
from energon_lite.launcher import place_without_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["ACTIVE_CONFIG", "Replica", "WorkerConfig", "set_worker_number"]

logger = logging.getLogger(__name__)

#: ``(exception, sample or list of samples or None, sources or None) -> None``; raising from it ends the iteration.
ErrorHandler = Callable[[Exception, Any, Any], None]

_MESH_DIMENSIONS = ("pp", "dp", "cp", "tp")

#: The config of the loader whose hook runs here; each thread has its own.
ACTIVE_CONFIG: ContextVar[WorkerConfig | None] = ContextVar("energon_lite_config", default=None)

#: Of this process among the workers of its rank; None: it is none of them.
_process_number: int | None = None
#: The same of a thread that is a worker.
_thread_number: ContextVar[int | None] = ContextVar("energon_lite_worker", default=None)

Share = Literal["load", "broadcast"]
Stages = Literal["first", "ends", "all"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Replica:
    """The ranks that work on the same batches as this one: its peers along the axes ``pp``, ``cp`` and ``tp``.

    Args:
        coordinates: this rank's place along each of these axes; an axis that is not named has one rank.
        groups: the process group of each axis with more than one rank.
        stages: number of pipeline stages.
        share: ``load``: every rank that needs the batch loads it; ``broadcast``: one does, and sends it to the others.
        stages_with_data: which stages need batches: the first, the first and the last, or all.
        last_stage_fields: what the last stage needs of a batch; None: everything.
    """

    coordinates: Mapping[str, int] = field(default_factory=dict)
    groups: Mapping[str, ProcessGroup] = field(default_factory=dict)
    stages: int = 1
    share: Share = "load"
    stages_with_data: Stages = "first"
    last_stage_fields: tuple[str, ...] | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that stands for all of them: it saves the state."""
        return not any(self.coordinates.values())

    @property
    def needs_data(self) -> bool:
        """Whether this rank's stage needs batches."""
        return self.coordinates.get("pp", 0) in self.fed_stages

    @property
    def fed_stages(self) -> tuple[int, ...]:
        """The stages that need batches."""
        last = {"first": 1, "ends": 2, "all": self.stages}[self.stages_with_data]
        return tuple(range(self.stages)) if last >= self.stages else (0, self.stages - 1)[:last]

    @property
    def reads(self) -> bool:
        """Whether this rank makes batches itself."""
        return self.is_first if self.share == "broadcast" else self.needs_data

    @property
    def is_last_stage(self) -> bool:
        return self.stages > 1 and self.coordinates.get("pp", 0) == self.stages - 1


class _ActiveConfig:
    """``WorkerConfig.active_worker_config``, on the class and on its objects."""

    def __get__(self, _: Any, owner: Any) -> WorkerConfig | None:
        return ACTIVE_CONFIG.get() or owner._activated or owner._asked


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
        replica: the ranks that get the same batches, if they are to share the work; :meth:`from_mesh` fills it in.
        global_error_handler: called with each sample that fails, in the process where it failed. None: log it.
        restore_error_handler: called with the SampleError and the key when ``restore_sample`` fails, before that error
            is raised. None: it is raised.
        worker_debug_path: with ``worker_log_level`` of 1 or more, the loader's trace goes there, if it has no ``trace``
            of its own. ``{pid}`` in it stands for the process, ``{worker_id}`` for the loader and each of its workers,
            which have a file each: 0 is the loader of rank 0, 1 to ``num_workers`` are its workers, and so on.
        worker_log_level: see ``worker_debug_path``.

    Raises:
        TopologyError: rank and world size do not fit together.
        UsageError: a number is negative, or ``worker_debug_path`` has another field.

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
    replica: Replica | None = None
    global_error_handler: ErrorHandler | None = None
    restore_error_handler: ErrorHandler | None = None
    worker_debug_path: str | None = None
    worker_log_level: int = 0
    _before_group: bool = field(default=False, init=False, repr=False, compare=False)  # guessed, without one

    #: As in Energon. Workers here have no order among themselves, so nothing ever moves it.
    worker_id_offset: ClassVar[int] = 0
    #: In a hook: the config of the loader that it runs for, in worker processes and threads, too; processes that were
    #: not forked have it without process groups. Else: the one between :meth:`worker_activate` and
    #: :meth:`worker_deactivate`, or that of the loader that was asked for a batch last. None: there was no loader yet.
    active_worker_config: ClassVar[_ActiveConfig] = _ActiveConfig()
    _activated: ClassVar[WorkerConfig | None] = None
    _asked: ClassVar[WorkerConfig | None] = None
    _sample_indices: ClassVar[list[int]] = []

    def __post_init__(self) -> None:
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise TopologyError(
                f"data-parallel rank {self.rank} of {self.world_size}",
                fix="give 0 <= rank < world_size; on ranks that load no data set loads_data=False, with any valid rank",
            )
        if self.num_workers < 0:
            raise UsageError(f"num_workers is {self.num_workers}", fix="give 0 (no worker processes) or more")
        self.debug_file()
        if self.worker_log_level > 0 and self.worker_debug_path is None:
            logger.warning(
                "worker_log_level=%d has no effect without worker_debug_path; or give the loader trace=, a file",
                self.worker_log_level,
            )

    def debug_file(self, worker: int | None = None) -> str | None:
        """The file that ``worker_debug_path`` and ``worker_log_level`` ask for; None: they ask for none.

        Args:
            worker: that of a worker of this rank, by its number; None: that of the loader.
        """
        if self.worker_debug_path is None or self.worker_log_level < 1:
            return None
        number = self.rank * (self.num_workers + 1) + (0 if worker is None else 1 + worker)
        try:
            return str(self.worker_debug_path).format(worker_id=number, pid=os.getpid())
        except (LookupError, ValueError, AttributeError) as error:
            raise UsageError(
                f"worker_debug_path {self.worker_debug_path!r} has a field that is not known: {error}",
                fix="write no other fields than {worker_id} and {pid}",
            ) from None

    def debug_files_of_workers(self) -> list[str]:
        """Those of the workers of this rank, where ``worker_debug_path`` names one for each."""
        files = [self.debug_file(worker) for worker in range(self.num_workers)]
        found = [file for file in files if file is not None]
        return found if len({*found, self.debug_file()}) == self.num_workers + 1 else []

    @property
    def reads(self) -> bool:
        """Whether this rank makes batches itself; else it gets a peer's, or none."""
        return self.loads_data and (self.replica is None or self.replica.reads)

    def for_workers(self) -> WorkerConfig:
        """A copy that can be sent to a worker: without process groups, and what only the trainer calls."""
        sent = copy.copy(self)
        sent.data_parallel_group = sent.restore_error_handler = None
        if self.replica is not None:
            sent.replica = replace(self.replica, groups={})
        return sent

    # -- by Energon's names -------------------------------------------------------------------------------------------

    def config(self) -> dict[str, Any]:
        """The place as plain data: rank, world size, workers, and the size of the group."""
        group = self.data_parallel_group
        sizes = {"rank": self.rank, "world_size": self.world_size, "num_workers": self.num_workers}
        return {**sizes, "data_parallel_group": None if group is None else group.size()}

    def global_rank(self) -> int:
        """The rank in the whole world, not in the group."""
        if self.data_parallel_group is None:
            return self.rank
        import torch.distributed as dist

        return dist.get_global_rank(self.data_parallel_group, self.rank)

    def rank_worker_id(self) -> int:
        """The number of this worker among those of its rank; 0 in the trainer. Which worker makes which batch is
        nobody's business, and differs from run to run: seed by the sample (``TaskEncoder.rng``) instead."""
        return _own_number() or 0

    def global_worker_id(self, override_local_worker_id: int | None = None) -> int:
        """The number of this worker, or of another one of its rank, among those of all ranks."""
        local = self.rank_worker_id() if override_local_worker_id is None else override_local_worker_id
        return self.rank * self.num_workers + local

    def worker_seed(self, override_local_worker_id: int | None = None) -> int:
        """32 bits that belong to the worker, and to ``seed_offset``."""
        number = self.global_worker_id(override_local_worker_id) if self.num_workers else self.rank
        digest = hashlib.sha256(f"worker {number} of seed {self.seed_offset}".encode()).digest()
        return int.from_bytes(digest[:4], "big")

    def assert_worker(self) -> None:
        """As in Energon, where it sees that a worker is at work; here anybody may."""

    def should_log(self, level: int) -> bool:
        """Whether ``worker_log_level`` is that high."""
        return level <= self.worker_log_level

    def worker_log(self, data: Mapping[str, Any]) -> None:
        """A line of JSON to the file that ``worker_debug_path`` names, the worker's own one in a worker, with ``.log``
        behind it (the file itself is the loader's trace); to the standard output, if it names none."""
        line = json.dumps(dict(data), default=str)
        path = self.debug_file(_own_number())
        if path is None:
            print(line, flush=True)
            return
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        with open(f"{path}.log", "a") as file:
            file.write(line + "\n")

    def worker_activate(
        self, sample_index: int, override_global_rank: int | None = None, cache_pool: Any = None
    ) -> None:
        """Say that this worker is at a sample from now on: for loops of your own, outside of a loader."""
        if WorkerConfig._sample_indices:
            raise UsageError("a worker config is active already", fix="call worker_deactivate() first")
        WorkerConfig._activated, WorkerConfig._sample_indices = self, [sample_index]

    def worker_push_sample_index(self, sample_index: int) -> None:
        """Be at a sample inside of another one."""
        WorkerConfig._sample_indices.append(sample_index)

    def worker_pop_sample_index(self) -> int:
        """Be at the outer one again; returns the inner one."""
        return WorkerConfig._sample_indices.pop()

    def worker_deactivate(self) -> None:
        """Be at no sample."""
        WorkerConfig._activated = WorkerConfig._asked = None
        WorkerConfig._sample_indices = []

    @property
    def active_worker_sample_index(self) -> int:
        """The number of the sample that :meth:`worker_activate` named. Hooks: ``TaskEncoder.current_sample_index``."""
        return self._number_of(-1)

    @property
    def active_worker_batch_index(self) -> int:
        """The number of the outermost one. In hooks: ``TaskEncoder.current_batch_index``."""
        return self._number_of(0)

    def _number_of(self, place: int) -> int:
        if not WorkerConfig._sample_indices:
            raise UsageError(
                "no worker config is active",
                fix="in a hook, ask the task encoder: current_sample_index, current_batch_index, rng",
            )
        return WorkerConfig._sample_indices[place] * max(self.num_workers, 1) + self.rank_worker_id()

    @classmethod
    def default_worker_config(
        cls, num_workers: int = 4, data_parallel_group: ProcessGroup | None = None, *, seed_offset: int = 0
    ) -> WorkerConfig:
        """Rank and world size from ``torch.distributed`` if it is initialised, else from ``torchrun``'s ``RANK`` and
        ``WORLD_SIZE``, else a single rank.

        Raises:
            UsageError: there is no process group, and ``srun`` or ``mpirun`` has started several processes.
        """
        import torch.distributed as dist

        running = dist.is_available() and dist.is_initialized()
        group = data_parallel_group
        rank, size = (dist.get_rank(group), dist.get_world_size(group)) if running else place_without_group()
        made = cls(rank=rank, world_size=size, num_workers=num_workers, seed_offset=seed_offset)
        made.data_parallel_group, made._before_group = group, not running
        return made

    @classmethod
    def from_mesh(
        cls,
        mesh: DeviceMesh,
        *,
        num_workers: int = 4,
        seed_offset: int = 0,
        share: Share = "load",
        stages: Stages = "first",
        last_stage_fields: Sequence[str] | None = None,
    ) -> WorkerConfig:
        """Role of this rank in a device mesh with dimensions among ``pp``, ``dp``, ``cp`` and ``tp``.

        Ranks with the same ``dp`` coordinate get the same batches. The state is saved by the ranks whose ``pp``, ``cp``
        and ``tp`` coordinates are all 0, and can be restored on every rank.

        Args:
            mesh: the mesh; its dimensions are named.
            num_workers: worker processes of each rank that loads.
            seed_offset: the seed of the run.
            share: ``load``: tensor- and context-parallel peers load the same batches, each for itself;
                ``broadcast``: one rank of each replica of the model loads, and sends its batches to the peers. Then all
                ranks that get batches must take them in step.
            stages: the pipeline stages that get batches: the ``first``, both ``ends``, or ``all``. The loader of any
                other stage yields None for each batch.
            last_stage_fields: the fields of a batch that the last stage needs, labels and masks, say; of a dict it gets
                these entries and those whose names begin with ``__``, of a dataclass the other fields are None.

        Raises:
            TopologyError: the mesh has a dimension of another name, or this rank is not in it.
            UsageError: ``share`` or ``stages`` is none of these.

        Example:
            >>> mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
            >>> config = WorkerConfig.from_mesh(mesh, num_workers=2)
        """
        for name, value, choices in (("share", share, get_args(Share)), ("stages", stages, get_args(Stages))):
            if value not in choices:
                raise UsageError(f"{name} is {value!r}", fix=f"give one of {', '.join(map(repr, choices))}")
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
        sizes = dict(zip(names, mesh.shape, strict=True))
        replica = Replica(
            coordinates={axis: at[axis] for axis in names if axis != "dp"},
            groups={axis: mesh.get_group(axis) for axis in names if axis != "dp" and sizes[axis] > 1},
            stages=sizes.get("pp", 1),
            share=share,
            stages_with_data=stages,
            last_stage_fields=None if last_stage_fields is None else tuple(last_stage_fields),
        )
        return cls(
            rank=at.get("dp", 0),
            world_size=sizes.get("dp", 1),
            num_workers=num_workers,
            data_parallel_group=mesh.get_group("dp") if "dp" in names else None,
            seed_offset=seed_offset,
            loads_data=replica.needs_data,
            saves_state=replica.is_first,
            replica=replica,
        )


def set_worker_number(number: int, *, thread: bool = False) -> None:
    """Say which worker of its rank this process is, or this thread."""
    global _process_number
    if thread:
        _thread_number.set(number)
    else:
        _process_number = number


def _own_number() -> int | None:
    number = _thread_number.get()
    return _process_number if number is None else number
