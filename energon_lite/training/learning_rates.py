"""The learning rate of each step."""

from __future__ import annotations

import math

from energon_lite.training.config import OptimizerConfig


def learning_rate(step: int, total: int, config: OptimizerConfig) -> float:
    """The learning rate of a step.

    Args:
        step: the step, counted from 0.
        total: number of steps of the run; the last one runs at ``config.min_lr``.
        config: the schedule.

    Example:
        >>> [learning_rate(step, 3, OptimizerConfig(lr=1.0, min_lr=0.0, warmup=1)) for step in range(3)]
        [1.0, 1.0, 0.0]
    """
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    done = min(1.0, (step - config.warmup) / max(1, total - 1 - config.warmup))
    return config.min_lr + (config.lr - config.min_lr) * 0.5 * (1.0 + math.cos(math.pi * done))
