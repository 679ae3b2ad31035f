"""The model once more, for one process, written plainly: what every layout must agree with, by torch's optimizer.

Nothing here is shared with the trainer but the names of the parameters and of the settings, and the schedule.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import torch

from energon_lite.trainer.models.config import ModelConfig
from energon_lite.trainer.models.interface import MultimodalBatch
from energon_lite.trainer.training.config import OptimizerConfig
from tests.trainer.parallel.plain_loop import PlainRun, plain_steps

Weights = dict[str, torch.Tensor]


class Rows(MultimodalBatch):
    """A micro-batch, of its fields in their order, without the names of its samples."""

    def __init__(self, *values: Any, **fields: Any):
        names = ("tokens", "labels", "loss_mask", "image", "image_rows", "image_starts", "documents")
        super().__init__(**{"__key__": [], "__restore_key__": ()} | fields | dict(zip(names, values, strict=False)))


def loss_sum(weights: Weights, config: ModelConfig, rows: Rows) -> torch.Tensor:
    """Sum of the losses of the tokens that count, row by row: no padding, no mask, no batch."""
    total = torch.stack([weight.sum() for weight in weights.values()]).sum() * 0.0
    for row in range(len(rows.tokens)):
        x = weights["embed_tokens.weight"][rows.tokens[row]]
        for image, owner, start in zip(rows.image, rows.image_rows.tolist(), rows.image_starts.tolist(), strict=True):
            if owner == row:
                inside = image_tokens(weights, image, config.patch_size)
                x = torch.cat([x[:start], inside, x[start + len(inside) :]])
        documents = torch.zeros(len(x), dtype=torch.int64) if rows.documents is None else rows.documents[row]
        seen = (documents[:, None] == documents).tril()
        if config.sliding_window is not None:
            seen &= torch.ones_like(seen).triu(1 - config.sliding_window)
        for layer in range(config.num_layers):
            here = f"layers.{layer}."
            x = _block(x, {k.removeprefix(here): w for k, w in weights.items() if k.startswith(here)}, config, seen)
        x = _norm(x, weights["norm.weight"], config.norm_eps)
        head = weights["embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"][: config.vocab_size]
        log_probabilities = torch.log_softmax(x @ head.T, dim=-1)
        picked = log_probabilities[torch.arange(len(x)), rows.labels[row]]
        total = total - (picked * rows.loss_mask[row]).sum()
    return total


def image_tokens(weights: Weights, image: torch.Tensor, patch: int) -> torch.Tensor:
    """The vectors that stand for an image among those of tokens, one for each patch."""
    patches = _patches(image.to(weights["vision.weight"].dtype) - 0.5, patch)
    return patches @ weights["vision.weight"].T + weights["vision.bias"] + weights["vision.position"]


def _patches(image: torch.Tensor, size: int) -> torch.Tensor:
    found = []
    for top in range(0, image.shape[1], size):
        for left in range(0, image.shape[2], size):
            found.append(image[:, top : top + size, left : left + size].reshape(-1))
    return torch.stack(found)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps) * weight


def _block(x: torch.Tensor, w: Weights, config: ModelConfig, seen: torch.Tensor) -> torch.Tensor:
    eps, heads = config.norm_eps, config.num_kv_heads or config.num_heads
    y = _norm(x, w["input_layernorm.weight"], eps)
    q, k, v = (y @ w[f"self_attn.{name}_proj.weight"].T + w.get(f"self_attn.{name}_proj.bias", 0.0) for name in "qkv")
    q = q.unflatten(1, (config.num_heads, -1)).transpose(0, 1)
    k, v = (x.unflatten(1, (heads, -1)).transpose(0, 1) for x in (k, v))
    if "self_attn.q_norm.weight" in w:
        q, k = _norm(q, w["self_attn.q_norm.weight"], eps), _norm(k, w["self_attn.k_norm.weight"], eps)
    q = _turn(q, config)
    group = config.num_heads // heads
    k, v = _turn(k, config).repeat_interleave(group, dim=0), v.repeat_interleave(group, dim=0)
    scores = (q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])).masked_fill(~seen, float("-inf"))
    x = x + (torch.softmax(scores, dim=-1) @ v).transpose(0, 1).flatten(1) @ w["self_attn.o_proj.weight"].T
    y = _norm(x, w["post_attention_layernorm.weight"], eps)
    gate, up = y @ w["mlp.gate_proj.weight"].T, y @ w["mlp.up_proj.weight"].T
    return x + (gate * torch.sigmoid(gate) * up) @ w["mlp.down_proj.weight"].T


def _turn(x: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Rotate each pair (i, i + half) as one complex number; ``[heads, length, width]``."""
    half = x.shape[-1] // 2
    positions = torch.arange(x.shape[1], dtype=torch.float64)[:, None]
    frequencies = [_frequency(config.rope_theta ** (-i / half), config) for i in range(half)]
    angles = positions * torch.tensor(frequencies, dtype=torch.float64)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin], dim=-1)


def _frequency(frequency: float, config: ModelConfig) -> float:
    """Llama 3.1's rule, by wave lengths."""
    if config.rope_scaling is None:
        return frequency
    factor, low, high, original, *_ = dataclasses.astuple(config.rope_scaling)
    wave = 2 * math.pi / frequency
    if wave > original / low:
        return frequency / factor
    if wave < original / high:
        return frequency
    smooth = (original / wave - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency


def tokens_of(step: list[Rows]) -> float:
    """The number of those that count, at least one."""
    return max(1.0, sum(float(rows.loss_mask.sum()) for rows in step))


def train(
    weights: Weights,
    config: ModelConfig,
    steps: list[list[Rows]],
    settings: OptimizerConfig,
    frozen: tuple[str, ...] = (),
) -> PlainRun:
    """AdamW or SGD on the mean loss of all tokens of each step's micro-batches together."""
    named = {name: w.clone().requires_grad_(name not in frozen) for name, w in weights.items()}

    def loss(rows: Rows, tokens: float) -> torch.Tensor:
        return loss_sum(named, config, rows) / tokens

    made = [[partial(loss, rows, tokens_of(step)) for rows in step] for step in steps]
    losses, norms = plain_steps(named, made, settings)
    return PlainRun(losses, norms, {name: w.detach() for name, w in named.items()})
