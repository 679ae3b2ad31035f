"""Buckets: flat tensors of neighbouring parameters and of their gradients, and the partition that a rank updates.

A partition is updated by AdamW, SGD or Muon, on master values in at least float32. Muon (Jordan et al., 2024,
kellerjordan.github.io/posts/muon) orthogonalizes the momentum of whole matrices. Those that are sharded over
tensor-parallel ranks are gathered for that, so the result does not depend on the layout.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from energon_lite.errors import UsageError
from energon_lite.trainer.optimizer.bucket_plan import BucketPlan, Kind, Slot
from energon_lite.trainer.optimizer.config import OptimizerConfig, Rule
from energon_lite.trainer.parallel import collectives
from energon_lite.trainer.parallel.mesh import ParallelMesh
from energon_lite.trainer.parallel.parameters import layout_of, local_tensor
from energon_lite.trainer.parallel.shards import Shard

#: Learning rate and weight decay in a step, ``lr`` and ``weight_decay``, by rule.
Rules = Mapping[Rule, Mapping[str, float]]


class Partition:
    """The elements ``[start, stop)`` of flat parameter memory that this rank updates.

    Args:
        values: the values that the model computes with.
        grad: the sum of the gradients.
        plan: layout of the bucket, of which this is the share.
        algorithm: ``adamw``, ``sgd`` or ``muon``.
        mesh: the ranks.
        config: the settings.

    Attributes:
        tensors: the moments, and ``master``, the values in at least float32 (the same memory as ``values``, if the
            model has that precision), by name.
    """

    def __init__(
        self,
        values: Tensor,
        grad: Tensor,
        plan: BucketPlan,
        algorithm: str,
        mesh: ParallelMesh,
        config: OptimizerConfig,
    ):
        self.values = values
        self.grad = grad
        self.plan = plan
        self.start, self.stop = plan.share.start, plan.share.stop
        self.mesh = mesh
        self.config = config
        self.master = values if values.dtype.itemsize >= 4 else values.to(torch.float32)
        kinds = ("exp_avg", "exp_avg_sq") if algorithm == "adamw" else ("momentum_buffer",)
        moments = {kind: torch.zeros_like(self.master) for kind in kinds}
        self.tensors = {"master": self.master, **moments}
        here = self.master.is_cuda and importlib.util.find_spec("triton") is not None
        compiled = here if config.compile is None else config.compile
        self._compiled = _compiled_adamw(*config.betas, config.eps) if compiled and algorithm == "adamw" else None
        whole = [self.grad, *self.tensors.values()] + ([] if self.master is self.values else [self.values])
        # As separate tensors: views of tensors of different sizes would each be compiled again.
        self._slices = [(rule, [tensor[run].data for tensor in whole]) for run, rule in plan.runs]

    def update(self, rules: Rules, scale: Tensor | None, skip: Tensor, updates: Tensor, shared: dict[Any, Any]) -> None:
        """Launch one update, without waiting for the device.

        Args:
            rules: learning rate and weight decay, by rule.
            scale: factor of the gradient, for clipping; None for none.
            skip: 1 to change nothing, 0 otherwise.
            updates: number of updates with this one.
            shared: cache of numbers that all partitions use in this step; empty for the first partition.
        """
        if self._compiled is not None:  # by one kernel; numbers that change from step to step are on the device
            keep = shared.setdefault("keep", skip == 0)
            for rule, parts in self._slices:
                if rule not in shared:
                    rate, (beta, beta_sq) = rules[rule]["lr"], self.config.betas
                    size, root = rate / (1 - beta**updates), (1 - beta_sq**updates).sqrt()
                    shared[rule] = size, root, torch.full_like(size, 1 - rate * rules[rule]["weight_decay"])
                self._compiled(scale, keep, *shared[rule], *parts)
            return
        if scale is not None:
            self.grad.mul_(scale)
        config, steps = self.config, updates.to(torch.float32)
        for rule, (grad, master, *moments) in self._slices:
            tensors = [[master], [grad.to(master.dtype)], *([moment] for moment in moments[: len(self.tensors) - 1])]
            given: dict[str, Any] = {**rules[rule], "found_inf": skip, "maximize": False}
            if len(tensors) == 4:
                given |= {"max_exp_avg_sqs": [], "state_steps": [steps], "eps": config.eps, "amsgrad": False}
                torch._fused_adamw_(*tensors, beta1=config.betas[0], beta2=config.betas[1], **given)
            else:
                given |= {"momentum_buffer_list": tensors.pop() if config.momentum else [], "is_first_step": False}
                given |= {"momentum": config.momentum, "dampening": 0.0, "nesterov": False}
                torch._fused_sgd_(*tensors[:2], **given)
        if self.master is not self.values:
            self.values.copy_(self.master)

    def shard(self, slot: Slot) -> Shard | None:
        """Return the part of one parameter that is in this partition, as views; None if there is none."""
        lo, hi = max(slot.start, self.start), min(slot.stop, self.stop)
        here = {kind: tensor[lo - self.start : hi - self.start] for kind, tensor in self.tensors.items()}
        return Shard(slot.name, slot.parameter, lo - slot.start, here) if lo < hi else None


@cache
def _compiled_adamw(beta: float, beta_sq: float, eps: float) -> Callable[..., None]:
    """Compile a kernel for clipping, AdamW and rounding that reads and writes each element once."""

    def update(
        scale: Tensor | None,
        keep: Tensor,
        size: Tensor,
        root: Tensor,
        decay: Tensor,
        grad: Tensor,
        master: Tensor,
        average: Tensor,
        average_sq: Tensor,
        values: Tensor | None = None,
    ) -> None:
        grad = grad.to(master.dtype) if scale is None else grad.to(master.dtype) * scale
        moved = average + (grad - average) * (1 - beta)
        moved_sq = average_sq * beta_sq + grad * grad * (1 - beta_sq)
        new = torch.where(keep, master * decay - size * moved / (moved_sq.sqrt() / root + eps), master)
        average.copy_(torch.where(keep, moved, average))
        average_sq.copy_(torch.where(keep, moved_sq, average_sq))
        master.copy_(new)
        if values is not None:
            values.copy_(new)

    # One graph for slices of all sizes.
    return torch.compile(update, dynamic=True, fullgraph=True)


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
    """Partition of whole matrices, or of this rank's shards of them, that Muon updates."""

    def update(self, rules: Rules, scale: Tensor | None, skip: Tensor, updates: Tensor, shared: dict[Any, Any]) -> None:
        """Make one update; see :meth:`Partition.update`."""
        keep, momentum = (1 - skip).to(self.master.dtype), self.tensors["momentum_buffer"]
        # In place: the gradient is not needed afterwards.
        grad = self.grad.to(self.master.dtype).mul_(1.0 if scale is None else scale).masked_fill_(skip > 0, 0.0)
        momentum.lerp_(grad, (1 - self.config.momentum) * keep)
        # Nesterov momentum. The iterations, and the data sent for them, have the precision of the model.
        update = grad.lerp_(momentum, self.config.momentum).to(self.values.dtype)
        slots = [slot for slot in self.plan.slots if self.start <= slot.start < self.stop]
        parts = self._of_all_parts(update) if any(_cut(slot) is not None for slot in slots) else None
        for slot in slots:
            here, shape = slice(slot.start - self.start, slot.stop - self.start), local_tensor(slot.parameter).shape
            dim = _cut(slot)
            if dim is None or parts is None:
                direction = orthogonalize(update[here].view(shape))
            else:
                whole = orthogonalize(torch.cat([part[here].view(shape) for part in parts.unbind()], dim))
                direction = whole.chunk(len(parts), dim)[self.mesh.rank("tp")]
            rate = rules[slot.rule]["lr"]
            master = self.master[here].view(shape)
            master.mul_(1 - rate * rules[slot.rule]["weight_decay"] * keep)
            master.sub_(direction.to(master.dtype) * (rate * _size(slot, self.config.muon_scale) * keep))
        if self.master is not self.values:
            self.values.copy_(self.master)

    def _of_all_parts(self, update: Tensor) -> Tensor:
        """Gather the updates of all tensor-parallel ranks: ``[tp, elements]``."""
        group = self.mesh.group("tp")
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
        make = MuonPartition if kind.algorithm == "muon" else Partition
        self.owned = make(mine, total, plan, kind.algorithm, mesh, config)
        self.waiting: dict[nn.Parameter, Tensor] = {}  # gradients that are not yet in ``grads``
        self.filled: set[nn.Parameter] = set()  # parameters whose gradients are in ``grads``
        self.arrived = 0  # number of slots known to be ready for the next reduction
        self.reduced = self.collected = 0  # launched and finished reductions of this step
        self.gathering: dist.Work | None = None

    def fill(self, grads: Tensor) -> None:
        """Add the gradients that wait to ``grads``, by two kernels at most."""
        came = [slot for slot in self.slots if slot.parameter in self.waiting]
        for known, write in ((False, torch._foreach_copy_), (True, torch._foreach_add_)):
            if slots := [slot for slot in came if (slot.parameter in self.filled) is known]:
                write([slot.of(grads) for slot in slots], [self.waiting[slot.parameter] for slot in slots])
        self.filled.update(self.waiting)
        self.waiting.clear()

    def gather(self, group: dist.ProcessGroup | None) -> None:
        """Start to gather the values of all slices."""
        if group is not None:
            self.gathering = collectives.all_gather(self.values, self.values[self.share], group=group, async_op=True)

    def whole_state(self, group: dist.ProcessGroup | None) -> dict[str, Tensor]:
        """Gather the moments, and the master values if the model has others, from all slices, by name."""
        made = {kind: part for kind, part in self.owned.tensors.items() if part is not self.owned.values}
        for kind, part in made.items() if group is not None else ():
            made[kind] = part.new_empty(self.plan.size)
            collectives.all_gather(made[kind], part, group=group)
        return made

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


