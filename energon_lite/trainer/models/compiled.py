"""Compiled blocks for rows of any shape: few graphs, so that none of them falls back to eager."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from energon_lite.trainer.models.attention_functions import PackedBounds
from energon_lite.trainer.models.sequence import SequencePart

#: Of all blocks together, by torch's count: rows that are packed or not, in training and evaluation, for the shape that
#: came first; and these again for all other shapes, with one row or several. Behind torch's own 8 comes eager.
_MOST_GRAPHS = 16


class CompiledBlocks:
    """Compiles the blocks of a model, and tells the compiler which sizes change.

    Rows of one shape, as in pretraining, get graphs for just that shape. From the second shape on all sizes that a
    batch has a say in are left open, at once, instead of one after the other.

    Args:
        blocks: all of one kind.
        budget: the share, in 0..1, of what the compiler would keep for the backward pass that it may keep. It then
            chooses what to compute again, the cheapest first. This and the number of graphs hold for the process.
    """

    def __init__(self, blocks: Iterable[nn.Module], *, budget: float = 1.0):
        config: Any = torch._dynamo.config
        config.recompile_limit = max(config.recompile_limit, _MOST_GRAPHS)
        partitioner: Any = importlib.import_module("torch._functorch.config")
        partitioner.activation_memory_budget = budget
        for block in blocks:
            block.compile()
        self._first: torch.Size | None = None
        self._vary = False

    def expect(self, x: torch.Tensor, part: SequencePart | None = None) -> None:
        """Call it with what the first block is about to be called with; images have no part."""
        self._first = self._first or x.shape
        self._vary = self._vary or x.shape != self._first
        if self._vary:
            open_sizes = [(x, (0, 1)), *((table, (0,)) for table in ([] if part is None else part.rotation))]
            for run in () if part is None else part.runs:
                if isinstance(run.mask, torch.Tensor):
                    open_sizes.append((run.mask, (0, 2, 3)))
                elif isinstance(run.mask, PackedBounds):
                    open_sizes += [(bounds, (0,)) for bounds in run.mask]
            for tensor, dims in open_sizes:
                torch._dynamo.maybe_mark_dynamic(tensor, dims)


def compiled_for_any_rows(function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """A function of tensors ``[tokens, ...]``, compiled to one graph, however many tokens there are."""
    compiled = torch.compile(function)

    def call(*parts: torch.Tensor) -> Any:
        for part in parts:
            torch._dynamo.maybe_mark_dynamic(part, 0)
        return compiled(*parts, **settings)

    return call
