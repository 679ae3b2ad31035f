"""Partitions of parameters that a rank updates by AdamW or SGD, on master values in at least float32."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from energon_lite.trainer.optimizer.bucket_plan import Slot
from energon_lite.trainer.optimizer.config import OptimizerConfig, Rule
from energon_lite.trainer.parallel.shards import Shard


class Partition:
    """The elements ``[start, stop)`` of flat parameter memory that this rank updates.

    Args:
        values: the values that the model computes with.
        grad: the sum of the gradients.
        start: offset of the first element.
        runs: slices, counted from ``start``, each with its update rule.
        algorithm: ``adamw`` or ``sgd``.
        config: the settings.

    Attributes:
        tensors: the moments, and ``master``, the values in at least float32 (the same memory as ``values``, if the
            model has that precision), by name.
    """

    def __init__(
        self,
        values: Tensor,
        grad: Tensor,
        start: int,
        runs: list[tuple[slice, Rule]],
        algorithm: str,
        config: OptimizerConfig,
    ):
        self.values = values
        self.grad = grad
        self.start = start
        self.stop = start + values.numel()
        self.config = config
        self.runs = runs
        self.master = values if values.dtype.itemsize >= 4 else values.to(torch.float32)
        kinds = ("exp_avg", "exp_avg_sq") if algorithm == "adamw" else ("momentum_buffer",)
        moments = {kind: torch.zeros_like(self.master) for kind in kinds}
        self.tensors = {"master": self.master, **moments}
        self._prepare(algorithm, moments)

    def _prepare(self, algorithm: str, moments: dict[str, Tensor]) -> None:
        config = self.config
        here = self.master.is_cuda and importlib.util.find_spec("triton") is not None
        compiled = here if config.compile is None else config.compile
        self._compiled = _compiled_adamw(*config.betas, config.eps) if compiled and algorithm == "adamw" else None
        groups = [{"params": [self.master[run]], "weight_decay": rule.weight_decay} for run, rule in self.runs]
        self._updates = torch.zeros((), dtype=torch.float64, device=self.master.device)
        self._slices: list[tuple[Rule, list[Tensor]]] = []
        self._inner: Any = None
        if self._compiled:
            whole = [self.grad, *self.tensors.values()] + ([] if self.master is self.values else [self.values])
            # As separate tensors: views of tensors of different sizes would each be compiled anew.
            self._slices = [(rule, [tensor[run].data for tensor in whole]) for run, rule in self.runs]
        if self._compiled or not groups:
            return
        if algorithm == "adamw":
            self._inner = torch.optim.AdamW(groups, betas=config.betas, eps=config.eps, fused=True)
        else:
            self._inner = torch.optim.SGD(groups, momentum=config.momentum, fused=True)
        for (run, _), group in zip(self.runs, self._inner.param_groups, strict=True):
            self._inner.state[group["params"][0]] = {kind: whole[run] for kind, whole in moments.items()}

    def set_updates(self, updates: int) -> None:
        """Set the number of updates that the moments include."""
        if self._inner is None:
            self._updates.fill_(updates)
            return
        for state in self._inner.state.values():
            state["step"] = torch.tensor(float(updates), dtype=torch.float32, device=self.master.device)

    def update(self, lr: float, scale: Tensor | None, skip: Tensor, shared: dict[Any, Any]) -> None:
        """Launch one update, without waiting for the device.

        Args:
            lr: learning rate of the step.
            scale: factor of the gradient, for clipping; None for none.
            skip: 1 to change nothing, 0 otherwise.
            shared: cache of numbers that all partitions use in this step; empty for the first partition.
        """
        if self._inner is None:
            self._update_at_once(lr, scale, skip, shared)
            return
        if scale is not None:
            self.grad.mul_(scale)
        for (run, rule), group in zip(self.runs, self._inner.param_groups, strict=True):
            group["lr"] = lr * rule.lr_scale
            group["params"][0].grad = self.grad[run].to(self.master.dtype)
        self._inner.found_inf = skip
        self._inner.step()
        self._inner.zero_grad(set_to_none=True)
        if self.master is not self.values:
            self.values.copy_(self.master)

    def _update_at_once(self, lr: float, scale: Tensor | None, skip: Tensor, shared: dict[Any, Any]) -> None:
        """Update each run by one kernel; numbers that change from step to step are tensors on the device."""
        self._updates += 1 - skip
        keep = shared.setdefault("keep", skip == 0)
        for rule, tensors in self._slices:
            if rule not in shared:
                rate, (beta, beta_sq) = lr * rule.lr_scale, self.config.betas
                size, root = rate / (1 - beta**self._updates), (1 - beta_sq**self._updates).sqrt()
                shared[rule] = size, root, torch.full_like(size, 1 - rate * rule.weight_decay)
            assert self._compiled is not None
            self._compiled(scale, keep, *shared[rule], *tensors)

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
