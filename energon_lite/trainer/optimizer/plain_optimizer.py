"""AdamW for a model whose gradients are spread over data- and tensor-parallel ranks.

:class:`Optimizer` is what the trainer needs of one. :class:`AdamW` is the plain one: each rank has all of the state,
and nothing overlaps. :class:`~energon_lite.trainer.optimizer.overlapped_optimizer.OverlappedDistributedOptimizer` is
the other.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from energon_lite.trainer.optimizer.bucket_plan import Slot
from energon_lite.trainer.optimizer.config import OptimizerConfig
from energon_lite.trainer.optimizer.learning_rates import learning_rate
from energon_lite.trainer.optimizer.overlapped_optimizer import OverlappedDistributedOptimizer
from energon_lite.trainer.optimizer.parameter_hooks import hook_parameters
from energon_lite.trainer.optimizer.partition import Partition
from energon_lite.trainer.parallel.mesh import ParallelMesh
from energon_lite.trainer.parallel.parameters import layout_of
from energon_lite.trainer.parallel.shards import Shard

__all__ = ["AdamW", "Optimizer", "learning_rate", "make_optimizer"]


class Optimizer(Protocol):
    """What the trainer needs of an optimizer. Gradients of backward passes add up until the next :meth:`step`."""

    updates: int

    @property
    def order(self) -> list[str]:
        """Names of the parameters, in the order in which they are worked through."""
        ...

    def begin_step(self, micro_batches: int) -> None:
        """The next step is made of this many micro-batches: as many on each data-parallel rank."""

    def end_micro_batch(self, of: Collection[nn.Parameter] | None = None) -> None:
        """The gradients of one of them are all there: of all parameters, or ``of`` those of one chunk of layers."""

    def step(self, lr: float) -> float:
        """Update the parameters; return the norm of the whole model's gradient before clipping."""
        ...

    def wait_parameters(self) -> None:
        """Until all parameters have the values of the last step."""

    def shards(self) -> Iterator[Shard]:
        """This rank's part of the state, to be saved or filled."""
        ...

    def set_updates(self, updates: int) -> None:
        """Say how many updates the moments have seen, after they were read from a checkpoint."""

    def set_order(self, order: Sequence[str]) -> None:
        """Work through parameters in the order of a former run, so that the rounding is the same.

        Args:
            order: names, of parameters on other pipeline stages too.
        """


def make_optimizer(model: nn.Module, mesh: ParallelMesh, config: OptimizerConfig) -> Optimizer:
    """The optimizer that ``config.kind`` names. Freeze parameters before; every rank must call it."""
    return (AdamW if config.kind == "plain" else OverlappedDistributedOptimizer)(model, mesh, config)


