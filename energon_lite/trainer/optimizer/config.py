"""Configuration of the optimizer, and the learning rate of each step."""

from __future__ import annotations

import fnmatch
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from energon_lite.batching import learning_rate_scale
from energon_lite.errors import listed, require, require_at_least, require_choice

#: Schedules of the learning rate.
SCHEDULES = ("cosine", "linear", "constant", "wsd")

_CHOICES = {
    "schedule": list(SCHEDULES),
    "algorithm": ["adamw", "sgd", "muon"],
    "muon_scale": ["rms", "spectral"],
    "reduce": ["last", "every"],
    "grad_dtype": ["float32", "parameter"],
    "scale_rule": ["none", "linear", "sqrt"],
}

#: Name patterns of lookup tables (one vector per word or position): AdamW trains them when the run uses Muon.
_TABLES = ("*embed*", "*wte*", "*wpe*", "*position*", "*lm_head*", "head.*", "*.head.*")


@dataclass(frozen=True)
class ParameterGroup:
    """A group of parameters with its own settings.

    Args:
        match: pattern of parameter names, with ``*``, ``?`` and ``[...]`` as in a shell.
        weight_decay: weight decay, for matrices and others; None for the value without the group.
        lr_scale: factor of the step's learning rate.
        algorithm: ``adamw`` or ``muon``, if the run's is muon; None for the choice without the group.
    """

    match: str
    weight_decay: float | None = None
    lr_scale: float = 1.0
    algorithm: str | None = None

    def __post_init__(self) -> None:
        decay = self.weight_decay is None or self.weight_decay >= 0
        require(decay, "weight_decay is negative", "optimizer.groups.weight_decay", "give a number >= 0")
        require(self.lr_scale >= 0, "lr_scale is negative", "optimizer.groups.lr_scale", "give a number >= 0")
        known = self.algorithm in (None, "adamw", "muon")
        what = f"a group's algorithm is {self.algorithm!r}"
        require(known, what, "optimizer.groups.algorithm", "give adamw or muon")


class Rule(NamedTuple):
    """Weight decay and learning rate factor of a parameter's update."""

    weight_decay: float
    lr_scale: float = 1.0


