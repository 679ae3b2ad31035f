"""From hidden states to the loss, over a vocabulary that is cut over ranks: none holds a row of all logits.

Nor need the logits of all tokens exist at once. A row of them is as wide as the vocabulary, and the loss needs it in
float32 and again for its gradient; for 16,384 tokens and a vocabulary of 32,000 these are gigabytes. Since the loss is
a sum over tokens, a chunk's gradients can be had right behind its logits, which are then forgotten: nothing is
computed twice. (Liger Kernel, Hsu et al., arXiv:2410.10989, does this with kernels of its own; here it is matrix
products and cross-entropy as before.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from energon_lite.trainer.parallel.mesh import ParallelMesh
from energon_lite.trainer.training.tensor_parallel import ColumnParallelLinear

#: Logits, labels, weights of tokens, first column, group -> the sum of their losses, and its gradient by the logits.
Terms = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, int, "dist.ProcessGroup | None"], tuple[torch.Tensor, torch.Tensor]
]


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


class OutputLayer(ColumnParallelLinear):
    """Hidden states to logits, a column-parallel layer; or, with :meth:`loss_sum`, right on to the loss.

    Args:
        hidden: width of the hidden states.
        rows: size of the padded vocabulary.
        mesh: the ranks.
        vocab_size: number of real tokens.
        chunk: tokens whose logits exist at a time; 0: all.
        compiled: compile what is done with a chunk's logits.
        std, dtype: see :class:`ColumnParallelLinear`.
    """

    def __init__(
        self,
        hidden: int,
        rows: int,
        mesh: ParallelMesh,
        *,
        vocab_size: int,
        chunk: int = 0,
        compiled: bool = False,
        std: float = 0.02,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__(hidden, rows, mesh, input_entered=True, std=std, dtype=dtype)
        self.chunk, self.vocab_size, self.first = chunk, vocab_size, mesh.rank("tp") * (rows // mesh.tp)
        # A collective in the midst cannot be compiled away; without one, some ten passes over the logits become three.
        self._terms: Terms = torch.compile(_terms) if compiled and self.group is None else _terms

    def forward(
        self, x: torch.Tensor, labels: torch.Tensor | None = None, counted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits ``[..., rows / tp]`` of hidden states ``[..., hidden]``.

        With labels, int64 ``[...]``, and their weights ``counted`` ``[...]``: the weighted sum of their losses. (Both
        go through this method, since whoever waits for parameters waits at a module's call.)
        """
        if labels is None or counted is None:
            return super().forward(x)
        flat, length = x.flatten(0, -2), max(1, self.chunk or labels.numel())
        loss: torch.Tensor = _ChunkedLoss.apply(
            flat, self.weight, labels.flatten(), counted.flatten(), self, length, torch.is_grad_enabled()
        )
        return loss

    def terms(self, logits: torch.Tensor, labels: torch.Tensor, counted: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The sum of a chunk's losses, and its gradient by the logits."""
        logits = mask_padding(logits, self.first, self.vocab_size)
        return self._terms(logits, labels, counted, self.first, self.group)


def _terms(
    logits: torch.Tensor, labels: torch.Tensor, counted: torch.Tensor, first: int, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    softmax, column, mine, losses = softmax_and_loss(logits, labels, first, group)
    weights = counted.to(softmax.dtype)
    return (losses * weights).sum(), subtract_right(softmax * weights[:, None], column, mine, weights).to(logits.dtype)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        counted: torch.Tensor,
        layer: OutputLayer,
        length: int,
        learning: bool,
    ) -> torch.Tensor:
        wants_x, wants_weight = (learning and wanted for wanted in ctx.needs_input_grad[:2])
        grad_x = torch.empty_like(x) if wants_x else None
        grad_weight = torch.zeros_like(weight) if wants_weight else None
        total = x.new_zeros((), dtype=torch.promote_types(x.dtype, torch.float32))
        for start in range(0, len(x), length):
            here = slice(start, start + length)
            loss, by_logits = layer.terms(F.linear(x[here], weight), labels[here], counted[here])
            total = total + loss
            if grad_x is not None:
                torch.mm(by_logits, weight, out=grad_x[here])
            if grad_weight is not None:
                grad_weight.addmm_(by_logits.t(), x[here])
        ctx.grads = grad_x, grad_weight
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Of a sum, all gradients are multiples of those of the sum itself.
        found = [None if grad is None else grad.mul_(grads[0].to(grad.dtype)) for grad in ctx.grads]
        ctx.grads = None
        return (*found, None, None, None, None, None)