class AdamW:
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101) on gradients summed over the data-parallel ranks.

    Gradients live in one flat buffer per type, of which each ``parameter.grad`` is a view: micro-batches add to it in
    place, and one all-reduce sums it over the ranks. It is a sum and not a mean, because the loss is divided by the
    number of tokens of the whole step beforehand. A parameter that had no part in the step has a gradient of zero.

    What is updated are master values in at least float32: of a parameter in bfloat16 a copy, without which an update of
    less than half the distance of two such numbers would be lost. The gradient of such a parameter moves into a buffer
    of ``grad_dtype`` after each backward pass, and ``parameter.grad`` is None.

    Args:
        model: its trainable parameters have layouts (:func:`layout_of`).
        mesh: the ranks.
        config: AdamW's constants, the clipping norm and ``grad_dtype``.

    Example:
        >>> optimizer = AdamW(model, mesh, OptimizerConfig())
        >>> loss.backward()
        >>> grad_norm = optimizer.step(lr=1e-3)
    """

    def __init__(self, model: nn.Module, mesh: ParallelMesh, config: OptimizerConfig):
        self.mesh, self.config = mesh, config
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.updates = 0
        self._buffers, self._grads = _flat_gradients(list(self.parameters.values()), config.grad_dtype)
        self._slots = [Slot(name, p, 0, p.numel()) for name, p in self.parameters.items()]
        self._owned = {
            p: Partition(p.detach().view(-1), grad.view(-1), 0, p.numel() if p.dim() > 1 else 0, config)
            for p, grad in self._grads.items()
        }
        self.set_updates(0)
        narrow = {p for p in self._grads if p.dtype.itemsize < 4}
        hook_parameters(model, narrow, self._take_grad, _nothing, _nothing, self._take_values)

    @property
    def order(self) -> list[str]:
        """Names of the parameters, in the order in which they were made."""
        return list(self.parameters)

    def begin_step(self, micro_batches: int) -> None:
        """Nothing overlaps, so nothing must be known."""

    def end_micro_batch(self, of: Collection[nn.Parameter] | None = None) -> None:
        """Likewise."""

    def wait_parameters(self) -> None:
        """Values are there when :meth:`step` returns."""

    def set_order(self, order: Sequence[str]) -> None:
        """There is one order only."""

    def step(self, lr: float) -> float:
        """Sum the gradients over ranks, clip them, update the parameters, set the gradients to zero.

        A step whose gradient is not finite changes nothing; all ranks see the same norm, so all leave it out.

        Args:
            lr: the learning rate.

        Returns:
            The global gradient norm before clipping.
        """
        for buffer in self._buffers:
            self.mesh.sum_over_data(buffer)
        self._sum_partial_gradients()
        norm = self._gradient_norm()
        if math.isfinite(norm):
            clipped = self.config.clip and norm > self.config.clip
            scale = torch.tensor(self.config.clip / norm, dtype=torch.float64) if clipped else None
            for owned in self._owned.values():
                owned.update(lr, scale, skip=torch.zeros((), device=self.mesh.device))
            self.updates += 1
        for buffer in self._buffers:
            buffer.zero_()
        return norm

    def shards(self) -> Iterator[Shard]:
        """Master values and moments, ``exp_avg`` and ``exp_avg_sq``, of all parameters, whole."""
        yield from filter(None, (self._owned[slot.parameter].shard(slot) for slot in self._slots))

    def set_updates(self, updates: int) -> None:
        """Say how many updates the moments have seen, after they were read from a checkpoint."""
        self.updates = updates
        for owned in self._owned.values():
            owned.set_updates(updates)

    def _take_grad(self, p: nn.Parameter, grad: torch.Tensor) -> None:
        self._grads[p].add_(grad)

    def _take_values(self, parameters: list[nn.Parameter]) -> None:
        """The model was given other values: they are the master values from now on."""
        for p in parameters:
            self._owned[p].master.copy_(p.detach().view(-1))

    def _sum_partial_gradients(self) -> None:
        """Sum what is a part of a sum over other axes than the data's: one all-reduce for each axis."""
        for axis in ("tp", "ends"):
            group = self.mesh.group(axis)
            grads = [grad for p, grad in self._grads.items() if axis in layout_of(p).sum_over]
            if group is None or not grads:
                continue
            flat = torch.cat([grad.flatten() for grad in grads])
            dist.all_reduce(flat, group=group)
            for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(part.view_as(grad))

    def _gradient_norm(self) -> float:
        """The norm of the whole model's gradient, in float64: slices count on each rank, what all ranks have, once."""
        squares = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)
        for p in self.parameters.values():
            layout = layout_of(p)
            if layout.counts_here(self.mesh):
                sharded = int(layout.sharded_dim is not None)
                squares[sharded] += torch.linalg.vector_norm(self._grads[p], dtype=torch.float64).square()
        if (tp := self.mesh.group("tp")) is not None:
            dist.all_reduce(squares[1:], group=tp)
        if (pp := self.mesh.group("pp")) is not None:
            dist.all_reduce(squares, group=pp)
        return math.sqrt(squares.sum().item())


def _flat_gradients(
    parameters: list[nn.Parameter], grad_dtype: str
) -> tuple[list[torch.Tensor], dict[nn.Parameter, torch.Tensor]]:
    """One buffer of zeros for the gradients of each type, and its views for each parameter.

    In those of at least float32, they are the parameters' own ``grad``.
    """
    buffers, grads = [], {}
    for dtype in sorted({p.dtype for p in parameters}, key=str):
        alike = [p for p in parameters if p.dtype == dtype]
        summed_in = torch.float32 if dtype.itemsize < 4 and grad_dtype == "float32" else dtype
        buffer = torch.zeros(sum(p.numel() for p in alike), dtype=summed_in, device=alike[0].device)
        for p, part in zip(alike, buffer.split([p.numel() for p in alike]), strict=True):
            grads[p] = part.view_as(p)
            p.grad = grads[p] if dtype.itemsize >= 4 else None
        buffers.append(buffer)
    return buffers, grads


def _nothing(_: list[nn.Parameter]) -> None:
    """Values are current at all times."""
