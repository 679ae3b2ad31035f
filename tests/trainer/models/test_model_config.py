"""Known shapes have as many weights as their makers say; a free width of heads, and which settings are the same."""

from __future__ import annotations

import math

import pytest
import torch

from energon_lite.errors import ConfigError
from energon_lite.trainer import PRESETS, LlamaModel, ModelConfig, build_mesh, config_from_dict, model_preset
from energon_lite.trainer.conversion.tensor_names import model_shapes
from energon_lite.trainer.models.config import model_changes
from energon_lite.trainer.training.throughput import training_flops

#: In millions, as the makers' papers and model cards state them; tied tables once.
STATED = {
    "160M": 162,
    "1.1B": 1100,
    "7B": 6738,
    "13B": 13016,
    "30B": 32529,
    "65B": 65286,
    "70B": 68977,
    "llama-3-8B": 8030,
    "llama-3-70B": 70554,
    "llama-3.1-8B": 8030,
    "llama-3.1-70B": 70554,
    "llama-3.2-1B": 1236,
    "llama-3.2-3B": 3213,
    "qwen-2.5-0.5B": 494,
    "qwen-2.5-1.5B": 1544,
    "qwen-2.5-3B": 3086,
    "qwen-2.5-7B": 7616,
    "qwen-2.5-14B": 14770,
    "qwen-2.5-32B": 32764,
    "qwen-2.5-72B": 72706,
    "qwen-3-0.6B": 596,
    "qwen-3-1.7B": 1721,
    "qwen-3-4B": 4022,
    "qwen-3-8B": 8191,
    "qwen-3-14B": 14768,
    "qwen-3-32B": 32762,
    "mistral-7B": 7248,
}


@pytest.mark.parametrize("name", STATED)
def test_presets_have_the_size_that_is_stated(name: str) -> None:
    shapes = model_shapes(model_preset(name))
    assert round(sum(math.prod(shape) for shape in shapes.values()) / 1e6) == STATED[name]


def test_each_preset_is_read_from_a_file_as_from_python() -> None:
    for name in PRESETS:
        config = config_from_dict({"data": {"path": "texts"}, "model": {"preset": name, "dtype": "bfloat16"}})
        assert config.model == model_preset(name, dtype="bfloat16")
    assert set(PRESETS) == {*STATED, "tiny"}


def test_a_preset_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="did you mean 'qwen-3-8B'"):
        model_preset("qwen3-8B")


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
