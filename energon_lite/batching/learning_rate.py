"""How the learning rate follows a batch that is not always equally large."""

from __future__ import annotations

import math
from typing import Literal, get_args

from energon_lite.errors import UsageError

__all__ = ["SCALING_RULES", "ScalingRule", "learning_rate_scale"]

ScalingRule = Literal["linear", "sqrt", "none"]
SCALING_RULES: tuple[ScalingRule, ...] = get_args(ScalingRule)


def learning_rate_scale(size: float, reference: float, rule: ScalingRule = "sqrt") -> float:
    """What to multiply the learning rate of a step with.

    Args:
        size: of the step's global batch, in samples or, better, in tokens that count in the loss.
        reference: the size for which the learning rate was chosen, in the same unit.
        rule: ``linear``: in proportion, so that each sample moves the weights as much as ever, for SGD (Goyal et al.
            2017, "Accurate, large minibatch SGD"); ``sqrt``: for Adam and its kin (Malladi et al. 2022, "On the SDEs
            and scaling rules for adaptive gradient algorithms"); ``none``: leave it.

    Raises:
        UsageError: sizes that are not positive, or an unknown rule.

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
