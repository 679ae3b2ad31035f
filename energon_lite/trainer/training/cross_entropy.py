"""Cross-entropy over a vocabulary that is cut over ranks: no rank ever holds a row of all logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from energon_lite.trainer.parallel.mesh import ParallelMesh


def softmax_and_loss(
    logits: torch.Tensor, labels: torch.Tensor, first: int, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """This rank's columns of the softmax, and the loss of each token; no gradient flows.

    Args:
        logits: ``[..., vocabulary / tp]``, this rank's columns.
        labels: ``[...]``, int64.
        first: this rank's first column in the whole vocabulary.
        group: the tensor-parallel ranks.

    Returns:
        The softmax; for each token the column of its label, and whether that is on this rank; the losses. At least in
        float32.
    """
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
    """Take each token's weight off the gradient at its label, in place: ``[..., vocabulary / tp]``."""
    # One entry per row, so plain indexing is exact and the same every time (scatter_add would not be, on a GPU).
    rows = torch.arange(mine.numel(), device=grad.device)
    flat, columns = grad.view(-1, grad.shape[-1]), column.reshape(-1)
    flat[rows, columns] = flat[rows, columns] - (weights * mine).reshape(-1)
    return grad


def mask_padding(logits: torch.Tensor, first: int, vocab_size: int | None) -> torch.Tensor:
    """Leave columns behind the real vocabulary out of the softmax."""
    width = logits.shape[-1]
    if vocab_size is None or first + width <= vocab_size:
        return logits
    padding = torch.arange(first, first + width, device=logits.device) >= vocab_size
    return logits.masked_fill(padding, float("-inf"))


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, first: int, group: dist.ProcessGroup | None
    ) -> torch.Tensor:
        ctx.logits_dtype = logits.dtype
        softmax, column, mine, losses = softmax_and_loss(logits, labels, first, group)
        ctx.save_for_backward(softmax, column, mine)
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        softmax, column, mine = ctx.saved_tensors
        grad = subtract_right(softmax * grads[0].unsqueeze(-1), column, mine, grads[0])
        return grad.to(ctx.logits_dtype), None, None, None


def vocab_parallel_cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, mesh: ParallelMesh, *, vocab_size: int | None = None
) -> torch.Tensor:
    """The loss of each token, in float32 (float64 for float64 logits).

    Args:
        logits: ``[..., vocabulary / tp]``, this rank's columns.
        labels: ``[...]``, int64, the right tokens; equal on all tensor-parallel ranks.
        mesh: the ranks.
        vocab_size: number of real tokens. Columns from there on are padding: they are left out of the softmax, so that
            padding the vocabulary changes no loss.

    Returns:
        ``[...]``, equal on all tensor-parallel ranks.
    """
    first = mesh.rank("tp") * logits.shape[-1]
    logits = mask_padding(logits, first, vocab_size)
    loss: torch.Tensor = _VocabParallelCrossEntropy.apply(logits, labels, first, mesh.group("tp"))
    return loss
