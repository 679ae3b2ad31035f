"""Layers with weights sharded over the tensor-parallel ranks: linear ones, an embedding, and the output with its loss.

Weights have the shapes of ``torch.nn``: ``[out, in]`` for a linear layer, ``[vocabulary, hidden]`` for an embedding.
With :attr:`ParallelMesh.sequence_cut`, inputs and outputs are sharded along the sequence.

No rank holds a whole row of logits, and the logits of all tokens need not exist at once either. A row of logits is as
wide as the vocabulary, and the loss needs it in float32 and again for its gradient; for 16,384 tokens and a vocabulary
of 32,000 these are gigabytes. Since the loss is a sum over tokens, the gradients of a chunk can be computed directly
after its logits, which are then freed: nothing is computed twice. (Liger Kernel, Hsu et al., arXiv:2410.10989, does
this with its own kernels; here it is matrix products and cross-entropy as before.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from energon_lite.trainer.models.config import ModelConfig
from energon_lite.trainer.models.execution import compiled_for_any_rows
from energon_lite.trainer.parallel.collectives import (
    enter_parallel,
    gather_parallel,
    leave_parallel,
    overlapped_products,
)
from energon_lite.trainer.parallel.mesh import ParallelMesh
from energon_lite.trainer.parallel.parameters import ParameterLayout, new_parameter


class ColumnParallelLinear(nn.Module):
    """Linear layer ``y = x W^T + b`` sharded along its outputs: a rank makes ``out_features / tp`` features.

    Args:
        in_features, out_features: sizes of the whole layer.
        mesh: the ranks.
        bias: add a bias (sharded like the outputs).
        gather_output: return all features on every rank; otherwise this rank's, for a :class:`RowParallelLinear`.
        std: standard deviation of the initial weights.
        dtype: type of the weights.

    Raises:
        TopologyError: ``out_features`` is not a multiple of ``mesh.tp``.

    Example:
        >>> ColumnParallelLinear(8, 16, mesh)(torch.ones(2, 8)).shape  # with tp=2
        torch.Size([2, 8])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        mesh: ParallelMesh,
        *,
        bias: bool = False,
        gather_output: bool = False,
        std: float = 0.02,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        self.group = mesh.group("tp")
        self.sequence = mesh.sequence_cut
        self.gather_output = gather_output
        self.weight = new_parameter(ParameterLayout((out_features, in_features), 0, std), mesh, dtype)
        self.bias = new_parameter(ParameterLayout((out_features,), 0), mesh, dtype) if bias else None

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Prepare the input, for this layer and others that share it; see :func:`enter_parallel`."""
        return enter_parallel(x, self.group, sequence=self.sequence)

    def forward(self, x: torch.Tensor, *, entered: bool = False) -> torch.Tensor:
        """Map ``[..., in_features]`` -> ``[..., out_features / tp]``, or all features with ``gather_output``.

        With ``entered``, the input has passed :meth:`enter`: layers with one input share its communication.
        """
        x = x if entered else self.enter(x)
        y = F.linear(x, self.weight, self.bias)
        return gather_parallel(y, self.group) if self.gather_output else y


class Projections(nn.Module):
    """Base of modules that apply several column-parallel layers to one input.

    Args:
        mesh: the ranks.

    Attributes:
        reads_children: tells an optimizer that replaces weights in the background to finish before the call.
    """

    def __init__(self, mesh: ParallelMesh):
        super().__init__()
        self.reads_children = mesh.tp > 1

    def layers(self) -> Sequence[ColumnParallelLinear]:
        """Return the layers that share an input."""
        raise NotImplementedError

    def project(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """Apply the layers to one input, with shared communication."""
        layers = self.layers()
        group, sequence = layers[0].group, layers[0].sequence
        if group is None or torch.compiler.is_compiling():  # a wait cannot be compiled
            x = layers[0].enter(x)
            return [layer(x, entered=True) for layer in layers]
        made = overlapped_products(x, [layer.weight for layer in layers], group, sequence=sequence)
        return [y if layer.bias is None else y + layer.bias for layer, y in zip(layers, made, strict=True)]


class RowParallelLinear(nn.Module):
    """Linear layer ``y = x W^T + b`` sharded along its inputs: a rank has a part of the features, all get the sum.

    Args:
        in_features, out_features: sizes of the whole layer.
        mesh: the ranks.
        bias: add a bias (whole on every rank, added once).
        std: standard deviation of the initial weights.
        dtype: type of the weights.

    Raises:
        TopologyError: ``in_features`` is not a multiple of ``mesh.tp``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        mesh: ParallelMesh,
        *,
        bias: bool = False,
        std: float = 0.02,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        self.group = mesh.group("tp")
        self.sequence = mesh.sequence_cut
        self.weight = new_parameter(ParameterLayout((out_features, in_features), 1, std), mesh, dtype)
        whole = ParameterLayout((out_features,), sum_over=mesh.sequence_axes)
        self.bias = new_parameter(whole, mesh, dtype) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[..., in_features / tp]`` -> ``[..., out_features]``, equal on all ranks, or sharded by sequence."""
        y = leave_parallel(F.linear(x, self.weight), self.group, sequence=self.sequence)
        return y if self.bias is None else y + self.bias


class VocabParallelEmbedding(nn.Module):
    """Table of token embeddings, sharded along the vocabulary.

    Args:
        rows: size of the table (the padded vocabulary, :attr:`ModelConfig.padded_vocab_size`).
        hidden: width of an embedding.
        mesh: the ranks.
        std: standard deviation of the initial weights.
        dtype: type of the weights.
        sum_over: see :class:`ParameterLayout`.

    Raises:
        TopologyError: ``rows`` is not a multiple of ``mesh.tp``.
    """

    def __init__(
        self,
        rows: int,
        hidden: int,
        mesh: ParallelMesh,
        *,
        std: float = 0.02,
        dtype: torch.dtype = torch.float32,
        sum_over: tuple[str, ...] = (),
    ):
        super().__init__()
        self.group = mesh.group("tp")
        self.weight = new_parameter(ParameterLayout((rows, hidden), 0, std, sum_over=sum_over), mesh, dtype)
        self.first = mesh.rank("tp") * (rows // mesh.tp)

    def forward(self, tokens: torch.Tensor, *, sequence: bool = False) -> torch.Tensor:
        """Look up embeddings: tokens ``[...]`` -> ``[..., hidden]``, equal on all ranks.

        With ``sequence``, each rank gets its part: ``[rows, length]`` -> ``[rows, length / tp, hidden]``.
        """
        if self.group is None:
            return F.embedding(tokens, self.weight)
        # A rank looks up the tokens it owns and adds zeros for the rest; the sum over ranks is the embedding.
        row = tokens - self.first
        mine = (row >= 0) & (row < self.weight.shape[0])
        embeddings = F.embedding(row.masked_fill(~mine, 0), self.weight)
        return leave_parallel(embeddings.masked_fill(~mine.unsqueeze(-1), 0.0), self.group, sequence=sequence)


class Columns(NamedTuple):
    """This rank's columns of the vocabulary.

    Args:
        first: number of the first column in the whole vocabulary.
        group: the tensor-parallel ranks.
        vocab_size: number of real tokens; later columns are excluded from the softmax. None: all are real.
    """

    first: int
    group: dist.ProcessGroup | None
    vocab_size: int | None


def softmax_and_loss(
    logits: torch.Tensor, labels: torch.Tensor, columns: Columns
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute this rank's columns of the softmax, and the loss of each token; no gradient flows.

    Args:
        logits: ``[..., vocabulary / tp]``.
        labels: ``[...]``, int64.
        columns: this rank's columns.

    Returns:
        The softmax; for each token the column of its label, and whether that is on this rank; the losses. All in at
        least float32.
    """
    first, group, vocab_size = columns
    end = first + logits.shape[-1]
    if vocab_size is not None and end > vocab_size:
        padding = torch.arange(first, end, device=logits.device) >= vocab_size
        logits = logits.masked_fill(padding, float("-inf"))
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    top = logits.amax(dim=-1)
    if group is not None:
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    shifted = logits - top.unsqueeze(-1)

    column = labels - first
    mine = (column >= 0) & (column < logits.shape[-1])
    column = column.masked_fill(~mine, 0)
    picked = shifted.gather(-1, column.unsqueeze(-1)).squeeze(-1).masked_fill(~mine, 0.0)
    exponentials = shifted.exp_()
    sums = torch.stack([exponentials.sum(dim=-1), picked])
    if group is not None:
        dist.all_reduce(sums, group=group)
    return exponentials.div_(sums[0].unsqueeze(-1)), column, mine, sums[0].log() - sums[1]


