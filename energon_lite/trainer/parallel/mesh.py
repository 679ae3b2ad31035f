"""The mesh: the ranks of a run as a grid with the axes pp, dp, cp and tp, and their process groups.

Tensor-parallel peers communicate most, so they are neighbours: ``tp`` varies fastest, then ``cp``, ``dp`` and ``pp``.
Sixteen ranks with ``tp=2, pp=4`` have ``dp=2``: ranks 0 and 1 are tensor-parallel peers, 0 and 2 are data-parallel
peers, and 0, 4, 8 and 12 are the four stages of one pipeline.
"""

from __future__ import annotations

import contextlib
import glob
import itertools
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from energon_lite.errors import TopologyError
from energon_lite.trainer.parallel.rank_grid import AXES, DEFAULT_ORDER, RankGrid, fit_sizes

#: Name of gloo's threads.
_GLOO_THREAD = "pt_gloo_runloop"
#: Seconds between two looks at the threads.
_LOOK_EVERY = 2e-3
#: The most seconds to wait for them.
_LIMIT = 10.0
#: Numbers of the process groups that this process starts.
_STARTED = itertools.count()


#: Names of the one-way groups between pipeline stages: activations to the next stage and from the last to the first
#: (with virtual stages), gradients in reverse. NCCL serves the messages of a group between two ranks one after the
#: other in both directions, so two ranks that both send first would deadlock; so each direction has its own group.
STREETS = ("down", "up", "down_wrap", "up_wrap")


