"""What of a block is kept for the backward pass, and what is computed again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


def computed_again(function: Callable[..., torch.Tensor], *args: Any, selective: bool = False) -> torch.Tensor:
    """``function(*args)``, of which the backward pass has the arguments only (Chen et al., arXiv:1604.06174).

    Args:
        function, args: a part of a model, and what it is called with.
        selective: also keep what matrix products and attention have made. What is left costs little to compute again,
            and is about half of the memory: norms, rotations, activations, sums.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if selective:
        settings["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_products)
    made: torch.Tensor = checkpoint(function, *args, **settings)
    return made


def residual(x: torch.Tensor, *halves: Callable[[torch.Tensor], torch.Tensor], selective: bool) -> torch.Tensor:
    """Each half of a block added to the stream; :func:`computed_again` by itself, before its sum over ranks ends it."""
    for half in halves:
        x = x + (computed_again(half, x, selective=True) if selective else half(x))
    return x


def _keep_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    # Attention goes by many names, of torch and of others. What batched products make grows with the square of a
    # row's length, where attention is made of them; all else in a block is a product of two matrices.
    name = operation.name() if hasattr(operation, "name") else str(operation)
    kept = name in ("aten::mm", "aten::addmm") or "attention" in name or "attn" in name
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
