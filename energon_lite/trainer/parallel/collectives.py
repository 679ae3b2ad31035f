"""Collectives of tensor parallelism as autograd functions, forward and its transpose backward.

A tensor-parallel block is two matrix products around an element-wise function. The first weight is sharded by columns
(each rank makes some of the features from all of the input), the second by rows (each rank makes a partial sum of all
outputs). The ranks then need two operations only:

    enter   forward: nothing, all ranks hold the same input     backward: sum the input's gradient over ranks
    leave   forward: sum the shares over ranks                  backward: nothing, all ranks hold the same gradient

The two are each other's transpose (Shoeybi et al., Megatron-LM, arXiv:1909.08053, call them f and g).

Under sequence parallelism (Korthikanti et al., arXiv:2205.05198) a rank keeps a part of the sequence between blocks,
instead of all of it. The same number of bytes is sent, in two halves, and norms and residuals take 1/tp of the memory:

    enter   forward: gather the parts of the sequence           backward: sum the gradient, keep this rank's part
    leave   forward: sum the shares, keep this rank's part      backward: gather the parts of the gradient

The sequence is the dimension before the last, as in ``[rows, length, features]``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

Group = dist.ProcessGroup | None
#: torch's collectives that scatter and gather one tensor, by their newer names: torch 2.13 renamed them and warns about
#: the former names, the only ones in torch 2.6. ``reduce_scatter(part, whole, group=group)`` sums ``whole`` over the
#: ranks and writes this rank's part of the sum into ``part``; ``all_gather(whole, part, ...)`` concatenates the parts.
reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
Step = Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor]


class _Collective(torch.autograd.Function):
    """One of :data:`_COLLECTIVES`, by name, applied to a tensor, and its transpose to the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, name: str) -> torch.Tensor:
        ctx.group, ctx.name = group, name
        return _COLLECTIVES[name][0](x, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _COLLECTIVES[ctx.name][1](grads[0], ctx.group), None, None


def _unchanged(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return a view of a tensor that all ranks hold, because autograd needs a new tensor."""
    return x.view_as(x)


def _summed(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """All-reduce a copy, because autograd may pass the same tensor to another branch."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _joined(x: torch.Tensor, group: dist.ProcessGroup, dim: int = -2) -> torch.Tensor:
    """All-gather: concatenate the ranks' tensors along ``dim``."""
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim=dim)


def _own_part(x: torch.Tensor, group: dist.ProcessGroup, dim: int = -2) -> torch.Tensor:
    """Return this rank's part of a tensor that all ranks hold."""
    return x.chunk(group.size(), dim)[group.rank()].contiguous()


def _summed_part(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Reduce-scatter: return this rank's part, along the sequence, of the sum over ranks."""
    parts = x.chunk(group.size(), dim=-2)
    shares, part = torch.cat(parts), torch.empty_like(parts[0], memory_format=torch.contiguous_format)
    reduce_scatter(part, shares, group=group)
    return part


#: Forward operation, and its transpose backward.
_COLLECTIVES: dict[str, tuple[Step, Step]] = {
    "enter": (_unchanged, _summed),
    "leave": (_summed, _unchanged),
    # All ranks compute the same from the gathered columns, so each keeps its own gradient without a sum.
    "gather": (partial(_joined, dim=-1), partial(_own_part, dim=-1)),
    "gather_sequence": (_joined, _summed_part),
    "scatter_sequence": (_summed_part, _joined),
    "split_sequence": (_own_part, _joined),
}


def _collective(name: str, x: torch.Tensor, group: Group) -> torch.Tensor:
    return x if group is None else _Collective.apply(x, group, name)


def enter_parallel(x: torch.Tensor, group: Group, *, sequence: bool = False) -> torch.Tensor:
    """Pass a tensor that all ranks hold to a product whose weight is sharded by columns.

    Several products may share one ``enter_parallel``: their gradients are added locally and sent once.

    Args:
        x: the same on all ranks; with ``sequence``, each rank's part of the sequence ``[..., length / n, features]``.
        group: the tensor-parallel ranks; None for one alone.
        sequence: the input is sharded along the sequence.
    """
    return _collective("gather_sequence" if sequence else "enter", x, group)


class _OverlappedProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, sequence: bool, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        whole = _joined(x, group) if sequence else x
        ctx.group, ctx.sequence = group, sequence
        ctx.save_for_backward(whole, *weights)
        return tuple(F.linear(whole, weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        grad, work = None, None
        if ctx.needs_input_grad[0]:
            grad = grads[0] @ weights[0]
            for of_output, weight in zip(grads[1:], weights[1:], strict=True):
                grad += of_output @ weight
            if ctx.sequence:
                shares, grad = (
                    torch.cat(grad.chunk(ctx.group.size(), dim=-2)),
                    torch.empty_like(_own_part(grad, ctx.group)),
                )
                work = reduce_scatter(grad, shares, group=ctx.group, async_op=True)
            else:
                work = dist.all_reduce(grad, group=ctx.group, async_op=True)
        rows = x.flatten(0, -2)
        of_weights = [
            of_output.flatten(0, -2).t() @ rows if needed else None
            for of_output, needed in zip(grads, ctx.needs_input_grad[3:], strict=True)
        ]
        if work is not None:
            work.wait()
        return (grad, None, None, *of_weights)


def overlapped_products(
    x: torch.Tensor, weights: Sequence[torch.Tensor], group: dist.ProcessGroup, *, sequence: bool = False
) -> tuple[torch.Tensor, ...]:
    """Multiply an input by several weights that are sharded by columns, including :func:`enter_parallel`.

    In the backward pass, the input's gradient is summed over ranks while those of the weights are computed.

    Args:
        x, group, sequence: as for :func:`enter_parallel`.
        weights: the weights, ``[features, in]`` each.

    Returns:
        The products, ``[..., features]`` each.
    """
    return _OverlappedProducts.apply(x, group, sequence, *weights)


def leave_parallel(x: torch.Tensor, group: Group, *, sequence: bool = False) -> torch.Tensor:
    """Sum the partial sums of a product whose weight is sharded by rows.

    With ``sequence``, each rank keeps its part of the sequence, whose length must be divisible by the number of ranks.
    """
    return _collective("scatter_sequence" if sequence else "leave", x, group)


def gather_parallel(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Concatenate the ranks' columns (last dimension) on every rank."""
    return _collective("gather", x, group)


def split_sequence(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Keep this rank's part of the sequence of a tensor that all ranks hold; its gradient is whole on all of them."""
    return _collective("split_sequence", x, group)


def gather_sequence(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Gather the ranks' parts of the sequence, concatenated.

    The ranks compute different results from them, so backward sums the gradients.
    """
    return _collective("gather_sequence", x, group)
