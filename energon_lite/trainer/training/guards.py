"""Guards of a run: updates of steps with NaN, infinity or a spike of the loss are left out and reported.

Too many steps with NaN or infinity end the run.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from energon_lite.errors import NonFiniteError, listed
from energon_lite.trainer.checkpointing.checkpoint import latest_checkpoint
from energon_lite.trainer.checkpointing.files import Place
from energon_lite.trainer.data.loaders import StepData
from energon_lite.trainer.optimizer.overlapped_optimizer import OverlappedDistributedOptimizer
from energon_lite.trainer.parallel.mesh import ParallelMesh

logger = logging.getLogger(__name__)

#: Most names listed in a message before it is abbreviated.
_MOST_SHOWN = 4


@dataclass(eq=False)
class NonFiniteGuard:
    """Counter of steps whose loss or gradient is not finite; too many consecutive ones end the run.

    A gradient that is not finite changes nothing: the optimizer leaves out the update, so a few such steps do no harm.
    Weights or moments that are not finite cannot recover: they end the run at once, and are never saved.

    Args:
        model, optimizer: the trained model and its optimizer.
        mesh: the ranks. All of them must make a guard, and call its methods.
        limit: number of consecutive steps after which the run ends.
        skip_steps: steps that the run already passes over.

    Attributes:
        in_a_row: number of consecutive steps up to now that were not finite.
    """

    model: nn.Module
    optimizer: OverlappedDistributedOptimizer
    mesh: ParallelMesh
    limit: int
    skip_steps: Collection[int] = ()
    in_a_row: int = field(default=0, init=False)
    _numbers: list[int] = field(default_factory=list, init=False)

    def state(self) -> dict[str, Any]:
        """Return the counts for a checkpoint, so that a resumed run continues them."""
        return {"in_a_row": self.in_a_row, "numbers": self._numbers}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a :meth:`state`; an empty one resets the counts."""
        self.in_a_row, self._numbers = state.get("in_a_row", 0), list(state.get("numbers", ()))

    def saw(self, values: Mapping[str, Any], data: StepData, *, is_bad: bool) -> None:
        """Count a finished step, and end the run after too many bad ones.

        Args:
            values: its line of metrics.
            data: its data.
            is_bad: whether its loss or gradient norm was not finite on any rank.

        Raises:
            NonFiniteError: on all ranks: too many consecutive steps, or weights that are not finite.
        """
        if not is_bad:
            self.in_a_row, self._numbers = 0, []
            return
        step = values["step"]
        self.in_a_row += 1
        self._numbers += [number for number in data.numbers if number not in self._numbers]
        self.check_state(step)
        problem = f"loss {values['loss']:g}, gradient norm {values['grad_norm']:g}"
        if not math.isfinite(values["tokens"]):
            problem += ": the loss_mask of a micro-batch is not finite, so the data or its task encoder is at fault"
        logger.warning(
            "step %d is not finite (%s): %d of %d in a row, %d updates left out so far; its micro-batches here: %s",
            *(step, problem, self.in_a_row, self.limit, values.get("skipped_updates", 0)),
            _some(data.restore_keys),
        )
        if self.in_a_row >= self.limit:
            steps = f"steps {step - self.in_a_row + 1} to {step}" if self.in_a_row > 1 else f"step {step}"
            raise NonFiniteError(
                f"{self.in_a_row} steps in a row were not finite, up to step {step}: {problem}",
                where=f"{steps}; micro-batches of the last one on this rank: {_some(data.restore_keys)}",
                fix=f"{self._fix()}; or allow for more of them with train.nonfinite_limit",
            )

    def check_state(self, step: int, *, read: Place | None = None) -> None:
        """Check that all weights and moments are finite.

        Args:
            step: number of the last step.
            read: the checkpoint that they were read from just before, or its folder; None if there is none.

        Raises:
            NonFiniteError: on all ranks: some are not finite on at least one rank.
        """
        self.optimizer.wait_parameters()
        tensors = [(name, p.detach()) for name, p in self.model.named_parameters()]
        tensors += [(f"{shard.name} ({k})", t) for shard in self.optimizer.shards() for k, t in shard.tensors.items()]
        good = torch.stack([tensor.isfinite().all() for _, tensor in tensors]).tolist()
        wrong = [name for (name, _), fine in zip(tensors, good, strict=True) if not fine]
        if self.mesh.any_rank(bool(wrong)):
            where = f"on this rank: {_some(wrong)}" if wrong else "on another rank"
            what = f"weights or moments are not finite after step {step}: the run cannot go on with them"
            fix = self._fix()
            if read is not None:
                where = f"{latest_checkpoint(read) or read}, {where}"
                fix = "use another checkpoint: without this one, the run resumes from the one before"
            raise NonFiniteError(what, where=where, fix=fix)

    def _fix(self) -> str:
        steps = sorted({*self.skip_steps, *self._numbers})
        passed = f", or pass over this data with data.skip_steps={steps}" if self._numbers else ""
        return (
            "start the run again: it goes on from its newest checkpoint, which has none of this; lower optimizer.lr or "
            f"optimizer.clip{passed}"
        )


def is_finite(values: Mapping[str, Any]) -> bool:
    """Return whether a step's loss and gradient norm are finite."""
    return math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])


def _some(things: Iterable[object]) -> str:
    return listed([*things], _MOST_SHOWN) or "none"


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
        spike = loss.isfinite() & (loss > median + (self.factor - 1) * median.abs()) & (known >= self.window / 2)
        if self.mesh.world_size > 1:  # the bits of a loss may differ between ranks
            any_rank = spike.to(torch.float64)
            dist.all_reduce(any_rank, op=dist.ReduceOp.MAX)
            spike = any_rank > 0
        self._losses[self._seen % self.window] = torch.where(loss.isfinite(), loss, math.nan)
        self._seen += 1
        self.left_out += spike
        return spike

    def saw(self, values: Mapping[str, Any], data: StepData, *, is_bad: bool) -> None:
        """Log a step whose update was left out, when its numbers are known; arguments as :meth:`NonFiniteGuard.saw`."""
        if values.get("spikes", 0) > self._told:
            what = f"more than {self.factor:g} times the median of the last {self.window}"
            told = values["step"], values["loss"], what, _some(data.restore_keys)
            logger.warning("step %d updates nothing: its loss %g is %s; data here: %s", *told)
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
