"""Buckets: flat tensors of neighbouring parameters and of their gradients; and sums over slices of buckets."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from energon_lite.trainer.optimizer.bucket_plan import BucketPlan, Kind
from energon_lite.trainer.optimizer.config import OptimizerConfig
from energon_lite.trainer.optimizer.muon import MuonPartition
from energon_lite.trainer.optimizer.partition import Partition
from energon_lite.trainer.parallel import collectives
from energon_lite.trainer.parallel.mesh import ParallelMesh
from energon_lite.trainer.parallel.parameters import local_tensor


class Bucket:
    """Parameters whose gradients are reduced by one collective, and whose values are gathered by one.

    ``values`` and ``grads`` are laid out by ``slots``, and this rank owns ``share`` of them; ``grads`` is None as long
    as there is no gradient (ZeRO-2). The parameters move into ``values``.
    """

    def __init__(self, plan: BucketPlan, kind: Kind, mesh: ParallelMesh, config: OptimizerConfig):
        self.plan = plan
        self.slots = plan.slots
        self.share = plan.share
        self.kind = kind
        self.values = torch.zeros(plan.size, dtype=kind.dtype, device=mesh.device)
        for slot in self.slots:
            here = local_tensor(slot.parameter)
            slot.of(self.values).copy_(here.detach())
            here.data = slot.of(self.values)
        # A single data-parallel rank has no reason to reduce often.
        self.in_place = config.reduce == "last" or mesh.data_group is None
        self.grads = torch.zeros_like(self.values, dtype=kind.grad_dtype) if self.in_place else None
        wide = torch.promote_types(kind.grad_dtype, torch.float32)
        mine = self.values[self.share]
        total = torch.zeros_like(mine, dtype=wide) if self.grads is None else self.grads[self.share]
        if kind.algorithm == "muon":
            self.owned: Partition = MuonPartition(mine, total, self.share.start, self.slots, mesh, config)
        else:
            self.owned = Partition(mine, total, self.share.start, plan.runs, kind.algorithm, config)
        self.filled: set[nn.Parameter] = set()  # parameters whose gradients are in ``grads``
        self.arrived = 0  # number of slots known to be ready for the next reduction
        self.reduced = self.collected = 0  # launched and finished reductions of this step
        self.gathering: dist.Work | None = None

    def gather(self, group: dist.ProcessGroup | None) -> None:
        """Start to gather the values of all slices."""
        if group is not None:
            self.gathering = collectives.all_gather(self.values, self.values[self.share], group=group, async_op=True)

    def wait(self) -> None:
        """Wait until the values are gathered."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None


def sum_partial(grads: Sequence[tuple[Tensor, Collection[str]]], mesh: ParallelMesh) -> None:
    """Sum gradients that are partial sums along axes other than the data's: one collective for each axis.

    Args:
        grads: pairs of a slice of gradients and its axes.
        mesh: the ranks.
    """
    for axis in ("tp", "ends"):
        group, parts = mesh.group(axis), [grad.view(-1) for grad, axes in grads if axis in axes]
        if group is not None and parts:
            dist.all_reduce(flat := torch.cat(parts), group=group)
            torch._foreach_copy_(parts, list(flat.split([part.numel() for part in parts])))


def sum_of_squares(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of squares of all elements, a float64 scalar.

    Norms are taken in at least float32, by few kernels and without copies. They are summed in float64, because squares
    above 3e38 are infinite in float32.
    """
    norms = [torch.zeros((), device=device)]
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        alike = [tensor for tensor in tensors if tensor.dtype == dtype]
        norms += torch._foreach_norm(alike, 2, dtype=torch.promote_types(dtype, torch.float32))
    return torch.stack([norm.double() for norm in norms]).square().sum()
