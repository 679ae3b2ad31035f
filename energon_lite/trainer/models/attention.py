"""Attention with rotary positions and grouped key heads, heads cut over the tensor-parallel ranks.

With context parallelism each rank has the queries of its own positions and gathers all keys and values (as Llama 3 was
trained, arXiv:2407.21783, section 3.3.2). With grouped heads these are small beside the rest, and gathering works with
any mask, which passing them round in a ring does not.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint

from energon_lite.trainer.models.config import ModelConfig
from energon_lite.trainer.models.registry import find_attention, register_attention
from energon_lite.trainer.models.sequence import Rotation, Run, SequencePart, gather_positions
from energon_lite.trainer.models.tensor_parallel import ColumnParallelLinear, RowParallelLinear, project
from energon_lite.trainer.parallel.mesh import ParallelMesh
from energon_lite.trainer.parallel.parameters import indivisible


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Turn ``x`` ``[..., length, head_dim]`` by its positions.

    Feature i is paired with feature i + head_dim/2, as in Hugging Face's Llama, so that its weights fit unchanged.
    """
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Attention(nn.Module):
    """Causal self-attention of ``num_heads`` query and ``kv_heads`` key and value heads.

    A rank holds ``1/tp`` of the heads of both kinds; a query head and the key head it uses are on the same rank.

    Args:
        config: the model's shape.
        mesh: the ranks.
        output_std: standard deviation of the initial output weights.

    Raises:
        TopologyError: ``tp`` does not divide the numbers of heads.
    """

    def __init__(self, config: ModelConfig, mesh: ParallelMesh, *, output_std: float):
        super().__init__()
        hidden, width, std, dtype = config.hidden_size, config.head_dim, config.init_std, config.torch_dtype
        for kind, heads in (("query", config.num_heads), ("key", config.kv_heads)):
            if heads % mesh.tp:
                raise indivisible(f"a layer of {heads} {kind} heads", heads, mesh)
        self.head_dim = width
        self.function = find_attention(config.attention).function
        self.recompute = config.recompute == "selective"
        self.reads_children = config.fuse_projections
        self.q_proj = ColumnParallelLinear(hidden, config.num_heads * width, mesh, std=std, dtype=dtype)
        self.k_proj = ColumnParallelLinear(hidden, config.kv_heads * width, mesh, std=std, dtype=dtype)
        self.v_proj = ColumnParallelLinear(hidden, config.kv_heads * width, mesh, std=std, dtype=dtype)
        self.o_proj = RowParallelLinear(config.num_heads * width, hidden, mesh, std=output_std, dtype=dtype)

    def forward(self, x: torch.Tensor, part: SequencePart) -> torch.Tensor:
        """``[rows, positions, hidden]`` -> the same shape."""
        made = project((self.q_proj, self.k_proj, self.v_proj), x, fused=self.reads_children)
        q, k, v = (self._heads(features) for features in made)
        q, k = rotate(q, part.rotation), rotate(k, part.rotation)
        # Keys and values side by side, so that they are gathered at once.
        both = gather_positions(torch.cat([k, v], dim=-1), part.mesh)
        k, v = (both if part.cache is None else part.cache.extend(self, both)).chunk(2, dim=-1)
        if self.recompute and torch.is_grad_enabled():
            # What grows with the square of the length is not kept for backward but made anew.
            mixed = checkpoint(self._mix, q, k, v, part, use_reentrant=False, preserve_rng_state=False)
        else:
            mixed = self._mix(q, k, v, part)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def _mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: SequencePart) -> torch.Tensor:
        """Each run of queries with the keys up to its end."""
        pieces = zip(q.split([run.length for run in part.runs], dim=2), part.runs, strict=True)
        ends = [(queries, run.start + run.length, run) for queries, run in pieces]
        mixed = [self.function(queries, k[:, :, :end], v[:, :, :end], run) for queries, end, run in ends]
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed, dim=2)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """``[rows, length, heads * width]`` -> ``[rows, heads, length, width]``"""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


# -- the attention functions that there are ----------------------------------------------------------------------------


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, run: Run) -> torch.Tensor:
    """torch's scaled dot product attention. Packed documents cost a mask of ``rows x n x m`` bytes."""
    mask = run.mask
    if mask is None and run.start > 0:
        # The queries are the last of the keys' positions: the diagonal ends in the lower right corner.
        mask = causal_lower_right(q.shape[2], k.shape[2])
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)


def dense_mask(documents: torch.Tensor, start: int, length: int) -> torch.Tensor:
    """Who sees whom, as booleans ``[rows, 1, length, start + length]``."""
    end = start + length
    same = documents[:, start:end, None] == documents[:, None, :end]
    return (same & same.new_ones(length, end).tril(start))[:, None]


def varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, run: Run) -> torch.Tensor:
    """Each document of a packed row by itself, so a row costs the squares of its documents' lengths, not of its own.

    For processors, where a call costs little beside its work; on a GPU, ``flex`` does all documents at once.
    """
    if run.mask is None:
        return sdpa(q, k, v, run)
    rows = []
    for row, segments in enumerate(run.mask):
        queries, keys, values = (x[row : row + 1] for x in (q, k, v))
        parts = []
        for begin, first, last in segments:
            asking, seen = slice(first - run.start, last - run.start), slice(begin, last)
            local = Run(first - begin, last - first)
            parts.append(sdpa(queries[:, :, asking], keys[:, :, seen], values[:, :, seen], local))
        rows.append(torch.cat(parts, dim=2))
    return torch.cat(rows)


def document_segments(documents: torch.Tensor, start: int, length: int) -> list[list[tuple[int, int, int]]]:
    """For each row, the documents among the queries: where each begins in the row, its first query, and its end here.

    The tokens of a document are neighbours.
    """
    found = []
    for row in documents.tolist():
        begins = [at for at in range(len(row)) if at == 0 or row[at] != row[at - 1]]
        spans = zip(begins, [*begins[1:], len(row)], strict=True)
        inside = [(begin, max(begin, start), min(end, start + length)) for begin, end in spans]
        found.append([(begin, first, last) for begin, first, last in inside if first < last])
    return found


def flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, run: Run) -> torch.Tensor:
    """FlexAttention (Dong et al., arXiv:2412.05496): blocks that no query sees cost nothing. Trains on a GPU only."""
    mask = block_mask(None, run.start, run.length, device=q.device) if run.mask is None else run.mask
    return _flex(q.is_cuda)(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def block_mask(documents: torch.Tensor | None, start: int, length: int, *, device: torch.device | None = None) -> Any:
    """Who sees whom, as FlexAttention wants it."""
    from torch.nn.attention.flex_attention import create_block_mask

    def sees(row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        earlier = query + start >= key
        return earlier if documents is None else earlier & (documents[row, query + start] == documents[row, key])

    rows, device = (None, device) if documents is None else (documents.shape[0], documents.device)
    return create_block_mask(sees, rows, None, length, start + length, device=device)


@functools.cache
def _flex(compiled: bool) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention) if compiled else flex_attention


register_attention("sdpa", sdpa, dense_mask)
register_attention("varlen", varlen, document_segments)
register_attention("flex", flex, block_mask)