def check_memory(places: Mapping[nn.Parameter, tuple[Bucket, Slot]]) -> None:
    """Refuse parameters whose memory has moved out of their buckets.

    Raises:
        UsageError: the model was moved or converted.
    """
    for p, (bucket, slot) in places.items():
        there = bucket.values.data_ptr() + slot.start * bucket.values.itemsize
        if local_tensor(p).data_ptr() != there and slot.start < slot.stop:
            what = f"{slot.name} was moved after the optimizer was made, which cannot train it any more"
            raise UsageError(what, fix="call model.to(), .half() or flatten_parameters() before that")


def gradients_of_assumed(buckets: Iterable[Bucket]) -> dict[str, Tensor]:
    """Return this rank's slices of the gradients of parameters that are assumed to be copies on all ranks, by name."""
    gradients = {}
    for bucket in buckets:
        for slot in bucket.slots if layout_of(bucket.slots[0].parameter).sharded_dim is None else ():
            if layout_of(slot.parameter).assumed and (shard := bucket.owned.shard(slot)):
                start = slot.start + shard.start - bucket.owned.start
                gradients[slot.name] = bucket.owned.grad[start : start + shard.stop - shard.start]
    return gradients


def gradient_norm(buckets: Iterable[Bucket], mesh: ParallelMesh) -> Tensor:
    """Return the norm of the whole gradient: one data-parallel rank has a slice; of other copies, one counts."""
    square = sum_of_squares([bucket.owned.grad for bucket in buckets if bucket.kind.counts_here], mesh.device)
    if mesh.world_size > 1:
        dist.all_reduce(square)
    return square.sqrt()
