"""A Llama decoder (Touvron et al., arXiv:2302.13971) with an optional image prefix, cut over tensor-parallel ranks.

Modules and parameters have the names of Hugging Face's Llama (without its leading ``model.``).
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from energon_lite.errors import UsageError
from energon_lite.training.attention import Attention, Rotation, rotation_table
from energon_lite.training.collectives import enter_parallel, gather_parallel
from energon_lite.training.config import ModelConfig
from energon_lite.training.cross_entropy import vocab_parallel_cross_entropy
from energon_lite.training.mesh import ParallelMesh
from energon_lite.training.parameters import ParameterLayout, initialize_parameters, new_parameter
from energon_lite.training.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from energon_lite.training.vision import PatchEmbedding, put_prefix, take_text


class ModelInput(Protocol):
    """What a loss reads of a batch; :class:`MultimodalBatch` has it.

    ``tokens`` and ``labels``: int64 ``[rows, length]``. ``loss_mask``: float ``[rows, length]``, how much each label
    counts. ``image``: ``[images, 3, height, width]`` in [0, 1]. ``image_rows``: int64 ``[images]``, their rows.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    image: torch.Tensor
    image_rows: torch.Tensor

    def to(self, device: torch.device) -> ModelInput:
        """The same on another device."""


class RMSNorm(nn.Module):
    """``x / rms(x) * weight`` (Zhang and Sennrich, arXiv:1910.07467). Every rank has the whole weight."""

    def __init__(self, config: ModelConfig, mesh: ParallelMesh):
        super().__init__()
        self.eps = config.norm_eps
        self.weight = new_parameter(ParameterLayout((config.hidden_size,), mean=1.0), mesh, config.torch_dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class FeedForward(nn.Module):
    """``down(silu(gate(x)) * up(x))`` (SwiGLU; Shazeer, arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig, mesh: ParallelMesh, *, output_std: float):
        super().__init__()
        hidden, inner, std, dtype = config.hidden_size, config.ffn_size, config.init_std, config.torch_dtype
        self.group = mesh.group("tp")
        self.gate_proj = ColumnParallelLinear(hidden, inner, mesh, input_entered=True, std=std, dtype=dtype)
        self.up_proj = ColumnParallelLinear(hidden, inner, mesh, input_entered=True, std=std, dtype=dtype)
        self.down_proj = RowParallelLinear(inner, hidden, mesh, std=output_std, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = enter_parallel(x, self.group)
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """One layer: attention and feed-forward, each on a normed input and added to the residual stream."""

    def __init__(self, config: ModelConfig, mesh: ParallelMesh):
        super().__init__()
        # Each block adds twice to the residual stream; smaller output weights keep its size (GPT-2's rule).
        output_std = config.init_std / (2 * config.num_layers) ** 0.5
        self.input_layernorm = RMSNorm(config, mesh)
        self.self_attn = Attention(config, mesh, output_std=output_std)
        self.post_attention_layernorm = RMSNorm(config, mesh)
        self.mlp = FeedForward(config, mesh, output_std=output_std)

    def forward(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotation)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class LlamaModel(nn.Module):
    """The decoder, this rank's part of it. Its initial weights depend on (config, seed) only, not on the layout.

    Args:
        config: its shape.
        mesh: the ranks it is cut over.
        seed: of the initial weights.

    Raises:
        TopologyError: a dimension cannot be cut into ``mesh.tp`` parts.

    Example:
        >>> model = LlamaModel(ModelConfig(hidden_size=64, num_layers=2), build_mesh())
        >>> model.token_losses(batch).shape == batch.tokens.shape
        True
    """

    def __init__(self, config: ModelConfig, mesh: ParallelMesh, *, seed: int = 0):
        super().__init__()
        if mesh.pp > 1 or mesh.cp > 1:
            raise UsageError("pipeline and context parallelism are not supported yet", fix="use pp=1 and cp=1")
        self.config, self.mesh = config, mesh
        rows, hidden, std, dtype = config.padded_vocab_size, config.hidden_size, config.init_std, config.torch_dtype
        self.embed_tokens = VocabParallelEmbedding(rows, hidden, mesh, std=std, dtype=dtype)
        self.vision = PatchEmbedding(config, mesh) if config.image_size else None
        # Layers go by their number in the whole model, so a pipeline stage that holds some of them keeps the names.
        self.layers = nn.ModuleDict({str(i): Block(config, mesh) for i in range(config.num_layers)})
        self.norm = RMSNorm(config, mesh)
        self.lm_head = ColumnParallelLinear(hidden, rows, mesh, input_entered=True, std=std, dtype=dtype)
        if config.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        initialize_parameters(self, seed=seed, mesh=mesh)

    def forward(self, tokens: torch.Tensor, image: torch.Tensor, image_rows: torch.Tensor) -> torch.Tensor:
        """Logits of the token that follows each of ``tokens``.

        Args:
            tokens: int64 ``[rows, length]``, padded at the end with anything.
            image: ``[images, 3, height, width]`` in [0, 1]; ``images`` may be 0.
            image_rows: int64 ``[images]``, the row of each image, each row at most once.

        Returns:
            This rank's columns: ``[rows, length, padded vocabulary / tp]``.

        Raises:
            UsageError: there are images and the model takes none.
        """
        x = self.embed_tokens(tokens)
        has_image: torch.Tensor | None = None
        if image.shape[0]:
            if self.vision is None:
                raise UsageError("the batch has images, but the model takes none", fix="set model.image_size")
            x, has_image = put_prefix(x, self.vision(image), image_rows)
        rotation = rotation_table(
            x.shape[1], self.config.head_dim, self.config.rope_theta, device=x.device, dtype=x.dtype
        )
        for layer in self.layers.values():
            x = layer(x, rotation)
        if has_image is not None:
            x = take_text(x, has_image, self.config.prefix_length)
        x = enter_parallel(self.norm(x), self.mesh.group("tp"))
        logits: torch.Tensor = self.lm_head(x)
        return logits

    def token_losses(self, batch: ModelInput) -> torch.Tensor:
        """Cross-entropy of each label, unmasked: ``[rows, length]``, equal on all tensor-parallel ranks."""
        logits = self(batch.tokens, batch.image, batch.image_rows)
        return vocab_parallel_cross_entropy(logits, batch.labels, self.mesh, vocab_size=self.config.vocab_size)

    def all_logits(self, tokens: torch.Tensor, image: torch.Tensor, image_rows: torch.Tensor) -> torch.Tensor:
        """Logits over the real vocabulary, whole on every rank, for generation: ``[rows, length, vocab_size]``."""
        logits = gather_parallel(self(tokens, image, image_rows), self.mesh.group("tp"))
        return logits[..., : self.config.vocab_size]
