"""The collectives of tensor parallelism as autograd functions: what happens forward, and its mirror image backward.

A tensor-parallel block is two matrix products around something element-wise. The first weight is cut by columns (each
rank makes some of the features from all of the input), the second by rows (each rank makes a share of the sum for all
outputs). Between ranks that needs two things only:

    enter   forward: nothing, all ranks hold the same input     backward: sum the input's gradient over ranks
    leave   forward: sum the shares over ranks                  backward: nothing, all ranks hold the same gradient

The two are each other's transpose (Shoeybi et al., Megatron-LM, arXiv:1909.08053, call them f and g).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

Group = dist.ProcessGroup | None


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        # A copy, because autograd may hand the very same tensor to another branch.
        grad = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group, ctx.width = group, x.shape[-1]
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        # All ranks computed the same thing from the gathered tensor, so each keeps its own columns and sums nothing.
        return grads[0].narrow(-1, ctx.group.rank() * ctx.width, ctx.width), None


def enter_parallel(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Hand a tensor that all ranks hold to a product whose weight is cut by columns.

    Several products may share one ``enter_parallel``: their gradients are added locally and sent once.
    """
    return x if group is None else _Enter.apply(x, group)


def leave_parallel(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum the shares that a product with a weight cut by rows has left on each rank."""
    return x if group is None else _Leave.apply(x, group)


def gather_parallel(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Put the ranks' columns (last dimension) side by side on every rank."""
    return x if group is None else _Gather.apply(x, group)
