"""The attention of packed rows on a GPU, with what its kernel promises in place of the kernel: ``by_documents``."""

from __future__ import annotations

from itertools import pairwise
from unittest import mock

import torch

from energon_lite.trainer import register_attention
from energon_lite.trainer.models import named_layers
from energon_lite.trainer.models.named_layers import Run


def one_by_one(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_bounds: torch.Tensor,
    k_bounds: torch.Tensor,
    most_q: int,
    most_k: int,
    *,
    window_size: tuple[int, int],
) -> torch.Tensor:
    """What ``varlen_attn`` promises, ``[tokens, heads, width]``: the diagonal of each document ends lower right."""
    assert window_size[1] == 0
    assert q_bounds.dtype == k_bounds.dtype == torch.int32
    made = torch.full_like(q, torch.nan)
    assert (most_q, most_k) == tuple(max(bounds.diff().tolist()) for bounds in (q_bounds, k_bounds)), "not a row's"
    for (first, last), (begin, end) in zip(pairwise(q_bounds.tolist()), pairwise(k_bounds.tolist()), strict=True):
        if first < last:
            keys, values = (x[begin:end].repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
            scores = torch.einsum("qhw,khw->hqk", q[first:last], keys) / q.shape[-1] ** 0.5
            diagonal = end - begin - (last - first)
            hidden = torch.ones(last - first, end - begin).triu(diagonal + 1).bool()
            if window_size[0] >= 0:
                hidden |= torch.ones_like(hidden).tril(diagonal - window_size[0] - 1)
            weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
            made[first:last] = torch.einsum("hqk,khw->qhw", weights, values)
    return made


def by_documents(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, run: Run) -> torch.Tensor:
    with mock.patch.object(named_layers, "_varlen_attn", lambda: one_by_one):
        return named_layers.varlen(q, k, v, run)


BY_DOCUMENTS = "by_documents"
register_attention(BY_DOCUMENTS, by_documents, named_layers.packed_bounds, windows=True)
