"""Learning rate for batches of varying size."""

from __future__ import annotations

import math
from typing import Literal, get_args

from energon_lite.errors import UsageError

__all__ = ["SCALING_RULES", "ScalingRule", "learning_rate_scale"]

ScalingRule = Literal["linear", "sqrt", "none"]
SCALING_RULES: tuple[ScalingRule, ...] = get_args(ScalingRule)


def learning_rate_scale(size: float, reference: float, rule: ScalingRule = "sqrt") -> float:
    """Factor by which to multiply the learning rate of a step.

    Args:
        size: size of the step's global batch, in samples or, better, in tokens that count in the loss.
        reference: the size for which the learning rate was chosen, in the same unit.
        rule: ``linear``: proportional to the size, such that each sample has a constant influence on the weights, for
            SGD (Goyal et al. 2017, "Accurate, large minibatch SGD"); ``sqrt``: for Adam and similar optimizers
            (Malladi et al. 2022, "On the SDEs and scaling rules for adaptive gradient algorithms"); ``none``: 1.

    Raises:
        UsageError: a size is negative, the reference is not positive, or the rule is unknown.

    Example:
        >>> learning_rate_scale(48_000, 12_000, "linear"), learning_rate_scale(48_000, 12_000, "sqrt")
        (4.0, 2.0)
    """
    if rule not in SCALING_RULES:
        raise UsageError(f"there is no rule {rule!r} for the learning rate", fix=f"use one of {SCALING_RULES}")
    if not (size >= 0 and reference > 0):
        raise UsageError(f"a batch of {size} against one of {reference}", fix="give positive sizes, in the same unit")
    if rule == "none":
        return 1.0
    return size / reference if rule == "linear" else math.sqrt(size / reference)
