"""Shapes that cannot be are refused; a free width of heads, and a sliding window."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from energon_lite.errors import ConfigError
from energon_lite.trainer.models.config import ModelConfig, model_changes
from energon_lite.trainer.models.llama import LlamaModel
from energon_lite.trainer.parallel.mesh import build_mesh
from energon_lite.trainer.training.throughput import training_flops


@pytest.mark.parametrize(
    ("settings", "at", "words"),
    [
        ({"head_dim": 7}, "model.head_dim", "a width of 7"),
        ({"head_dim": 0}, "model.head_dim", "a width of 0"),
        ({"hidden_size": 10, "num_heads": 4}, "model.hidden_size", "or give head_dim"),
        ({"sliding_window": 0}, "model.sliding_window", "below 1"),
    ],
)
def test_shapes_that_cannot_be(settings: dict[str, Any], at: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        ModelConfig(**settings)
    assert caught.value.at == at


def test_a_free_width_of_heads() -> None:
    config = ModelConfig(hidden_size=10, num_heads=4, num_kv_heads=2, head_dim=6, qkv_bias=True, qk_norm=True)
    attention = LlamaModel(config, build_mesh()).layers["0"].self_attn
    shapes = {name: tuple(p.shape) for name, p in attention.named_parameters()}
    assert shapes["q_proj.weight"] == (24, 10) and shapes["v_proj.bias"] == (12,)
    assert shapes["o_proj.weight"] == (10, 24) and shapes["k_norm.weight"] == (6,)
    assert torch.equal(attention.q_norm.weight, torch.ones(6)) and not attention.q_proj.bias.any()
    # Useful work follows the heads, not the hidden size: four times as wide heads are four times the scores.
    wide = ModelConfig(hidden_size=10, num_heads=4, num_kv_heads=2, head_dim=24)
    narrow, more = (training_flops(one, 1, 64 / 2) - training_flops(one, 1, 32 / 2) for one in (config, wide))
    assert more == 4 * narrow == 6.0 * 3 * 4 * 24 * 32


def test_a_width_that_is_said_is_the_one_that_follows() -> None:
    plain = ModelConfig(hidden_size=96, num_heads=4)
    assert not model_changes(plain, ModelConfig(hidden_size=96, num_heads=4, head_dim=24))
    assert [name for name, _, _ in model_changes(plain, ModelConfig(head_dim=48))] == ["head_dim"]
    for trait in ({"qkv_bias": True}, {"qk_norm": True}, {"sliding_window": 8}):
        assert [name for name, _, _ in model_changes(plain, ModelConfig(**trait))] == list(trait)
