"""Activation recomputation: activations of a block that are kept for the backward pass, and the others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


def computed_again(function: Callable[..., torch.Tensor], *args: Any, selective: bool = False) -> torch.Tensor:
    """Return ``function(*args)``, keeping only the arguments for the backward pass (Chen et al., arXiv:1604.06174).

    Args:
        function, args: a part of a model, and its arguments.
        selective: also keep the outputs of matrix products and attention. The rest is cheap to recompute, and is about
            half of the memory: norms, rotations, activations, sums.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if selective:
        settings["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_products)
    made: torch.Tensor = checkpoint(function, *args, **settings)
    return made


def residual(x: torch.Tensor, *halves: tuple[Any, ...], selective: bool) -> torch.Tensor:
    """Add each half of a block to the residual stream; each may be :func:`computed_again` up to its sum over ranks.

    Args:
        x: the stream.
        halves: norm, layer and further arguments of the layer; the layer's input is the normed stream.
        selective: see :func:`computed_again`.
    """

    def half(x: torch.Tensor, norm: Any, layer: Any, *more: Any) -> torch.Tensor:
        made: torch.Tensor = layer(norm(x), *more)
        return made

    for parts in halves:
        x = x + (computed_again(half, x, *parts, selective=True) if selective else half(x, *parts))
    return x


def _keep_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    # Attention has many names, in torch and elsewhere. The outputs of batched products grow with the square of a row's
    # length if attention is made of them; all other products in a block are of two matrices.
    name = operation.name() if hasattr(operation, "name") else str(operation)
    kept = name in ("aten::mm", "aten::addmm") or "attention" in name or "attn" in name
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
