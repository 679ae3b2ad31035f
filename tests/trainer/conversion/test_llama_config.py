"""Their configuration and ours: what is read, what is refused by name, and that both ways agree."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.errors import ConfigError, StateError
from energon_lite.trainer.conversion.llama_config import huggingface_config, model_config
from energon_lite.trainer.models.config import ModelConfig, RopeScaling

LLAMA_2: dict[str, Any] = {
    "_name_or_path": "meta-llama/Llama-2-70b-hf",
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 8192,
    "initializer_range": 0.02,
    "intermediate_size": 28672,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.32.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
LLAMA_3 = LLAMA_2 | {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "intermediate_size": 14336,
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "max_position_embeddings": 131072,
    "rope_scaling": SCALING,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}


def test_llama_2_and_3() -> None:
    two = model_config(LLAMA_2, where="config.json")
    assert two == ModelConfig(
        hidden_size=8192,
        num_layers=80,
        num_heads=64,
        num_kv_heads=8,
        ffn_size=28672,
        vocab_size=32000,
        norm_eps=1e-5,
        dtype="bfloat16",
    )
    three = model_config(LLAMA_3, where="config.json")
    assert three.rope_theta == 500000.0 and three.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 8192)
    # transformers 5 has other names for the same.
    renamed = {key: value for key, value in LLAMA_3.items() if key not in ("rope_scaling", "rope_theta", "torch_dtype")}
    renamed |= {"rope_parameters": SCALING | {"rope_theta": 500000.0}, "dtype": "bfloat16"}
    assert model_config(renamed, where="config.json") == three


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "MistralForCausalLM"),
        ({"model_type": "qwen2", "architectures": []}, "qwen2"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"head_dim": 64}, "head_dim"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"sliding_window": 4096}, "sliding_window is 4096"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear'"),
        ({"rope_scaling": SCALING | {"attention_factor": 2.0}}, "attention_factor"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"num_key_value_heads": 7}, "cannot share 7 key heads"),
    ],
)
def test_what_ours_cannot_do_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        model_config(LLAMA_3 | change, where="config.json")


def test_keys_that_are_off_or_ignored_pass() -> None:
    plain = model_config(LLAMA_3, where="")
    assert model_config(LLAMA_3 | {"sliding_window": None, "head_dim": 128, "new_switch": False}, where="") == plain
    assert model_config(LLAMA_3 | {"new_thing": 3}, where="", ignore=["new_thing"]) == plain
    with pytest.raises(ConfigError, match="--ignore new_thing"):
        model_config(LLAMA_3 | {"new_thing": 3}, where="")
    assert model_config(LLAMA_3 | {"torch_dtype": "float16"}, where="", dtype="float32").dtype == "float32"


def test_a_missing_key_is_named() -> None:
    with pytest.raises(ConfigError, match="'vocab_size' is missing"):
        model_config({key: value for key, value in LLAMA_2.items() if key != "vocab_size"}, where="config.json")


scalings = st.builds(
    RopeScaling,
    factor=st.floats(1, 32),
    low_frequency=st.floats(0.5, 1),
    high_frequency=st.floats(2, 8),
    original_length=st.integers(1, 9000),
)
configs = st.builds(
    lambda heads, groups, **more: ModelConfig(hidden_size=heads * 8, num_heads=heads, num_kv_heads=groups, **more),
    heads=st.sampled_from([4, 8]),
    groups=st.sampled_from([1, 2, 4, None]),
    num_layers=st.integers(1, 4),
    ffn_size=st.integers(1, 100),
    vocab_size=st.integers(1, 1000),
    rope_theta=st.floats(1000, 1e6),
    rope_scaling=st.none() | scalings,
    tie_embeddings=st.booleans(),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)


@given(configs, configs)
def test_there_and_back(config: ModelConfig, other: ModelConfig) -> None:
    told = huggingface_config(config, config.torch_dtype)
    back = model_config(told, where="")
    assert back.kv_heads == config.kv_heads
    assert huggingface_config(back, config.torch_dtype) == told
    # What describes the model is kept as it is, with keys of its own; what describes another one is corrected.
    base = told | {"use_cache": False, "mine": 1}
    computed = dataclasses.replace(config, fuse_projections=True, loss_chunk=7, recompute="full", attention="varlen")
    for same in (config, computed):
        assert huggingface_config(same, config.torch_dtype, base) == base
    corrected = huggingface_config(other, other.torch_dtype, base)
    assert corrected["mine"] == 1
    assert model_config(corrected, where="", ignore=["mine"]).kv_heads == other.kv_heads
    assert corrected["rope_theta"] == other.rope_theta and corrected["vocab_size"] == other.vocab_size


def test_a_model_that_llama_has_not() -> None:
    with pytest.raises(StateError, match="image_size=4"):
        huggingface_config(ModelConfig(image_size=4), torch.float32)
