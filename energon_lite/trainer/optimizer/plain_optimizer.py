"""Plain AdamW for gradients over data- and tensor-parallel ranks, without overlap.

Each rank has the full state, and communication does not overlap computation. The alternative is
:class:`~energon_lite.trainer.optimizer.overlapped_optimizer.OverlappedDistributedOptimizer`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from energon_lite.errors import UsageError
from energon_lite.trainer.optimizer.bucket_plan import Kind, Named, Slot, sum_dtype
from energon_lite.trainer.optimizer.config import OptimizerConfig
from energon_lite.trainer.optimizer.optimizer import Optimizer, sum_of_squares, sum_partial
from energon_lite.trainer.optimizer.overlapped_optimizer import OverlappedDistributedOptimizer
from energon_lite.trainer.optimizer.parameter_hooks import allow_reading, hook_parameters, refuse_reading
from energon_lite.trainer.optimizer.partition import Partition
from energon_lite.trainer.parallel.mesh import ParallelMesh
from energon_lite.trainer.parallel.parameters import layout_of

__all__ = ["AdamW", "Optimizer", "make_optimizer"]


def make_optimizer(model: nn.Module, mesh: ParallelMesh, config: OptimizerConfig) -> Optimizer:
    """Make the optimizer that ``config.kind`` names. Freeze parameters before; every rank must call it."""
    return (AdamW if config.kind == "plain" else OverlappedDistributedOptimizer)(model, mesh, config)


class AdamW(Optimizer):
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101) on gradients summed over the data-parallel ranks.

    Gradients live in one flat buffer per type, of which each ``parameter.grad`` is a view: micro-batches add to it in
    place, and one all-reduce sums it over the ranks. It is a sum and not a mean, because the loss is divided by the
    number of tokens of the whole step beforehand. A parameter that had no part in the step has a gradient of zero.

    Updates are applied to master values in at least float32. A bfloat16 parameter has a copy for that, because bfloat16
    would round away small updates. The gradient of such a parameter moves into a buffer of ``grad_dtype`` after each
    backward pass, and reading its ``parameter.grad`` raises an error.

    Args:
        model: the model to train.
        mesh: the ranks.
        config: AdamW's constants, the clipping norm and ``grad_dtype``.

    Example:
        >>> optimizer = AdamW(model, mesh, OptimizerConfig())
        >>> loss.backward()
        >>> grad_norm = optimizer.step(lr=1e-3)
    """

    def __init__(self, model: nn.Module, mesh: ParallelMesh, config: OptimizerConfig):
        super().__init__(model, mesh, config)
        self._buffers: list[torch.Tensor] = []
        self._at: dict[nn.Parameter, tuple[Partition, Slot]] = {}
        if any(isinstance(p, DTensor) for p in self.parameters.values()):
            raise UsageError("the plain optimizer does not know DTensor", fix="use kind: overlapped")
        for dtype in sorted({p.dtype for p in self.parameters.values()}, key=str):
            self._lay_out([(name, p) for name, p in self.parameters.items() if p.dtype == dtype])
        self.set_updates(0)
        narrow = {p for p in self._at if p.dtype.itemsize < 4}
        hook_parameters(model, narrow, self._take_grad, _nothing, _nothing, self._take_values)

    def _lay_out(self, alike: list[Named]) -> None:
        """Make a gradient buffer of zeros, and partitions, for parameters of one type.

        The ``grad`` of a parameter in at least float32 is a view of the buffer.
        """
        first = alike[0][1]
        summed_in = sum_dtype(first.dtype, self.config.grad_dtype)
        buffer = torch.zeros(sum(p.numel() for _, p in alike), dtype=summed_in, device=first.device)
        for (name, p), grad in zip(alike, buffer.split([p.numel() for _, p in alike]), strict=True):
            rule = self.config.rule(name, p.dim())
            values, runs = p.detach().view(-1), [(slice(0, p.numel()), rule)]
            owned = Partition(values, grad, 0, runs, "adamw", self.config)
            self._at[p] = owned, Slot(name, p, 0, p.numel(), rule)
            p.grad = grad.view_as(p) if p.dtype.itemsize >= 4 else None
        self._buffers.append(buffer)

    def _launch(self, lr: float) -> torch.Tensor:
        """Sum the gradients over ranks, clip them, update the parameters, set the gradients to zero."""
        for buffer in self._buffers:
            self.mesh.sum_over_data(buffer)
        sum_partial([(owned.grad, layout_of(p).sum_over) for p, (owned, _) in self._at.items()], self.mesh)
        norm = self._gradient_norm()
        scale, skip = self._judge(norm)
        shared: dict[Any, Any] = {}
        for owned, _ in self._at.values():
            owned.update(lr, scale, skip, shared)
        for buffer in self._buffers:
            buffer.zero_()
        allow_reading(self._at)
        return norm

    def _partitions(self) -> Iterator[tuple[Partition, list[Slot]]]:
        return ((owned, [slot]) for owned, slot in self._at.values())

    def _take_grad(self, p: nn.Parameter, grad: torch.Tensor) -> None:
        self._at[p][0].grad.add_(grad.reshape(-1))
        refuse_reading([p])

    def _take_values(self, parameters: list[nn.Parameter]) -> None:
        """Take the values that were loaded into the model as master values."""
        for p in parameters:
            self._at[p][0].master.copy_(p.detach().view(-1))

    def _gradient_norm(self) -> torch.Tensor:
        """Return the norm of the whole model's gradient, in float64; one of several copies counts."""
        counted = [
            owned.grad
            for p, (owned, slot) in self._at.items()
            if Kind.of(slot.name, p, self.mesh, self.config).counts_here
        ]
        square = sum_of_squares(counted, self.mesh.device)
        for axis in ("tp", "pp"):
            if (group := self.mesh.group(axis)) is not None:
                dist.all_reduce(square, group=group)
        return square.sqrt()


def _nothing(_: list[nn.Parameter]) -> None:
    """Do nothing: values are always current."""
