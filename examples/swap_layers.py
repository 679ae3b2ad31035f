"""Train with another library's layers: here, the norm and the attention of Hugging Face's transformers.

    python examples/swap_layers.py examples/configs/digits.yaml train.steps=20

The trainer looks them up by the names in the configuration. A script registers them first, so a configuration never
makes the trainer import code.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from energon_lite.trainer import (
    ModelConfig,
    ParallelMesh,
    Trainer,
    adopt_norm,
    load_config,
    register_attention,
    register_norm,
)
from energon_lite.trainer.models.named_layers import Run, dense_mask


def their_norm(config: ModelConfig, mesh: ParallelMesh) -> nn.Module:
    """A whole module. ``adopt_norm`` says of its parameters what every parameter here says: what it is a part of."""
    return adopt_norm(LlamaRMSNorm(config.hidden_size, config.norm_eps), config, mesh)


def their_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, run: Run) -> torch.Tensor:
    """A function of queries ``[rows, heads, n, width]`` and of keys and values ``[rows, kv_heads, m, width]``."""
    mask = run.mask
    if mask is None:
        # The queries are the last n of the m positions; they see what is not behind them.
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(run.start)[None, None]
    layer = SimpleNamespace(num_key_value_groups=q.shape[1] // k.shape[1], is_causal=True)
    mixed, _ = sdpa_attention_forward(layer, q, k, v, mask)
    return mixed.transpose(1, 2)


def main(config: str, *overrides: str) -> None:
    register_norm("transformers", their_norm)
    register_attention("transformers", their_attention, dense_mask)
    chosen = ["model.norm=transformers", "model.attention=transformers"]
    with Trainer(load_config(config, [*overrides, *chosen])) as trainer:
        trainer.run()
        print("norms are", type(trainer.model.norm).__module__)


if __name__ == "__main__":
    main(*sys.argv[1:])
