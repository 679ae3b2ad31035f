"""Attention masks of packed rows: each position attends to the earlier ones of its own sample only."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["flex_segment_mask", "segment_mask"]


def segment_mask(segment_ids: torch.Tensor) -> torch.Tensor:
    """Causal mask for ``scaled_dot_product_attention``: ``[rows, length]`` -> bool ``[rows, 1, length, length]``.

    Its size is quadratic in the length; for long rows use ``cu_seqlens`` or :func:`flex_segment_mask`.

    Example:
        >>> segment_mask(torch.tensor([[0, 0, 1]]))[0, 0].int()
        tensor([[1, 0, 0],
                [1, 1, 0],
                [0, 0, 1]], dtype=torch.int32)
    """
    length = segment_ids.shape[-1]
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    return (same & torch.ones(length, length, dtype=torch.bool, device=segment_ids.device).tril())[:, None]


def flex_segment_mask(
    segment_ids: torch.Tensor,
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Mask function for ``torch.nn.attention.flex_attention.create_block_mask``, which skips whole blocks.

    Example:
        >>> length = batch.tokens.shape[1]
        >>> mask = create_block_mask(flex_segment_mask(batch.segment_ids), 1, None, length, length)
        >>> flex_attention(query, key, value, block_mask=mask)
    """

    def allowed(row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (segment_ids[row, query] == segment_ids[row, key]) & (query >= key)

    return allowed
