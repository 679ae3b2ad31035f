"""Layouts of parameters: shape, sharding and initial values in the whole model; and checks of those without a layout.

Each rank holds a slice of each tensor-parallel weight. The :class:`ParameterLayout` on the parameter describes the
whole weight, for initialisation, for the gradient norm (a slice counts once, a replica not again) and for checkpoints
(global shapes, global names).

A parameter without a layout, as of a model that does not know the mesh, is treated as a copy that all ranks hold. Along
the data-parallel ranks it is broadcast, as by ``DistributedDataParallel``. Along the tensor-parallel ranks it must
already be equal: if its values or gradients differ, it is a shard of a larger tensor, and would be counted and saved
wrongly.
"""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from energon_lite.errors import TopologyError, UsageError, listed
from energon_lite.topology import cores_per_rank
from energon_lite.trainer.parallel.mesh import ParallelMesh


@dataclass(frozen=True)
class ParameterLayout:
    """Description of the whole of which a rank's parameter is a part.

    Args:
        full_shape: shape of the parameter in a model on one rank.
        sharded_dim: the dimension that is sharded over the tensor-parallel axis; None if every rank has all of it.
        std: standard deviation of the initial values.
        mean: mean of the initial values; with ``std=0`` their value.
        sum_over: mesh axes, in addition to the data group, over which each rank's gradient is a partial sum:
            ``("tp",)`` for parameters applied to a part of the sequence under sequence parallelism, ``("ends",)`` for
            an embedding that the first and the last pipeline stage share.
        assumed: True if no layout was given; the parameter is then treated as a copy on all ranks.
    """

    full_shape: tuple[int, ...]
    sharded_dim: int | None = None
    std: float = 0.0
    mean: float = 0.0
    sum_over: tuple[str, ...] = ()
    assumed: bool = False

    def counts_here(self, mesh: ParallelMesh) -> bool:
        """Return False if this rank's part is a second copy, which gradient norms must not count.

        Copies on data- and tensor-parallel ranks do not matter: sums do not extend over these.
        """
        return not ("ends" in self.sum_over and mesh.pp > 1 and mesh.is_last_stage)

    def local_shape(self, mesh: ParallelMesh) -> tuple[int, ...]:
        """Return the shape of one rank's part.

        Raises:
            TopologyError: the sharded dimension is not divisible by ``tp``.
        """
        if self.sharded_dim is None:
            return self.full_shape
        full = self.full_shape[self.sharded_dim]
        if full % mesh.tp:
            raise indivisible(f"a dimension of {full}", full, mesh)
        return (*self.full_shape[: self.sharded_dim], full // mesh.tp, *self.full_shape[self.sharded_dim + 1 :])

    def local_part(self, full: torch.Tensor, mesh: ParallelMesh) -> torch.Tensor:
        """Return this rank's slice (a view) of the whole tensor ``full``."""
        return full if self.sharded_dim is None else full.chunk(mesh.tp, self.sharded_dim)[mesh.rank("tp")]


def indivisible(what: str, number: int, mesh: ParallelMesh) -> TopologyError:
    """Return the error for a number that is not divisible by the tensor-parallel ranks."""
    sizes = ", ".join(str(size) for size in range(1, min(number, 128) + 1) if number % size == 0)
    return TopologyError(f"{what} cannot be cut into tp={mesh.tp} equal parts", fix=f"use tp of {sizes}")


def new_parameter(layout: ParameterLayout, mesh: ParallelMesh, dtype: torch.dtype) -> nn.Parameter:
    """Make an uninitialised parameter with this rank's part; see :func:`initialize_parameters`."""
    parameter = nn.Parameter(torch.empty(layout.local_shape(mesh), dtype=dtype, device=mesh.device))
    parameter.parallel_layout = layout  # type: ignore[attr-defined]
    return parameter


def layout_of(parameter: torch.Tensor) -> ParameterLayout:
    """Return the layout of a parameter.

    It is the parameter's own; for torch's ``DTensor``, it follows from the placements; any other parameter, as in a
    module without layouts, is whole (``assumed``; the optimizer verifies that).

    Raises:
        UsageError: a ``DTensor`` that is not sharded evenly along one dimension of one mesh axis.
    """
    layout = getattr(parameter, "parallel_layout", None)
    if isinstance(layout, ParameterLayout):
        return layout
    if not isinstance(parameter, DTensor):
        return ParameterLayout(tuple(parameter.shape), assumed=True)
    cut = [placement for placement in parameter.placements if placement != Replicate()]
    if not cut:
        return ParameterLayout(tuple(parameter.shape))
    ranks = parameter.device_mesh.size(parameter.placements.index(cut[0]))
    if len(cut) > 1 or type(cut[0]) is not Shard or parameter.shape[cut[0].dim] % ranks:
        raise UsageError(
            f"a DTensor of shape {tuple(parameter.shape)} has placements {parameter.placements}",
            fix="cut it evenly along one dimension, over tensor-parallel ranks only; data-parallel ones have copies",
        )
    return ParameterLayout(tuple(parameter.shape), cut[0].dim % parameter.dim())


def local_tensor(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's tensor of a parameter: the local part of a ``DTensor``, else the parameter itself."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def freeze(model: nn.Module, patterns: Sequence[str], mesh: ParallelMesh) -> None:
    """Exclude some parameters from training. Every rank must call it, before the optimizer is made.

    Args:
        model: the model, or this pipeline stage's part of it.
        patterns: name patterns, with ``*``, ``?`` and ``[...]`` as in a shell.
        mesh: the ranks.

    Raises:
        UsageError: a pattern matches no parameter on any rank.

    Example:
        >>> freeze(model, ["embed_tokens.*"], mesh)
    """
    for pattern in patterns:
        fitting = [p for name, p in model.named_parameters() if fnmatch.fnmatchcase(name, pattern)]
        for parameter in fitting:
            parameter.requires_grad_(False)
        if not mesh.any_rank(bool(fitting)):
            fix = "see the names in dict(model.named_parameters())"
            raise UsageError(f"no parameter is named like {pattern!r}", fix=fix)


def initialize_parameters(model: nn.Module, *, seed: int, mesh: ParallelMesh, drawn: Sequence[str] = ("*",)) -> None:
    """Fill all parameters with their initial values, equal in every layout of ranks.

    Each parameter is drawn whole, from its own generator seeded by (seed, name), and then sliced. So the
    values depend neither on the layout nor on the order in which modules are made. Tied weights are drawn once.

    Args:
        model: a model whose parameters have layouts.
        seed: the run's seed.
        mesh: the mesh the model was made for.
        drawn: name patterns, as for :func:`freeze`; other parameters are zeros, to be loaded later.
    """

    def fill(named: tuple[str, nn.Parameter]) -> None:
        name, parameter = named
        layout = layout_of(parameter)
        if layout.assumed:
            raise UsageError(
                f"{name} of shape {tuple(parameter.shape)} does not say what it is a part of, nor how it begins",
                fix="make it with new_parameter, or set parameter.parallel_layout = ParameterLayout(full_shape)",
            )
        with torch.no_grad():
            if not any(fnmatch.fnmatchcase(name, pattern) for pattern in drawn):
                parameter.zero_()
                return
            digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
            # Always in float32 on the CPU: a model in another precision or on a GPU starts from the same numbers.
            full = torch.empty(layout.full_shape).normal_(layout.mean, layout.std, generator=generator)
            parameter.copy_(layout.local_part(full, mesh))

    # A generator runs in one thread; ranks of this machine share its cores, and large tensors its memory.
    with ThreadPoolExecutor(max_workers=min(cores_per_rank(), 8)) as pool:
        list(pool.map(fill, model.named_parameters()))


def adopt_module(model: nn.Module, trained: Mapping[str, nn.Parameter], mesh: ParallelMesh) -> None:
    """Broadcast parameters without layouts, and all buffers, from the first data-parallel rank.

    Raises:
        UsageError: a parameter cannot be trained: it is complex, on another device than this rank, sharded over ranks
            other than the tensor-parallel ones, or without a layout and unequal on these.
    """
    for name, p in trained.items():
        _check(name, p, mesh)
    foreign = {name: p for name, p in model.named_parameters() if not hasattr(p, "parallel_layout")}
    group = mesh.data_group
    if group is not None and foreign:
        for tensor in [local_tensor(t.detach()) for t in (*foreign.values(), *model.buffers())]:
            dist.broadcast(whole := tensor.contiguous(), src=dist.get_global_rank(group, 0), group=group)
            tensor.copy_(whole)
    check_copies({name: p.detach() for name, p in trained.items() if layout_of(p).assumed}, mesh, "values", 0.0)


def _check(name: str, p: nn.Parameter, mesh: ParallelMesh) -> None:
    device = local_tensor(p).device
    if p.dtype.is_complex or device.type != mesh.device.type:
        fix = f"give real parameters on {mesh.device}: model.to(mesh.device) before the optimizer is made"
        raise UsageError(f"{name} is {p.dtype} on {device}", fix=fix)
    if isinstance(p, DTensor) and layout_of(p).sharded_dim is not None:
        axis = next(axis for axis, placement in enumerate(p.placements) if placement != Replicate())
        group = mesh.group("tp")
        ranks = dist.get_process_group_ranks(p.device_mesh.get_group(axis))
        if group is None or dist.get_process_group_ranks(group) != ranks:
            what = f"{name} is cut over {len(ranks)} ranks that are not the mesh's {mesh.tp} of axis tp"
            raise UsageError(what, fix="cut it with mesh.device_mesh['tp'] of build_mesh(tp=...)")


def check_copies(tensors: Mapping[str, Tensor], mesh: ParallelMesh, what: str, tolerance: float = 1e-3) -> None:
    """Check by norms that tensors with equal names are equal on tensor-parallel ranks.

    Raises:
        UsageError: on all tensor-parallel ranks: some tensors differ.
    """
    group = mesh.group("tp")
    if group is None or not tensors:
        return
    norms = torch.stack([torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors.values()])
    dist.all_reduce(most := torch.stack([norms, -norms]), op=dist.ReduceOp.MAX, group=group)
    unlike = (most[0] + most[1] > tolerance * most[0]).tolist()
    if any(unlike):
        names = listed([name for name, bad in zip(tensors, unlike, strict=True) if bad], 4)
        raise UsageError(
            f"{what} differ among tensor-parallel ranks: {names}",
            fix="say what each is a part of: parameter.parallel_layout = ParameterLayout(full_shape, sharded_dim), and "
            "sum_over=('tp',) if each rank has a part of its gradient; or begin with the same weights on these ranks",
        )
