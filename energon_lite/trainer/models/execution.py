"""Execution of a model's blocks: activations kept for the backward pass or recomputed, and compilation for rows of any
shape, with few graphs, so that none falls back to eager mode."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from energon_lite.trainer.models.named_layers import PackedBounds
from energon_lite.trainer.models.sequence import SequencePart

#: Upper bound of torch's count of graphs of all blocks: rows packed or not, in training and evaluation, for the first
#: shape; and the same for all other shapes, with one row or several. Beyond it (8 by default), torch runs in eager
#: mode.
_MOST_GRAPHS = 16


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
    return checkpoint(function, *args, **settings)


def residual(x: torch.Tensor, *halves: tuple[Any, ...], selective: bool) -> torch.Tensor:
    """Add each half of a block to the residual stream; each may be :func:`computed_again` up to its sum over ranks.

    Args:
        x: the stream.
        halves: norm, layer and further arguments of the layer; the layer's input is the normed stream.
        selective: see :func:`computed_again`.
    """

    def half(x: torch.Tensor, norm: Any, layer: Any, *more: Any) -> torch.Tensor:
        return layer(norm(x), *more)

    for parts in halves:
        x = x + (computed_again(half, x, *parts, selective=True) if selective else half(x, *parts))
    return x


def _keep_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    # Attention has many names, in torch and elsewhere. The outputs of batched products grow with the square of a row's
    # length if attention is made of them; all other products in a block are of two matrices.
    name = operation.name() if hasattr(operation, "name") else str(operation)
    kept = name in ("aten::mm", "aten::addmm") or "attention" in name or "attn" in name
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class CompiledBlocks:
    """Compiler of the blocks of a model, which declares the sizes that change.

    Rows of one shape, as in pretraining, get graphs for exactly that shape. From the second shape on, all sizes that
    depend on the batch become dynamic at once, instead of one after the other.

    Args:
        blocks: the blocks, all of one kind.
        budget: the share, 0 to 1, of the activations for the backward pass that the compiler may keep. It recomputes
            the cheapest rest. This and the number of graphs apply to the process.
    """

    def __init__(self, blocks: Iterable[nn.Module], *, budget: float = 1.0):
        config: Any = torch._dynamo.config
        # Later versions of torch call it recompile_limit, and know this name too.
        config.cache_size_limit = max(config.cache_size_limit, _MOST_GRAPHS)
        partitioner: Any = importlib.import_module("torch._functorch.config")
        partitioner.activation_memory_budget = budget
        for block in blocks:
            block.compile()
        self._first: torch.Size | None = None
        self._vary = False

    def expect(self, x: torch.Tensor, part: SequencePart | None = None) -> None:
        """Mark dynamic sizes of the next input of the first block; images have no ``part``."""
        self._first = self._first or x.shape
        self._vary = self._vary or x.shape != self._first
        if self._vary:
            open_sizes = [(x, (0, 1)), *((table, (0,)) for table in ([] if part is None else part.rotation))]
            for run in () if part is None else part.runs:
                if isinstance(run.mask, torch.Tensor):
                    open_sizes.append((run.mask, (0, 2, 3)))
                elif isinstance(run.mask, PackedBounds):
                    open_sizes += [(run.mask.queries, (0,)), (run.mask.keys, (0,)), (run.mask.longest, (0, 1))]
            for tensor, dims in open_sizes:
                torch._dynamo.maybe_mark_dynamic(tensor, dims)


def compiled_for_any_rows(function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """Compile a function of tensors ``[tokens, ...]`` to one graph for any number of tokens."""
    compiled = torch.compile(function)

    def call(*parts: torch.Tensor) -> Any:
        for part in parts:
            torch._dynamo.maybe_mark_dynamic(part, 0)
        return compiled(*parts, **settings)

    return call