@dataclass(frozen=True)
class ParallelMesh(RankGrid):
    """The grid of ranks, and this process' coordinates in it.

    Args:
        pp, dp, cp, tp, order: see :class:`RankGrid`.
        device: the device of this process' tensors.
        device_mesh: torch's mesh with the same axes; None in a single process without ``torch.distributed``.
        owns_group: True if :func:`build_mesh` has started the process group, so that :meth:`close` ends it.
        sequence_parallel: between blocks, each tensor-parallel rank keeps a part of the sequence (Korthikanti et al.,
            arXiv:2205.05198), instead of all of it.
        virtual: number of chunks of layers of each pipeline stage.
        share_images: data-parallel ranks encode each other's images, so that all have equal work.
        process_groups: the group of each axis with several ranks, and those of :func:`_extra_groups`, by name.
        timeout: the most time that a collective may take; None for torch's default.

    Example:
        >>> mesh = build_mesh(tp=2)  # under torchrun with four processes
        >>> mesh.dp, mesh.rank("tp")
        (2, 0)
    """

    device: torch.device = field(default_factory=partial(torch.device, "cpu"))
    device_mesh: DeviceMesh | None = None
    owns_group: bool = False
    sequence_parallel: bool = False
    virtual: int = 1
    share_images: bool = False
    process_groups: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)
    timeout: timedelta | None = None

    def rank(self, axis: str) -> int:
        """Return this process' coordinate along ``axis``."""
        if self.device_mesh is None or axis not in (self.device_mesh.mesh_dim_names or ()):
            return 0
        return self.device_mesh.get_local_rank(axis)

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """Return the process group along ``axis``, or None if it has one member and needs no communication.

        ``"ends"`` is the group of the first and the last pipeline stage, which share a tied embedding; None on the
        stages between them, too.
        """
        return self.process_groups.get(axis)

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """The ranks with different tokens of a step, over which losses and gradients are summed: dp x cp."""
        return self.group("data") or self.group("dp") or self.group("cp")

    @property
    def sequence_cut(self) -> bool:
        """True if activations between blocks are sharded along the sequence over the tensor-parallel ranks."""
        return self.sequence_parallel and self.tp > 1

    @property
    def sequence_axes(self) -> tuple[str, ...]:
        """Axes over which to sum the gradient of a parameter that each rank applies to its part of the sequence."""
        return ("tp",) if self.sequence_cut else ()

    @property
    def is_first_stage(self) -> bool:
        return self.rank("pp") == 0

    @property
    def is_last_stage(self) -> bool:
        return self.rank("pp") == self.pp - 1

    def starts(self, chunk: int) -> bool:
        """Return whether a chunk of layers of this stage is the first of the model."""
        return self.is_first_stage and chunk == 0

    def ends(self, chunk: int) -> bool:
        """Return whether a chunk of layers of this stage is the last of the model."""
        return self.is_last_stage and chunk == self.virtual - 1

    @property
    def global_rank(self) -> int:
        return 0 if self.device_mesh is None else dist.get_rank()

    @property
    def is_main(self) -> bool:
        """True on the one rank that writes files and shows progress."""
        return self.global_rank == 0

    def stage_rank(self, stage: int) -> int:
        """Return the global rank of a stage of this rank's pipeline, modulo the stages, so -1 is the last."""
        return self.rank_at(self.coordinates(self.global_rank) | {"pp": stage % self.pp})

    def sum_over_data(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum ``tensor`` in place over the ranks of :attr:`data_group`, and return it."""
        if (group := self.group("numbers")) is not None:
            dist.all_reduce(tensor, group=group)
        return tensor

    def any_rank(self, flag: bool) -> bool:
        """Return on every rank whether ``flag`` is true on any. Every rank must call it."""
        if self.world_size == 1:
            return flag
        shared = torch.tensor(int(flag), device=self.device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        return bool(shared.item())

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self.any_rank(False)

    def close(self) -> None:
        """End the process group, if it was made for this mesh."""
        if self.owns_group:
            end_process_group()

    def __str__(self) -> str:
        return f"{self.world_size} ranks: " + ", ".join(f"{axis} {self.size(axis)}" for axis in AXES)


def build_mesh(
    pp: int = 1,
    dp: int | None = None,
    cp: int = 1,
    tp: int = 1,
    *,
    sequence_parallel: bool = False,
    virtual: int = 1,
    order: str = DEFAULT_ORDER,
    timeout: float | None = None,
    share_images: bool = False,
) -> ParallelMesh:
    """Build the mesh of this run from its sizes. Every rank must call it.

    Under ``torchrun``, the process group is made here unless it exists (NCCL with a GPU, gloo without). A single
    process needs no process group and gets none.

    Args:
        pp: pipeline stages.
        dp: data-parallel replicas; None takes all ranks that the other axes leave.
        cp: parts of a sequence.
        tp: parts of a weight matrix.
        sequence_parallel: with ``tp``, shard activations between blocks along the sequence.
        virtual: chunks of layers of each pipeline stage; more than one makes the schedule interleaved.
        order: the axes, the fastest varying first; those of size 1 may be left out.
        timeout: seconds that a collective may take before it raises an error, for ranks whose peer has vanished; None
            for torch's default: half an hour for gloo, ten minutes for NCCL. The gloo of torch 2.6 ignores it.
        share_images: data-parallel ranks encode each other's images, so that all have equal work.

    Raises:
        TopologyError: the product of the sizes is not the number of ranks; the message lists valid sizes.
    """
    device, started = start_process_group()
    world = dist.get_world_size() if dist.is_initialized() else 1
    replicas = fit_sizes(world, pp=pp, dp=dp, cp=cp, tp=tp)
    if virtual < 1 or (virtual > 1 and pp == 1):
        raise TopologyError(
            f"virtual={virtual} chunks for each of {pp} pipeline stages",
            fix="use virtual=1 without a pipeline, a whole number >= 1 with one",
        )
    mesh = ParallelMesh(
        *(pp, replicas, cp, tp, order),
        device=device,
        owns_group=started,
        sequence_parallel=sequence_parallel,
        virtual=virtual,
        share_images=share_images,
        timeout=None if timeout is None else timedelta(seconds=timeout),
    )
    if not dist.is_initialized():
        return mesh
    sizes = tuple(mesh.size(axis) for axis in mesh.slow_to_fast)
    return _with_groups(mesh, init_device_mesh(device.type, sizes, mesh_dim_names=mesh.slow_to_fast))


def _with_groups(mesh: ParallelMesh, device_mesh: DeviceMesh) -> ParallelMesh:
    groups = {axis: device_mesh.get_group(axis) for axis in AXES if mesh.size(axis) > 1} | _extra_groups(mesh)
    if mesh.timeout is not None:
        # Set here and not at creation: a device mesh takes no timeout, and the process group may have existed before.
        for group in (None, *groups.values()):
            _set_pg_timeout(mesh.timeout, group)
    return replace(mesh, device_mesh=device_mesh, process_groups=groups)


def parallel_mesh(mesh: ParallelMesh | DeviceMesh) -> ParallelMesh:
    """Return the mesh itself, or one with the axes and groups of torch's mesh. Every rank must call it.

    Args:
        mesh: the mesh; the axes of torch's are named ``pp``, ``dp``, ``cp`` and ``tp``, or a single unnamed one is
            ``dp``.

    Raises:
        TopologyError: it has other axes, or not all ranks in their order.
    """
    if isinstance(mesh, ParallelMesh):
        return mesh
    if mesh.mesh_dim_names is None and mesh.ndim == 1:
        mesh = init_device_mesh(mesh.device_type, (mesh.size(),), mesh_dim_names=("dp",))
    names, ranks = mesh.mesh_dim_names or (), mesh.mesh.flatten().tolist()
    if not names or set(names) - set(AXES) or ranks != list(range(dist.get_world_size())):
        what = f"a device mesh with axes {names} over ranks {ranks} of {dist.get_world_size()}"
        raise TopologyError(what, fix=f"name its axes {', '.join(AXES)} and give it all ranks, or use build_mesh()")
    on_gpu = mesh.device_type == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device(mesh.device_type)
    sizes: dict[str, Any] = dict(zip(names, mesh.mesh.shape, strict=True))
    return _with_groups(ParallelMesh(**sizes, order="-".join(reversed(names)), device=device), mesh)


def _extra_groups(mesh: ParallelMesh) -> dict[str, dist.ProcessGroup]:
    """Make the groups other than those of one axis."""
    wanted = {"data": mesh.groups("dp", "cp")} if mesh.dp > 1 and mesh.cp > 1 else {}
    if mesh.dp * mesh.cp > 1:
        # For counts and losses: in the data group, they would wait for the optimizer's collectives before them.
        wanted["numbers"] = mesh.groups("dp", "cp")
    if mesh.share_images and mesh.dp > 1:
        # A separate group: gradients are summed over the others in an order that may differ between ranks.
        wanted["images"] = mesh.groups("dp")
    if mesh.pp > 1:
        wanted["ends"] = mesh.end_groups()
        wanted |= {street: mesh.groups("pp") for street in (STREETS if mesh.virtual > 1 else STREETS[:2])}
    groups = {name: dist.new_subgroups_by_enumeration(ranks)[0] for name, ranks in wanted.items()}
    if mesh.pp > 1 and mesh.device.type == "cuda":  # messages between hosts, without a wait for a device
        groups["pp_host"] = dist.new_subgroups_by_enumeration(mesh.groups("pp"), backend="gloo")[0]
    return {name: mine for name, mine in groups.items() if mine is not None}


def start_process_group(**settings: Any) -> tuple[torch.device, bool]:
    """Make the process group with these settings, if torchrun needs one and none exists.

    Returns:
        This process' device, and whether a group was made.

    Raises:
        TopologyError: there are fewer GPUs than ranks on this machine.
    """
    # The backend of an existing group may be "cpu:gloo,cuda:nccl", torch's default.
    on_gpu = torch.cuda.is_available() and (not dist.is_initialized() or "nccl" in dist.get_backend_config())
    number, there = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count() if on_gpu else 0
    if on_gpu and number >= there:
        raise TopologyError(
            f"rank {number} of this machine has no GPU: there are {there}",
            fix=f"start at most {there} (--nproc-per-node), or set CUDA_VISIBLE_DEVICES= to train on the CPU",
        )
    device = torch.device("cuda", number) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    start = not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1
    if start:
        dist.init_process_group("nccl" if on_gpu else "gloo", **_meeting_place(os.environ), **settings)
    return device, start


def _meeting_place(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the rendezvous of the ranks, as arguments of ``init_process_group``.

    After a restart, torchrun's own store still has the addresses of the ranks that died, and new ranks would connect to
    them (pytorch/pytorch#135712); likewise after the end of an earlier group of this process, even the caller's. So
    each attempt and each group gets its own prefix. Torchrun counts attempts for each node separately; with several
    nodes, ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`` gives each attempt a new store.
    """
    attempt, world = environment.get("TORCHELASTIC_RESTART_COUNT", "0"), int(environment["WORLD_SIZE"])
    attempt = attempt if environment.get("LOCAL_WORLD_SIZE") == str(world) else "0"
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    name = f"attempt-{attempt}/group-{next(_STARTED)}"
    store = dist.PrefixStore(name, dist.TCPStore(host, port, world, is_master=False))
    return {"store": store, "rank": int(environment["RANK"]), "world_size": world}


def end_process_group() -> None:
    """Call ``destroy_process_group``, then wait until gloo's threads have released their tensors.

    A thread of gloo keeps the tensor of a collective for a moment after the collective is done, and needs the
    interpreter to release it. ``destroy_process_group`` ends these threads only if no other object holds the groups,
    but a mesh, a model or torch itself does. If such a thread is late on a busy machine, and the interpreter exits in
    the meantime, the process dies with "terminate called without an active exception" after all its work is done, and
    torchrun counts the run as a failure (pytorch/pytorch#179291).
    Without a process group, this does nothing.
    """
    if not dist.is_initialized():
        return
    dist.destroy_process_group()
    until, quiet = time.monotonic() + _LIMIT, 0
    # A thread that waits for the interpreter sleeps too, but not while this thread sleeps: so look twice.
    while quiet < 2 and time.monotonic() < until:
        time.sleep(_LOOK_EVERY)
        quiet = quiet + 1 if _gloo_sleeps() else 0


def _gloo_sleeps() -> bool:
    """Return False if a gloo thread of this process is running or runnable; only Linux reports it."""
    for stat in glob.glob("/proc/self/task/*/stat"):
        with contextlib.suppress(OSError):  # the thread has ended
            name, _, rest = Path(stat).read_text().partition(" (")[2].rpartition(") ")
            if name == _GLOO_THREAD and rest[0] != "S":
                return False
    return True
