"""Steps whose loss leaps up: their updates are left out before they are made."""

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
    """Judges each step's loss by the losses before it, where they are: on the device, and nobody waits.

    A step whose loss is more than ``factor`` times the median of the last ``window`` losses updates nothing. For the
    steps that follow, its loss is among these, so a run that stays on a higher level is let through after half a
    window; one that is not finite is not. Before half a window of losses is known, none is judged.

    Args:
        factor: above 1.
        window: how many losses.
        mesh: the ranks. All of them must make a guard, and call its methods.

    Attributes:
        left_out: how many updates were left out, a number on the device.
    """

    def __init__(self, factor: float, window: int, mesh: ParallelMesh):
        self.factor, self.window, self.mesh = factor, window, mesh
        self.left_out = torch.zeros((), dtype=torch.float64, device=mesh.device)
        self._losses = torch.full((window,), math.nan, dtype=torch.float64, device=mesh.device)
        self._told = 0
        self._seen = 0  # steps; the loss of each takes the place of that a window before

    def judge(self, loss: torch.Tensor) -> torch.Tensor:
        """Whether to leave out the update of a step, a bool on the device: the same on every rank, which must call it.

        Args:
            loss: of the whole step, a scalar.
        """
        known = self._losses.isfinite().sum()
        median = self._losses.sort().values.take(known // 2)  # what is not a number comes last
        spike = loss.isfinite() & (loss > self.factor * median) & (known >= self.window / 2)
        if self.mesh.world_size > 1:  # bits of a loss may differ from rank to rank
            told = spike.to(torch.float64)
            dist.all_reduce(told, op=dist.ReduceOp.MAX)
            spike = told > 0
        self._losses[self._seen % self.window] = torch.where(loss.isfinite(), loss, math.nan)
        self._seen += 1
        self.left_out += spike
        return spike

    def saw(self, step: int, values: Mapping[str, Any], data: StepData) -> None:
        """Say so, if a step is one of those, when its numbers are known.

        Args:
            step: its number.
            values: its line of metrics.
            data: its data.
        """
        if values.get("spikes", 0) > self._told:
            keys = listed([*data.restore_keys], 4) or "none"
            what = f"more than {self.factor:g} times the median of the last {self.window}"
            logger.warning(
                "step %d updates nothing: its loss %g is %s; data here: %s", step, values["loss"], what, keys
            )
            self._told = values["spikes"]

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: the losses, the oldest first, and the number of updates left out."""
        losses = self._losses.roll(-(self._seen % self.window)).tolist()[max(0, self.window - self._seen) :]
        return {"losses": [loss if math.isfinite(loss) else None for loss in losses], "left_out": self.left_out.item()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a :meth:`state`, of another window perhaps; from an empty one, from nothing."""
        losses = [math.nan if loss is None else loss for loss in state.get("losses", ())][-self.window :]
        self._losses.fill_(math.nan)[: len(losses)] = self._losses.new_tensor(losses)
        self._seen = len(losses)
        self._told = int(state.get("left_out", 0))
        self.left_out.fill_(self._told)