def subtract_right(grad: torch.Tensor, column: torch.Tensor, mine: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Subtract each token's weight from ``grad`` at its label, ``[..., vocabulary / tp]``; may change it in place."""
    if torch.compiler.is_compiling():
        # A comparison per entry can be fused into the kernel that makes the entry; an index would end the fusion.
        here = torch.arange(grad.shape[-1], device=grad.device) == column.masked_fill(~mine, -1).unsqueeze(-1)
        return grad - torch.where(here, weights.unsqueeze(-1), 0.0)
    # One entry per row, so plain indexing is exact and deterministic (scatter_add is not, on a GPU).
    rows = torch.arange(mine.numel(), device=grad.device)
    flat, columns = grad.view(-1, grad.shape[-1]), column.reshape(-1)
    flat[rows, columns] = flat[rows, columns] - (weights * mine).reshape(-1)
    return grad


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, columns: Columns) -> torch.Tensor:
        ctx.logits_dtype = logits.dtype
        softmax, column, mine, losses = softmax_and_loss(logits, labels, columns)
        ctx.save_for_backward(softmax, column, mine)
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        softmax, column, mine = ctx.saved_tensors
        grad = subtract_right(softmax * grads[0].unsqueeze(-1), column, mine, grads[0])
        return grad.to(ctx.logits_dtype), None, None


