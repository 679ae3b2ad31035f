"""Muon (Jordan et al., 2024, kellerjordan.github.io/posts/muon): updates of matrices by orthogonalized momentum.

Matrices that are sharded over tensor-parallel ranks are gathered for that, so the result does not depend on the layout.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from energon_lite.trainer.optimizer.bucket_plan import Slot
from energon_lite.trainer.optimizer.config import OptimizerConfig
from energon_lite.trainer.optimizer.partition import Partition
from energon_lite.trainer.parallel import collectives
from energon_lite.trainer.parallel.mesh import ParallelMesh
from energon_lite.trainer.parallel.parameters import layout_of, local_tensor

#: Coefficients of the odd polynomial of a Newton-Schulz iteration: Jordan's, which raise small singular values fast
#: and leave all near 1.
_A = 3.4445
_B = -4.7750
_C = 2.0315
#: Number of iterations.
_ITERATIONS = 5


def orthogonalize(matrix: Tensor) -> Tensor:
    """Return approximately the matrix with the same singular vectors and all singular values 1.

    Five Newton-Schulz iterations, which need only matrix products.

    Args:
        matrix: ``[rows, columns]``; its type is that of the iterations, and bfloat16 is sufficient.
    """
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / torch.linalg.vector_norm(x).clamp(min=1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


class MuonPartition(Partition):
    """Partition of whole matrices, or of this rank's shards of them, that Muon updates.

    Args:
        values, grad, start, config: as :class:`Partition`.
        slots: the matrices of the bucket.
        mesh: the ranks.
    """

    def __init__(
        self,
        values: Tensor,
        grad: Tensor,
        start: int,
        slots: list[Slot],
        mesh: ParallelMesh,
        config: OptimizerConfig,
    ):
        super().__init__(values, grad, start, [], "muon", config)
        self._mesh = mesh
        self._slots = [slot for slot in slots if start <= slot.start < self.stop]

    def update(self, lr: float, scale: Tensor | None, skip: Tensor, shared: dict[Any, Any]) -> None:
        """Make one update; see :meth:`Partition.update`."""
        keep, momentum = (1 - skip).to(self.master.dtype), self.tensors["momentum_buffer"]
        # In place: the gradient is not needed afterwards.
        grad = self.grad.to(self.master.dtype).mul_(1.0 if scale is None else scale).masked_fill_(skip > 0, 0.0)
        momentum.lerp_(grad, (1 - self.config.momentum) * keep)
        # Nesterov momentum. The iterations, and the data sent for them, have the precision of the model.
        update = grad.lerp_(momentum, self.config.momentum).to(self.values.dtype)
        parts = self._of_all_parts(update) if any(_cut(slot) is not None for slot in self._slots) else None
        for slot in self._slots:
            here, shape = slice(slot.start - self.start, slot.stop - self.start), local_tensor(slot.parameter).shape
            dim = _cut(slot)
            if dim is None or parts is None:
                direction = orthogonalize(update[here].view(shape))
            else:
                whole = orthogonalize(torch.cat([part[here].view(shape) for part in parts.unbind()], dim))
                direction = whole.chunk(len(parts), dim)[self._mesh.rank("tp")]
            rate = lr * slot.rule.lr_scale
            master = self.master[here].view(shape)
            master.mul_(1 - rate * slot.rule.weight_decay * keep)
            master.sub_(direction.to(master.dtype) * (rate * _size(slot, self.config.muon_scale) * keep))
        if self.master is not self.values:
            self.values.copy_(self.master)

    def _of_all_parts(self, update: Tensor) -> Tensor:
        """Gather the updates of all tensor-parallel ranks: ``[tp, elements]``."""
        group = self._mesh.group("tp")
        if group is None:
            return update[None]
        parts = update.new_empty(dist.get_world_size(group) * update.numel())
        collectives.all_gather(parts, update, group=group)
        return parts.view(-1, update.numel())


def _cut(slot: Slot) -> int | None:
    return layout_of(slot.parameter).sharded_dim


def _size(slot: Slot, rule: str) -> float:
    """Return the factor of an update whose singular values are 1.

    By ``rms``, the elements of the update are 0.2 on average, as AdamW's are (Liu et al., Moonlight,
    arXiv:2502.16982).
    """
    rows, columns = layout_of(slot.parameter).full_shape
    return 0.2 * math.sqrt(max(rows, columns)) if rule == "rms" else math.sqrt(max(1.0, rows / columns))
