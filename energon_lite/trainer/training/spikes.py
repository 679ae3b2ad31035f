"""Detection of loss spikes: the updates of such steps are left out."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from energon_lite.errors import listed
from energon_lite.trainer.data.loaders import StepData
from energon_lite.trainer.parallel.mesh import ParallelMesh

logger = logging.getLogger(__name__)


class SpikeGuard:
    """Judge of each step's loss by the losses before it, on the device and without a wait.

    A step whose loss is more than ``factor`` times the median of the last ``window`` losses updates nothing. Its loss
    window; a loss that is not finite is not. Before half a window of losses is known, no step is judged.

    Args:
        factor: factor of the median, above 1.
        window: number of losses.
        mesh: the ranks. All of them must make a guard, and call its methods.

    Attributes:
        left_out: number of updates left out, a scalar on the device.
    """

    def __init__(self, factor: float, window: int, mesh: ParallelMesh):
        self.factor = factor
        self.window = window
        self.mesh = mesh
        self.left_out = torch.zeros((), dtype=torch.float64, device=mesh.device)
        self._losses = torch.full((window,), math.nan, dtype=torch.float64, device=mesh.device)
        self._told = 0
        self._seen = 0  # number of steps; a loss replaces that of ``window`` steps before

    def judge(self, loss: torch.Tensor) -> torch.Tensor:
        """Return whether to leave out the update of a step, a bool on the device. Every rank must call it; all agree.

        Args:
            loss: loss of the whole step, a scalar.
        """
        known = self._losses.isfinite().sum()
        median = self._losses.sort().values.take(known // 2)  # NaN sorts last
        spike = loss.isfinite() & (loss > self.factor * median) & (known >= self.window / 2)
        if self.mesh.world_size > 1:  # the bits of a loss may differ between ranks
            any_rank = spike.to(torch.float64)
            dist.all_reduce(any_rank, op=dist.ReduceOp.MAX)
            spike = any_rank > 0
        self._losses[self._seen % self.window] = torch.where(loss.isfinite(), loss, math.nan)
        self._seen += 1
        self.left_out += spike
        return spike

    def saw(self, step: int, values: Mapping[str, Any], data: StepData) -> None:
        """Log a step whose update was left out, when its numbers are known.

        Args:
            step: number of the step.
            values: its line of metrics.
            data: data of the step.
        """
        if values.get("spikes", 0) > self._told:
            keys = listed([*data.restore_keys], 4) or "none"
            what = f"more than {self.factor:g} times the median of the last {self.window}"
            logger.warning(
                "step %d updates nothing: its loss %g is %s; data here: %s", step, values["loss"], what, keys
            )
            self._told = values["spikes"]

    def state(self) -> dict[str, Any]:
        """Return the losses, the oldest first, and the number of updates left out, for a checkpoint."""
        losses = self._losses.roll(-(self._seen % self.window)).tolist()[max(0, self.window - self._seen) :]
        return {"losses": [loss if math.isfinite(loss) else None for loss in losses], "left_out": self.left_out.item()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a :meth:`state`, of any window; an empty one resets the losses."""
        losses = [math.nan if loss is None else loss for loss in state.get("losses", ())][-self.window :]
        self._losses.fill_(math.nan)[: len(losses)] = self._losses.new_tensor(losses)
        self._seen = len(losses)
        self._told = int(state.get("left_out", 0))
        self.left_out.fill_(self._told)
