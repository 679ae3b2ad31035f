"""Attention with rotary positions and grouped key heads; heads are sharded over the tensor-parallel ranks.

With context parallelism, each rank has the queries of its own positions and gathers all keys and values (as in the
training of Llama 3, arXiv:2407.21783, section 3.3.2). With grouped heads these are small compared to the rest, and
gathering works with any mask, unlike passing them around a ring.
"""

from __future__ import annotations

import torch
from torch import nn

from energon_lite.trainer.models.attention_functions import choose_attention, sdpa
from energon_lite.trainer.models.config import ModelConfig
from energon_lite.trainer.models.registry import adopt_norm
from energon_lite.trainer.models.sequence import Rotation, SequencePart, gather_positions
from energon_lite.trainer.models.tensor_parallel import ColumnParallelLinear, RowParallelLinear, project
from energon_lite.trainer.parallel.mesh import ParallelMesh
from energon_lite.trainer.parallel.parameters import indivisible


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotate ``x`` ``[..., length, width]`` by its positions.

    Feature i is paired with feature i + width/2, as in Hugging Face's Llama, whose weights therefore fit unchanged.
    """
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def head_norm(config: ModelConfig, mesh: ParallelMesh) -> nn.Module:
    """Make RMSNorm of each head of queries or keys; all heads share one weight (Henry et al., arXiv:2010.04245).

    Each tensor-parallel rank norms its own heads, so each has a partial sum of the weight's gradient.
    """
    return adopt_norm(nn.RMSNorm(config.head_width, config.norm_eps), config, mesh, sum_over=("tp",))


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
        hidden = config.hidden_size
        width = config.head_width
        std = config.init_std
        dtype = config.torch_dtype
        for kind, heads in (("query", config.num_heads), ("key", config.kv_heads)):
            if heads % mesh.tp:
                raise indivisible(f"a layer of {heads} {kind} heads", heads, mesh)
        self.head_width = width
        self.function = choose_attention(config, mesh.device).function
        self.fused = config.fuse_projections
        self.reads_children = self.fused or mesh.tp > 1
        queries = config.num_heads * width
        keys = config.kv_heads * width
        bias = config.qkv_bias
        self.q_proj = ColumnParallelLinear(hidden, queries, mesh, bias=bias, std=std, dtype=dtype)
        self.k_proj = ColumnParallelLinear(hidden, keys, mesh, bias=bias, std=std, dtype=dtype)
        self.v_proj = ColumnParallelLinear(hidden, keys, mesh, bias=bias, std=std, dtype=dtype)
        self.o_proj = RowParallelLinear(queries, hidden, mesh, std=output_std, dtype=dtype)
        self.q_norm = head_norm(config, mesh) if config.qk_norm else None
        self.k_norm = head_norm(config, mesh) if config.qk_norm else None

    def forward(self, x: torch.Tensor, part: SequencePart) -> torch.Tensor:
        """Attend within the rows: ``[rows, positions, hidden]`` -> the same shape."""
        made = project((self.q_proj, self.k_proj, self.v_proj), x, fused=self.fused)
        q, k, v = (self._heads(features) for features in made)
        q, k = q if self.q_norm is None else self.q_norm(q), k if self.k_norm is None else self.k_norm(k)
        q, k = rotate(q, part.rotation), rotate(k, part.rotation)
        if part.mesh.cp > 1 or part.cache is not None:
            # Keys and values are concatenated, so that one collective gathers them.
            both = gather_positions(torch.cat([k, v], dim=-1), part.mesh)
            k, v = (both if part.cache is None else part.cache.extend(self, both)).chunk(2, dim=-1)
        return self.o_proj(self._mix(q, k, v, part).transpose(1, 2).flatten(2))

    def _mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: SequencePart) -> torch.Tensor:
        """Attend from each run of queries to the keys up to its end."""
        pieces = zip(q.split([run.length for run in part.runs], dim=2), part.runs, strict=True)
        ends = [(queries, run.start + run.length, run) for queries, run in pieces]
        mixed = [
            (sdpa if run.windowed else self.function)(queries, k[:, :, :end], v[:, :, :end], run)
            for queries, end, run in ends
        ]
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed, dim=2)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """Split heads: ``[rows, length, heads * width]`` -> ``[rows, heads, length, width]``."""
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)