@dataclass(frozen=True)
class OptimizerConfig:
    """Configuration of the optimizer and of its schedule: linear warm-up to ``lr``, then ``schedule``.

    See :func:`learning_rate`.

    Args:
        lr: highest learning rate.
        min_lr: learning rate at the end; in a run, at most ``lr``.
        warmup: number of steps until ``lr`` is reached.
        schedule: ``cosine``, ``linear``, ``constant`` or ``wsd``.
        decay_share: share of the run's steps, at its end, in which ``wsd`` lowers the learning rate.
        scale_rule: dependence of the learning rate on the tokens of a step, if these vary: ``linear``, ``sqrt`` or
            ``none``; see :func:`energon_lite.batching.learning_rate_scale`.
        reference_tokens: tokens of the step for which ``lr`` was chosen; required by ``scale_rule``.
        weight_decay: weight decay of matrices; norms and biases are not decayed.
        betas: decay rates of the two moments.
        eps: constant added to the root of the second moment.
        clip: largest global gradient norm; 0 for no clipping.
        algorithm: ``adamw``, ``sgd``, or ``muon`` for matrices and AdamW for all else.
        momentum: momentum of SGD and Muon; 0 for none.
        muon_scale: scale of Muon's updates: ``rms``, like AdamW's, so that both can share a learning rate (Moonlight);
            or ``spectral``, which changes the output by the learning rate for any shape (Jordan).
        groups: parameters with other settings, by name pattern; the first matching group counts.
        compile: update by one compiled kernel that also clips and rounds, instead of three kernels; None: only on a
            GPU.
        bucket_size: elements of a bucket; None for the larger of 40 million and a million per data-parallel rank.
        reduce: reduction of gradients over ranks: after the ``last`` micro-batch of a step (ZeRO-1), or after ``every``
            one (ZeRO-2: less memory, more communication).
        grad_dtype: type in which gradients are summed: at least ``float32``, or the type of the ``parameter``.
    """

    lr: float = 1e-3
    min_lr: float = 1e-4
    warmup: int = 10
    schedule: str = "cosine"
    decay_share: float = 0.2
    scale_rule: str = "none"
    reference_tokens: int = 0
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip: float = 1.0
    algorithm: str = "adamw"
    momentum: float = 0.9
    muon_scale: str = "rms"
    groups: tuple[ParameterGroup, ...] = ()
    compile: bool | None = None
    bucket_size: int | None = None
    reduce: str = "last"
    grad_dtype: str = "float32"

    def __post_init__(self) -> None:
        at = "optimizer"
        require_at_least(self, at, lr=0, min_lr=0, warmup=0, weight_decay=0, clip=0, bucket_size=1)
        require(self.eps > 0, "eps is not positive", "optimizer.eps", "e.g. 1e-8")
        share = 0 < self.decay_share <= 1
        require(share, f"decay_share={self.decay_share} is not a share", "optimizer.decay_share", "e.g. 0.2")
        for name, rates, example in (("betas", self.betas, "[0.9, 0.95]"), ("momentum", (self.momentum,), "0.9")):
            good = all(0 <= rate < 1 for rate in rates)
            require(good, f"{name} of {listed(rates)} is not in [0, 1)", f"optimizer.{name}", f"e.g. {example}")
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            require_choice(value, choices, f"unknown {name} {value!r}", f"optimizer.{name}")
        known = self.scale_rule == "none" or self.reference_tokens >= 1
        require(known, "scale_rule needs reference_tokens", "optimizer.reference_tokens", "e.g. 65536")
        odd = self.algorithm != "muon" and any(group.algorithm for group in self.groups)
        require(not odd, "groups have algorithms of their own under muon only", "optimizer.groups", "leave it out")

    def group(self, name: str) -> ParameterGroup | None:
        """Return the group of a parameter, or None."""
        return next((group for group in self.groups if fnmatch.fnmatchcase(name, group.match)), None)

    def rule(self, name: str, dim: int) -> Rule:
        """Return the update rule of a parameter with ``dim`` dimensions."""
        group = self.group(name)
        decay = group.weight_decay if group else None
        if decay is None:
            decay = self.weight_decay if dim > 1 else 0.0
        return Rule(decay, group.lr_scale if group else 1.0)

    def algorithm_of(self, name: str, dim: int) -> str:
        """Return the algorithm of a parameter with ``dim`` dimensions; Muon is for matrices only."""
        group = self.group(name)
        if self.algorithm != "muon" or dim != 2:
            return self.algorithm if self.algorithm != "muon" else "adamw"
        table = any(fnmatch.fnmatchcase(name, pattern) for pattern in _TABLES)
        return (group.algorithm if group else None) or ("adamw" if table else "muon")

    def learning_rates(self, lr: float) -> dict[str, float]:
        """Return the learning rates of all groups as metrics, for the step's learning rate ``lr``."""
        return {f"lr {group.match}": lr * group.lr_scale for group in self.groups}


def learning_rate(step: int, total: int, config: OptimizerConfig) -> float:
    """Return the learning rate of a step: a linear warm-up to ``config.lr``, then ``config.schedule``.

    ``cosine`` and ``linear`` decrease to ``config.min_lr`` at the last step, along half a cosine or linearly.
    ``constant`` stays. ``wsd`` (warm-up, stable, decay; Hu et al., MiniCPM, arXiv:2404.06395) stays until the last
    ``config.decay_share`` of the run, and then decreases linearly to ``config.min_lr``.

    Args:
        step: the step, counted from 0.
        total: number of steps of the run.
        config: the schedule.

    Example:
        >>> [learning_rate(step, 3, OptimizerConfig(lr=1.0, min_lr=0.0, warmup=1)) for step in range(3)]
        [1.0, 1.0, 0.0]
    """
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    if config.schedule == "constant":
        return config.lr
    start = config.warmup
    if config.schedule == "wsd":
        start = max(start, total - 1 - math.ceil(total * config.decay_share))
    done = min(1.0, max(0, step - start) / max(1, total - 1 - start))
    left = 0.5 * (1.0 + math.cos(math.pi * done)) if config.schedule == "cosine" else 1.0 - done
    return config.min_lr + (config.lr - config.min_lr) * left


def scaled_learning_rate(step: int, total: int, config: OptimizerConfig, tokens: int) -> float:
    """Return the learning rate of a step with ``tokens`` tokens, scaled by ``config.scale_rule``."""
    rule: Any = config.scale_rule
    return learning_rate(step, total, config) * learning_rate_scale(tokens, config.reference_tokens or 1, rule)
