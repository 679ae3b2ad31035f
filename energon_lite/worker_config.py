"""Place of this process: its data-parallel rank, its role in the model's parallel layout, and its workers."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, get_args

from energon_lite.entry_points import RemoteWorkers
from energon_lite.errors import TopologyError, UsageError, check_choice
from energon_lite.topology import RankMesh, Replica, Share, Stages, place_without_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger(__name__)

#: Handler ``(exception, sample or list of samples or None, sources or None) -> None``; raising ends the iteration.
ErrorHandler = Callable[[Exception, Any, Any], None]

_MESH_DIMENSIONS = ("pp", "dp", "cp", "tp")
#: Smallest and largest seed: what fits into 64 bits, with or without a sign.
_SEEDS = -(1 << 63), (1 << 64) - 1

#: Configuration of the loader whose hook runs now; each thread has its own.
ACTIVE_CONFIG: ContextVar[WorkerConfig | None] = ContextVar("energon_lite_config", default=None)

#: Number of this process among the workers of its rank; None: it is not a worker.
_process_number: int | None = None
#: Number of this thread, if it is a worker.
_thread_number: ContextVar[int | None] = ContextVar("energon_lite_worker", default=None)


def whole_numbers(**settings: Any) -> list[Any]:
    """Return settings as integers of Python, also those of numpy; None stays.

    Raises:
        UsageError: a setting is not an integer.
    """
    for name, value in settings.items():
        if value is not None and not hasattr(value, "__index__"):
            raise UsageError(f"{name} is {value!r}", fix="give an integer")
    return [None if value is None else int(value) for value in settings.values()]


class _ActiveConfig:
    """Descriptor of ``WorkerConfig.active_worker_config``, for the class and its instances."""

    def __get__(self, _: Any, owner: Any) -> WorkerConfig | None:
        return ACTIVE_CONFIG.get() or owner._activated or owner._asked


@dataclass(slots=True)
class WorkerConfig:
    """Place of this process among those that load data.

    Two processes with the same ``rank`` get the same batches; tensor-parallel peers are such processes.

    Args:
        rank: data-parallel rank, 0 <= rank < world_size.
        world_size: number of data-parallel ranks.
        num_workers: worker processes of this rank; 0: load in the calling process. It has no effect on the batches.
        workers: further workers, elsewhere, for what local ones cannot do in time: a
            :class:`~energon_lite.extras.remote_workers.TcpWorkers` or ``"tcp://host:port"``. No effect on the batches.
        data_parallel_group: the group of the data-parallel ranks (one per tensor-parallel rank); used only by
            ``save_state_global`` and ``restore_state_global``. None: the default group.
        seed_offset: the seed of the run. It determines the order and the augmentations.
        loads_data: False on ranks without data (later pipeline stages); their loader yields None for every batch.
        saves_state: False on ranks whose state a peer saves; ``save_state_rank`` returns None there.
        replica: the ranks that get the same batches, if they share the work; set by :meth:`from_mesh`.
        global_error_handler: called with each sample that fails, in the process where it failed. None: log it.
        restore_error_handler: called with the SampleError and the key when ``restore_sample`` fails, before that error
            is raised. None: only raise it.
        worker_debug_path: file for the loader's trace if ``worker_log_level`` is 1 or more, and the loader has no
            ``trace`` of its own. ``{pid}`` in it stands for the process, ``{worker_id}`` for the loader and each of its
            workers, which have a file each: 0 is the loader of rank 0, 1 to ``num_workers`` are its workers, etc.
        worker_log_level: see ``worker_debug_path``.

    Raises:
        TopologyError: rank and world size are inconsistent.
        UsageError: a number is negative, no integer, or has more than 64 bits; or ``worker_debug_path`` has an unknown
            field.

    Example:
        >>> WorkerConfig(0, 1, 2).num_workers
        2
    """

    rank: int
    world_size: int
    num_workers: int = 0
    data_parallel_group: ProcessGroup | None = None
    _: KW_ONLY
    workers: RemoteWorkers | str | None = None
    seed_offset: int = 0
    loads_data: bool = True
    saves_state: bool = True
    replica: Replica | None = None
    global_error_handler: ErrorHandler | None = None
    restore_error_handler: ErrorHandler | None = None
    worker_debug_path: str | None = None
    worker_log_level: int = 0
    _before_group: bool = field(default=False, init=False, repr=False, compare=False)  # rank read without a group

    #: As in Energon. Workers have no order here, so it is always 0.
    worker_id_offset: ClassVar[int] = 0
    #: In a hook: the configuration of the loader that runs it, in worker processes and threads, too; processes that
    #: were not forked have it without process groups. Elsewhere: the one set between :meth:`worker_activate` and
    #: :meth:`worker_deactivate`, or that of the loader whose batch was requested last. None: there was no loader yet.
    active_worker_config: ClassVar[_ActiveConfig] = _ActiveConfig()
    _activated: ClassVar[WorkerConfig | None] = None
    _asked: ClassVar[WorkerConfig | None] = None
    _sample_indices: ClassVar[list[int]] = []

    def __post_init__(self) -> None:
        self.rank, self.world_size, self.num_workers, self.seed_offset = whole_numbers(
            rank=self.rank, world_size=self.world_size, num_workers=self.num_workers, seed_offset=self.seed_offset
        )
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise TopologyError(
                f"data-parallel rank {self.rank} of {self.world_size}",
                fix="give 0 <= rank < world_size; on ranks that load no data set loads_data=False, with any valid rank",
            )
        if self.num_workers < 0:
            raise UsageError(f"num_workers is {self.num_workers}", fix="give 0 (no worker processes) or more")
        if not _SEEDS[0] <= self.seed_offset <= _SEEDS[1]:
            raise UsageError(f"seed_offset is {self.seed_offset}", fix="give a number that fits into 64 bits")
        self.debug_file()
        if self.worker_log_level > 0 and self.worker_debug_path is None:
            logger.warning(
                "worker_log_level=%d has no effect without worker_debug_path; or give the loader trace=, a file",
                self.worker_log_level,
            )

    def debug_file(self, worker: int | None = None) -> str | None:
        """File that ``worker_debug_path`` and ``worker_log_level`` name; None: no file.

        Args:
            worker: number of a worker of this rank; None: the file of the loader.
        """
        if self.worker_debug_path is None or self.worker_log_level < 1:
            return None
        number = self.rank * (self.num_workers + 1) + (0 if worker is None else 1 + worker)
        try:
            return str(self.worker_debug_path).format(worker_id=number, pid=os.getpid())
        except (LookupError, ValueError, AttributeError) as error:
            what = f"worker_debug_path {self.worker_debug_path!r} has a field that is not known: {error}"
            raise UsageError(what, fix="write no other fields than {worker_id} and {pid}") from None

    def debug_files_of_workers(self) -> list[str]:
        """Files of the workers of this rank, if ``worker_debug_path`` names one for each; else an empty list."""
        files = [self.debug_file(worker) for worker in range(self.num_workers)]
        named = [file for file in files if file is not None]
        return named if len({*named, self.debug_file()}) == self.num_workers + 1 else []

    @property
    def reads(self) -> bool:
        """True if this rank makes batches itself; else it gets a peer's, or none."""
        return self.loads_data and (self.replica is None or self.replica.reads)

    def for_workers(self) -> WorkerConfig:
        """Copy that can be sent to a worker: without process groups and handlers that only the trainer calls."""
        sent = copy.copy(self)
        sent.data_parallel_group = sent.restore_error_handler = sent.workers = None
        if self.replica is not None:
            sent.replica = replace(self.replica, groups={})
        return sent

    # -- by Energon's names -------------------------------------------------------------------------------------------

    def config(self) -> dict[str, Any]:
        """The configuration as plain data: rank, world size, workers, and the size of the group."""
        group = self.data_parallel_group
        sizes = {"rank": self.rank, "world_size": self.world_size, "num_workers": self.num_workers}
        return {**sizes, "data_parallel_group": None if group is None else group.size()}

    def global_rank(self) -> int:
        """Rank in the whole world, not in the group."""
        if self.data_parallel_group is None:
            return self.rank
        import torch.distributed as dist

        return dist.get_global_rank(self.data_parallel_group, self.rank)

    def rank_worker_id(self) -> int:
        """Number of this worker among those of its rank; 0 in the trainer.

        The assignment of batches to workers differs from run to run: seed by the sample (``TaskEncoder.rng``) instead.
        """
        return _own_number() or 0

    def global_worker_id(self, override_local_worker_id: int | None = None) -> int:
        """Number of this worker, or of another one of its rank, among the workers of all ranks."""
        local = self.rank_worker_id() if override_local_worker_id is None else override_local_worker_id
        return self.rank * self.num_workers + local

    def worker_seed(self, override_local_worker_id: int | None = None) -> int:
        """Seed of the worker, 32 bits, derived from its number and ``seed_offset``."""
        number = self.global_worker_id(override_local_worker_id) if self.num_workers else self.rank
        digest = hashlib.sha256(f"worker {number} of seed {self.seed_offset}".encode()).digest()
        return int.from_bytes(digest[:4], "big")

    def assert_worker(self) -> None:
        """Do nothing; Energon's method checks that it is called in a worker."""

    def should_log(self, level: int) -> bool:
        """True if ``worker_log_level`` is at least ``level``."""
        return level <= self.worker_log_level

    def worker_log(self, data: Mapping[str, Any]) -> None:
        """Append a line of JSON to the log file, or print it if there is none.

        The file is that of ``worker_debug_path``, for a worker its own, with ``.log`` appended (the name without it is
        the loader's trace).
        """
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
        """Set the sample of this worker, for the user's own loops outside of a loader."""
        if WorkerConfig._sample_indices:
            raise UsageError("a worker config is active already", fix="call worker_deactivate() first")
        WorkerConfig._activated = self
        WorkerConfig._sample_indices = [sample_index]

    def worker_push_sample_index(self, sample_index: int) -> None:
        """Enter a sample nested in the current one."""
        WorkerConfig._sample_indices.append(sample_index)

    def worker_pop_sample_index(self) -> int:
        """Return to the outer sample, and return the number of the inner one."""
        return WorkerConfig._sample_indices.pop()

    def worker_deactivate(self) -> None:
        """Leave all samples."""
        WorkerConfig._activated = WorkerConfig._asked = None
        WorkerConfig._sample_indices = []

    @property
    def active_worker_sample_index(self) -> int:
        """Number of the innermost sample. In hooks use ``TaskEncoder.current_sample_index``."""
        return self._number_of(-1)

    @property
    def active_worker_batch_index(self) -> int:
        """Number of the outermost sample. In hooks use ``TaskEncoder.current_batch_index``."""
        return self._number_of(0)

    def _number_of(self, place: int) -> int:
        if not WorkerConfig._sample_indices:
            fix = "in a hook, ask the task encoder: current_sample_index, current_batch_index, rng"
            raise UsageError("no worker config is active", fix=fix)
        return WorkerConfig._sample_indices[place] * max(self.num_workers, 1) + self.rank_worker_id()

    @classmethod
    def default_worker_config(
        cls, num_workers: int = 4, data_parallel_group: ProcessGroup | None = None, *, seed_offset: int = 0
    ) -> WorkerConfig:
        """Make a configuration from the environment.

        Rank and world size come from ``torch.distributed`` if it is initialised, else from ``torchrun``'s ``RANK`` and
        ``WORLD_SIZE``, else there is a single rank.

        Raises:
            UsageError: there is no process group, and ``srun`` or ``mpirun`` has started several processes.
        """
        import torch.distributed as dist

        running = dist.is_available() and dist.is_initialized()
        group = data_parallel_group
        rank, size = (dist.get_rank(group), dist.get_world_size(group)) if running else place_without_group()
        config = cls(rank, size, num_workers, group, seed_offset=seed_offset)
        config._before_group = not running
        return config

    @classmethod
    def from_mesh(
        cls,
        mesh: DeviceMesh | RankMesh,
        *,
        num_workers: int = 4,
        seed_offset: int = 0,
        share: Share = "load",
        stages: Stages = "first",
        last_stage_fields: Sequence[str] | None = None,
    ) -> WorkerConfig:
        """Make the configuration of this rank in a device mesh with dimensions among ``pp``, ``dp``, ``cp``, ``tp``.

        Ranks with the same ``dp`` coordinate get the same batches. The state is saved by the ranks whose ``pp``, ``cp``
        and ``tp`` coordinates are all 0, and can be restored on every rank.

        Args:
            mesh: the mesh, with named dimensions; or the trainer's, from ``build_mesh``.
            num_workers: worker processes of each rank that loads.
            seed_offset: the seed of the run.
            share: ``load``: tensor- and context-parallel peers load the same batches, each for itself; ``broadcast``:
                one rank of each replica of the model loads, and sends its batches to the peers. Then all ranks that get
                batches must take them in step.
            stages: the pipeline stages that get batches: the ``first``, both ``ends``, or ``all``. The loader of any
                other stage yields None for each batch.
            last_stage_fields: the fields of a batch that the last stage needs, such as labels and masks. Of a dict it
                gets these entries and those whose names start with ``__``; of a dataclass the other fields are None.

        Raises:
            TopologyError: the mesh has a dimension with another name, or this rank is not in it.
            UsageError: ``share`` or ``stages`` has an unknown value.

        Example:
            >>> mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
            >>> config = WorkerConfig.from_mesh(mesh, num_workers=2)
        """
        check_choice("share", share, get_args(Share))
        check_choice("stages", stages, get_args(Stages))
        devices: Any = getattr(mesh, "device_mesh", mesh)
        if devices is None:
            return cls(0, 1, num_workers, seed_offset=seed_offset)
        names = devices.mesh_dim_names or ()
        unknown = [name for name in names if name not in _MESH_DIMENSIONS]
        if unknown or not names:
            fix = f"name the dimensions with mesh_dim_names, among {', '.join(_MESH_DIMENSIONS)}"
            raise TopologyError(f"a mesh with dimensions {list(names) or 'without names'}", fix=fix)
        coordinates = devices.get_coordinate()
        if coordinates is None:
            raise TopologyError("this rank is not part of the mesh", fix="build the loader only on ranks of the mesh")
        at = dict(zip(names, coordinates, strict=True))
        sizes = dict(zip(names, devices.shape, strict=True))
        replica = Replica(
            coordinates={axis: at[axis] for axis in names if axis != "dp"},
            groups={axis: devices.get_group(axis) for axis in names if axis != "dp" and sizes[axis] > 1},
            stages=sizes.get("pp", 1),
            share=share,
            stages_with_data=stages,
            last_stage_fields=None if last_stage_fields is None else tuple(last_stage_fields),
        )
        return cls(
            rank=at.get("dp", 0),
            world_size=sizes.get("dp", 1),
            num_workers=num_workers,
            data_parallel_group=devices.get_group("dp") if "dp" in names else None,
            seed_offset=seed_offset,
            loads_data=replica.needs_data,
            saves_state=replica.is_first,
            replica=replica,
        )


def set_worker_number(number: int, *, thread: bool = False) -> None:
    """Set the number of this process, or of this thread, among the workers of its rank."""
    global _process_number
    if thread:
        _thread_number.set(number)
    else:
        _process_number = number


def _own_number() -> int | None:
    number = _thread_number.get()
    return _process_number if number is None else number