def vocab_parallel_cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, mesh: ParallelMesh, *, vocab_size: int | None = None
) -> torch.Tensor:
    """Return the loss of each token, in float32 (float64 for float64 logits).

    Args:
        logits: ``[..., vocabulary / tp]``, this rank's columns.
        labels: ``[...]``, int64, the target tokens; equal on all tensor-parallel ranks.
        mesh: the ranks.
        vocab_size: number of real tokens. Later columns are padding: they are excluded from the softmax, so padding the
            vocabulary changes no loss.

    Returns:
        ``[...]``, equal on all tensor-parallel ranks.
    """
    columns = Columns(mesh.rank("tp") * logits.shape[-1], mesh.group("tp"), vocab_size)
    return _VocabParallelCrossEntropy.apply(logits, labels, columns)


class OutputLayer(ColumnParallelLinear):
    """Column-parallel output layer from hidden states to logits; with labels, directly to the loss.

    Args:
        config: the model's shape. ``loss_chunk`` limits the number of tokens whose logits exist at a time. With
            ``compile``, the computation after the logits is compiled, in chunks or not.
        mesh: the ranks.
    """

    def __init__(self, config: ModelConfig, mesh: ParallelMesh):
        rows = config.padded_vocab_size
        super().__init__(config.hidden_size, rows, mesh, std=config.init_std, dtype=config.torch_dtype)
        self.mesh = mesh
        self.vocab_size = config.vocab_size
        self.chunk = config.loss_chunk
        # Compilation cannot remove a collective; without one, some ten passes over the logits become three.
        self.compiled = config.compile and self.group is None
        columns = Columns(mesh.rank("tp") * len(self.weight), self.group, config.vocab_size)
        self.terms = (compiled_for_any_rows if self.compiled else partial)(chunk_terms, columns=columns)

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, labels: torch.Tensor | None = None, counted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return logits ``[..., rows / tp]`` of hidden states ``[..., hidden]``, or the loss.

        With labels, int64 ``[...]``, and their weights ``counted`` ``[...]``, return the weighted sum of their losses.
        Both are in one method, because waiting for parameters is hooked to a module's call.
        """
        if (self.chunk or self.compiled) and labels is not None and counted is not None:
            flat = self.enter(x).flatten(0, -2), self.weight, labels.flatten(), counted.flatten()
            return _ChunkedLoss.apply(*flat, self.chunk or labels.numel(), self.terms, torch.is_grad_enabled())
        logits = super().forward(x)
        if labels is None or counted is None:
            return logits
        return (vocab_parallel_cross_entropy(logits, labels, self.mesh, vocab_size=self.vocab_size) * counted).sum()


def chunk_terms(
    logits: torch.Tensor, labels: torch.Tensor, counted: torch.Tensor, *, columns: Columns
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of a chunk's losses, weighted by ``counted``, and its gradient by the logits."""
    softmax, column, mine, losses = softmax_and_loss(logits, labels, columns)
    weights = counted.to(softmax.dtype)
    return (losses * weights).sum(), subtract_right(softmax * weights[:, None], column, mine, weights).to(logits.dtype)


def _wide_product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``a @ b`` of narrow types in a wider type, in which matrix units accumulate anyway."""
    if not a.is_cuda:
        return a.to(dtype) @ b.to(dtype)
    return torch.mm(a, b, out_dtype=dtype) if hasattr(torch.ops.aten.mm, "dtype") else a @ b  # torch >= 2.8


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        counted: torch.Tensor,
        length: int,
        terms: Callable[..., tuple[torch.Tensor, torch.Tensor]],
        learning: bool,
    ) -> torch.Tensor:
        wants_x, wants_weight = (learning and wanted for wanted in ctx.needs_input_grad[:2])
        grad_x = torch.empty_like(x) if wants_x else None
        # In bfloat16, a sum over many chunks would lose most of each.
        wide = torch.promote_types(weight.dtype, torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=wide) if wants_weight else None
        total = x.new_zeros((), dtype=torch.promote_types(x.dtype, torch.float32))
        for start in range(0, len(x), length):
            here = slice(start, start + length)
            loss, by_logits = terms(F.linear(x[here], weight), labels[here], counted[here])
            total = total + loss
            if grad_x is not None:
                torch.mm(by_logits, weight, out=grad_x[here])
            if grad_weight is not None and wide == weight.dtype:
                grad_weight.addmm_(by_logits.t(), x[here])
            elif grad_weight is not None:
                grad_weight += _wide_product(by_logits.t(), x[here], wide)
        ctx.grads, ctx.weight_dtype = (grad_x, grad_weight), weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # All gradients of a sum are multiples of the gradient of the sum.
        scaled = [None if grad is None else grad.mul_(grads[0].to(grad.dtype)) for grad in ctx.grads]
        scaled[1] = None if scaled[1] is None else scaled[1].to(ctx.weight_dtype)
        ctx.grads = None
        return (*scaled, None, None, None, None, None)
