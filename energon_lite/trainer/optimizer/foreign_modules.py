"""Checks for models that do not know the mesh: each assumption about their parameters is verified.

A parameter without a layout is treated as a copy that all ranks hold. Along the data-parallel ranks it is broadcast, as
by ``DistributedDataParallel``. Along the tensor-parallel ranks it must already be equal: if its values or gradients
differ, it is a shard of a larger tensor, and would be counted and saved wrongly.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from energon_lite.errors import UsageError, listed
from energon_lite.trainer.parallel.mesh import ParallelMesh
from energon_lite.trainer.parallel.parameters import layout_of, local_tensor


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
