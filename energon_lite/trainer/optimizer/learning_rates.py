"""The learning rate of each step."""

from __future__ import annotations

import math
from typing import Any

from energon_lite.batching import learning_rate_scale
from energon_lite.trainer.optimizer.config import OptimizerConfig


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
