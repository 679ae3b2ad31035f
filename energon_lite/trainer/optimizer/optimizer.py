"""Interface of the trainer's optimizers, and the code that both kinds share."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from energon_lite.errors import UsageError
from energon_lite.trainer.optimizer.bucket_plan import Slot
from energon_lite.trainer.optimizer.config import OptimizerConfig
from energon_lite.trainer.optimizer.foreign_modules import adopt_module
from energon_lite.trainer.optimizer.partition import Partition
from energon_lite.trainer.parallel.mesh import ParallelMesh, parallel_mesh
from energon_lite.trainer.parallel.shards import Shard


class Optimizer:
    """Interface of an optimizer. Gradients of backward passes are summed until the next :meth:`step`.

    Methods that do nothing here are for an optimizer that overlaps communication with computation.

    Args:
        model: the model to train.
        mesh: the ranks. All of them call the same methods in the same order.
        config: the settings.

    Attributes:
        parameters: the trained parameters, by name.
        order: their names, in the order of processing.
    """

    def __init__(self, model: nn.Module, mesh: ParallelMesh | DeviceMesh, config: OptimizerConfig):
        self.mesh = parallel_mesh(mesh)
        self.config = config
        self._updates = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        self._leave_out: torch.Tensor | None = None
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.order = list(self.parameters)
        adopt_module(model, self.parameters, self.mesh)
        for group in config.groups:
            if not self.mesh.any_rank(any(config.group(name) is group for name in self.parameters)):
                what = f"no parameter that is trained is in the group {group.match!r}"
                raise UsageError(what, fix="see dict(model.named_parameters()); the first pattern that fits counts")

    def begin_step(self, micro_batches: int) -> None:
        """Announce the number of micro-batches of the next step, equal on all data-parallel ranks."""

    def end_micro_batch(self, of: Collection[nn.Parameter] | None = None) -> None:
        """Announce that a micro-batch's gradients are complete: of all parameters, or ``of`` one chunk of layers."""

    @property
    def updates(self) -> int:
        """Number of updates that the moments include; reading it waits for the device."""
        return int(self._updates.item())

    def step(self, lr: float) -> float:
        """Update the parameters; return the norm of the whole model's gradient before clipping.

        A step whose gradient is not finite changes nothing; all ranks see the same norm, so all skip it.
        """
        return self.launch_step(lr)[0].item()

    def launch_step(self, lr: float, leave_out: torch.Tensor | None = None) -> torch.Tensor:
        """Launch :meth:`step` without waiting for the device; returns float64 ``[2]`` on the device.

        The numbers are the norm of the gradient before clipping, and the :attr:`updates` after the step. If
        ``leave_out`` is true (a scalar on the device, equal on all ranks), nothing is updated.
        """
        self._leave_out = leave_out
        return torch.stack([self._launch(lr), self._updates])

    def _launch(self, lr: float) -> torch.Tensor:
        """Launch the update; return the norm, a float64 scalar on the device, without waiting for it."""
        raise NotImplementedError

    def _judge(self, norm: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Return the clipping factor, and 1 if the update is left out, else 0; count the update if it is made."""
        good = norm.isfinite()
        if self._leave_out is not None:
            good &= ~self._leave_out
        self._updates += good
        # NaN times padding would stay in the padding.
        scale = (self.config.clip / norm).nan_to_num(nan=0.0).clamp(max=1.0) if self.config.clip else None
        return scale, good.logical_not().to(torch.float32)

    def wait_parameters(self) -> None:
        """Wait until all parameters have the values of the last step."""

    def _partitions(self) -> Iterable[tuple[Partition, Sequence[Slot]]]:
        """Return the partitions that this rank updates, each with the slots of its parameters."""
        raise NotImplementedError

    def shards(self) -> Iterator[Shard]:
        """Yield this rank's shards of each parameter's state, to save or fill: master values and moments, as views."""
        for partition, slots in self._partitions():
            yield from filter(None, map(partition.shard, slots))

    def set_updates(self, updates: int) -> None:
        """Set the number of updates that the moments include, after reading a checkpoint."""
        self._updates.fill_(updates)
        for partition, _ in self._partitions():
            partition.set_updates(updates)

    def set_order(self, order: Sequence[str]) -> None:
        """Process parameters in the order of a former run, so that rounding is the same.

        Args:
            order: parameter names, including those of other pipeline stages.
        """


def sum_partial(grads: Sequence[tuple[torch.Tensor, Collection[str]]], mesh: ParallelMesh) -> None:
    """Sum gradients that are partial sums along axes other than the data's: one collective for each axis.

    Args:
        grads: pairs of a gradient, or a slice of one, and its axes.
        mesh: the ranks.
    """
    for axis in ("tp", "ends"):
        group, parts = mesh.group(axis), [grad.view(-1) for grad, axes in grads if axis in axes]
        if group is not None and parts:
            dist.all_reduce(flat := torch.cat(parts), group=group)
            torch._foreach_copy_(parts, list(flat.split([part.numel() for part in parts])))


def sum_of_squares(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the sum of squares of all elements, a float64 scalar.

    Norms are taken in at least float32, by few kernels and without copies. They are summed in float64, because squares
    above 3e38 are infinite in float32.
    """
    norms = [torch.zeros((), device=device)]
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        alike = [tensor for tensor in tensors if tensor.dtype == dtype]
        norms += torch._foreach_norm(alike, 2, dtype=torch.promote_types(dtype, torch.float32))
    return torch.stack([norm.double() for norm in norms]).square().sum()
