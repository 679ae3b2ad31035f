"""Who works with whom: the ranks of a run as a grid with the axes pp, dp, cp and tp.

Tensor-parallel peers talk most, so they are neighbours: ``tp`` varies fastest, then ``cp``, ``dp`` and ``pp``. Sixteen
ranks with ``tp=2, pp=4`` have ``dp=2``: ranks 0 and 1 are tensor-parallel peers, 0 and 2 are data-parallel peers, and
0, 4, 8 and 12 are the four stages of one pipeline.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from energon_lite.errors import TopologyError

#: Slowest varying axis first, as DeviceMesh wants them.
AXES = ("pp", "dp", "cp", "tp")


@dataclass(frozen=True)
class ParallelMesh:
    """The grid of ranks, and this process' place in it.

    Args:
        pp, dp, cp, tp: number of ranks along each axis: pipeline, data, context and tensor parallel.
        device: where this process keeps its tensors.
        device_mesh: torch's mesh with the same axes; None in a single process without ``torch.distributed``.
        owns_group: :func:`build_mesh` has started the process group, so :meth:`close` ends it.

    Example:
        >>> mesh = build_mesh(tp=2)  # under torchrun with four processes
        >>> mesh.dp, mesh.rank("tp")
        (2, 0)
    """

    pp: int
    dp: int
    cp: int
    tp: int
    device: torch.device
    device_mesh: DeviceMesh | None = None
    owns_group: bool = False

    def size(self, axis: str) -> int:
        """Number of ranks along ``axis``."""
        return {"pp": self.pp, "dp": self.dp, "cp": self.cp, "tp": self.tp}[axis]

    def rank(self, axis: str) -> int:
        """This process' coordinate along ``axis``."""
        return 0 if self.device_mesh is None else self.device_mesh.get_local_rank(axis)

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The process group along ``axis``, or None where it has one member and nothing needs to be said."""
        if self.device_mesh is None or self.size(axis) == 1:
            return None
        return self.device_mesh.get_group(axis)

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold different tokens of a step: those over which losses and gradients are summed.

        Data-parallel ranks today; context-parallel ranks join them when sequences are split.
        """
        return self.group("dp")

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def global_rank(self) -> int:
        return 0 if self.device_mesh is None else dist.get_rank()

    @property
    def is_main(self) -> bool:
        """True on the one rank that writes files and shows progress."""
        return self.global_rank == 0

    def sum_over_data(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum ``tensor`` in place over :attr:`data_group`, and return it."""
        if self.data_group is not None:
            dist.all_reduce(tensor, group=self.data_group)
        return tensor

    def any_rank(self, flag: bool) -> bool:
        """True on every rank if ``flag`` is true on any. Every rank must call it."""
        if self.world_size == 1:
            return flag
        told = torch.tensor([int(flag)], device=self.device)
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
        return bool(told.item())

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.any_rank(False)

    def close(self) -> None:
        """Leave the process group, if it was made for this mesh."""
        if self.owns_group and dist.is_initialized():
            dist.destroy_process_group()

    def __str__(self) -> str:
        return f"{self.world_size} ranks: " + ", ".join(f"{axis} {self.size(axis)}" for axis in AXES)


def build_mesh(pp: int = 1, dp: int | None = None, cp: int = 1, tp: int = 1) -> ParallelMesh:
    """The mesh of this run, from its sizes. Every rank must call it.

    Under ``torchrun`` the process group is made here if nobody has (NCCL with a GPU, gloo without). A process alone
    needs no process group and gets none.

    Args:
        pp: pipeline stages. More than one is not supported yet.
        dp: data-parallel replicas; None takes all ranks that the other axes leave.
        cp: parts of a sequence. More than one is not supported yet.
        tp: parts of a weight matrix.

    Raises:
        TopologyError: the sizes do not multiply to the number of ranks; the message lists those that would.
    """
    device, started = _start_process_group()
    world = dist.get_world_size() if dist.is_initialized() else 1
    replicas = fit_sizes(world, pp=pp, dp=dp, cp=cp, tp=tp)
    if not dist.is_initialized():
        return ParallelMesh(pp, replicas, cp, tp, device)
    device_mesh = init_device_mesh(device.type, (pp, replicas, cp, tp), mesh_dim_names=AXES)
    return ParallelMesh(pp, replicas, cp, tp, device, device_mesh, started)


def fit_sizes(world: int, *, pp: int = 1, dp: int | None = None, cp: int = 1, tp: int = 1) -> int:
    """The data-parallel size with which the sizes fill ``world`` ranks.

    Raises:
        TopologyError: they cannot.
    """
    given = {"pp": pp, "cp": cp, "tp": tp} | ({} if dp is None else {"dp": dp})
    shown = ", ".join(f"{axis}={size}" for axis, size in given.items())
    for axis, size in given.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise TopologyError(f"{axis}={size!r} is not a number of ranks", fix="give a whole number >= 1")
    for axis, names in (("pp", "pipeline"), ("cp", "context")):
        if given[axis] > 1:
            raise TopologyError(f"{axis}={given[axis]}: {names} parallelism is not supported yet", fix=f"use {axis}=1")
    product = pp * cp * tp * (dp or 1)
    if world % product or (dp is not None and product != world):
        raise TopologyError(
            f"{shown} do not fill a world of {world} ranks",
            fix=f"{_sizes_that_fit(world, given)}; or start another number of ranks (torchrun --nproc-per-node)",
        )
    return dp or world // product


def _sizes_that_fit(world: int, given: dict[str, int]) -> str:
    """For each axis, the sizes that go with the others as they are given."""
    advice = []
    for axis in given:
        others = 1
        for other, size in given.items():
            others *= size if other != axis else 1
        if world % others:
            continue
        rest = world // others
        # With dp given, nothing is left open, so the other axes must take exactly the rest.
        sizes = [rest] if "dp" in given else [size for size in range(1, rest + 1) if rest % size == 0]
        if axis not in ("pp", "cp"):
            advice.append(f"{axis} can be {', '.join(map(str, sizes))}")
    return "; ".join(advice) or "use sizes whose product divides the world size"


def _start_process_group() -> tuple[torch.device, bool]:
    """Make the process group if torchrun wants one and nobody has; return this process' device, and whether it did."""
    on_gpu = torch.cuda.is_available()
    if on_gpu and dist.is_initialized():
        on_gpu = dist.get_backend() == "nccl"
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    start = not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1
    if start:
        dist.init_process_group("nccl" if on_gpu else "gloo")
    return device, start
