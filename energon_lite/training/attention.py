"""Attention with rotary positions and grouped key heads, heads cut over the tensor-parallel ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from energon_lite.training.collectives import enter_parallel
from energon_lite.training.config import ModelConfig
from energon_lite.training.mesh import ParallelMesh
from energon_lite.training.parameters import indivisible
from energon_lite.training.tensor_parallel import ColumnParallelLinear, RowParallelLinear

#: Cosines and sines of the rotation angles, each ``[length, head_dim]``.
Rotation = tuple[torch.Tensor, torch.Tensor]


def rotation_table(length: int, head_dim: int, theta: float, *, device: torch.device, dtype: torch.dtype) -> Rotation:
    """Angles of rotary position embedding (Su et al., RoFormer, arXiv:2104.09864) for positions ``0..length-1``."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim
    angles = torch.arange(length, dtype=torch.float64, device=device)[:, None] * theta**-exponents
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


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
        hidden, width, dtype = config.hidden_size, config.head_dim, config.torch_dtype
        for kind, heads in (("query", config.num_heads), ("key", config.kv_heads)):
            if heads % mesh.tp:
                raise indivisible(f"a layer of {heads} {kind} heads", heads, mesh)
        self.group = mesh.group("tp")
        self.head_dim = width

        def column(features: int) -> ColumnParallelLinear:
            return ColumnParallelLinear(hidden, features, mesh, input_entered=True, std=config.init_std, dtype=dtype)

        self.q_proj = column(config.num_heads * width)
        self.k_proj = column(config.kv_heads * width)
        self.v_proj = column(config.kv_heads * width)
        self.o_proj = RowParallelLinear(config.num_heads * width, hidden, mesh, std=output_std, dtype=dtype)

    def forward(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """``[rows, length, hidden]`` -> the same shape, equal on all tensor-parallel ranks."""
        x = enter_parallel(x, self.group)
        q, k, v = (self._heads(proj(x)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, rotation), rotate(k, rotation)
        # No mask but the causal one: padding is always at the end of a row, where no token of the row can see it.
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        out: torch.Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """``[rows, length, heads * width]`` -> ``[rows, heads, length, width]``"""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
