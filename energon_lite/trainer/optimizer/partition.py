"""What a rank updates, and how: AdamW or SGD by torch's fused kernels, on master values in at least float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from energon_lite.trainer.optimizer.bucket_plan import Slot
from energon_lite.trainer.optimizer.config import OptimizerConfig
from energon_lite.trainer.parallel.shards import Shard


class Partition:
    """The elements ``[start, stop)`` of some flat memory of parameters, which this rank updates.

    Args:
        values: what the model computes with.
        grad: the sum of its gradients.
        start: of the elements.
        decayed: elements before this one belong to matrices, which are decayed; the others do not.
        config: the constants.

    Attributes:
        tensors: by name, the moments and ``master``, the values in at least float32 (the same memory, if the model is
            that precise).
    """

    def __init__(self, values: Tensor, grad: Tensor, start: int, decayed: int, config: OptimizerConfig):
        self.values, self.grad, self.start, self.stop = values, grad, start, start + values.numel()
        self.master = values if values.dtype.itemsize >= 4 else values.to(torch.float32)
        adamw = config.algorithm == "adamw"
        kinds = ("exp_avg", "exp_avg_sq") if adamw else ("momentum_buffer",)
        state = {kind: torch.zeros_like(self.master) for kind in kinds}
        self.tensors = {"master": self.master, **state}
        edge = min(max(decayed - start, 0), values.numel())
        runs = [(slice(0, edge), config.weight_decay), (slice(edge, values.numel()), 0.0)]
        self._runs = [(run, decay) for run, decay in runs if run.start < run.stop]
        groups = [{"params": [self.master[run]], "weight_decay": decay} for run, decay in self._runs]
        constants = {"betas": config.betas, "eps": config.eps} if adamw else {"momentum": config.momentum}
        self._inner: Any = (torch.optim.AdamW if adamw else torch.optim.SGD)(groups, fused=True, **constants)
        for (run, _), group in zip(self._runs, self._inner.param_groups, strict=True):
            self._inner.state[group["params"][0]] = {kind: whole[run] for kind, whole in state.items()}

    def set_updates(self, updates: int) -> None:
        """Say how many updates the moments have seen."""
        for state in self._inner.state.values():
            state["step"] = torch.tensor(float(updates), dtype=torch.float32, device=self.master.device)

    def update(self, lr: float, scale: Tensor | None, skip: Tensor) -> None:
        """One step with ``scale`` times the gradient, or none where ``skip`` is 1; nothing waits to see which."""
        if scale is not None:
            self.grad.mul_(scale)
        for (run, _), group in zip(self._runs, self._inner.param_groups, strict=True):
            group["lr"] = lr
            group["params"][0].grad = self.grad[run].to(self.master.dtype)
        self._inner.found_inf = skip
        self._inner.step()
        self._inner.zero_grad(set_to_none=True)
        if self.master is not self.values:
            self.values.copy_(self.master)

    def shard(self, slot: Slot) -> Shard | None:
        """What is here of one parameter, as views; None if nothing is."""
        lo, hi = max(slot.start, self.start), min(slot.stop, self.stop)
        tensors = {kind: tensor[lo - self.start : hi - self.start] for kind, tensor in self.tensors.items()}
        return Shard(slot.name, slot.parameter, lo - slot.start, tensors) if lo < hi else None
