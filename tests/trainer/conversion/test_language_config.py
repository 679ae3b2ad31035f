"""Their configuration and ours: what is read, what is refused by name, that both ways agree, and scaled rotations."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from energon_lite.errors import ConfigError, StateError
from energon_lite.trainer import LlamaModel, ModelConfig, RopeScaling, build_mesh, model_preset
from energon_lite.trainer.conversion.export import exported_part
from energon_lite.trainer.conversion.huggingface_folder import huggingface_name
from energon_lite.trainer.conversion.language_config import ARCHITECTURES, huggingface_config, model_config
from energon_lite.trainer.models.config import model_changes
from energon_lite.trainer.models.sequence import scaled_frequencies
from tests.testing import examples
from tests.trainer.conversion.small_models import configs, in_double, scalings

SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
SIZES += ("vocab_size", "max_position_embeddings")


def published(name: str, *sizes: int, **more: Any) -> dict[str, Any]:
    """What a maker's file says of a model of this class: the same as all others, its sizes, and more."""
    common = {"hidden_act": "silu", "initializer_range": 0.02, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
    common |= {"use_cache": True, "bos_token_id": 1, "eos_token_id": 2, "transformers_version": "4.40.1"}
    common |= {"architectures": [name], "model_type": name.removesuffix("ForCausalLM").lower()}
    return common | dict(zip(SIZES, sizes, strict=True)) | more


SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
LLAMA: dict[str, Any] = {"rms_norm_eps": 1e-05, "pretraining_tp": 1, "_name_or_path": "meta-llama/Llama-2-70b-hf"}
LLAMA_2 = published("LlamaForCausalLM", 8192, 28672, 80, 64, 8, 32000, 4096, rope_scaling=None, **LLAMA)
LLAMA |= {"attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0, "rope_theta": 500000.0}
LLAMA_3 = published("LlamaForCausalLM", 4096, 14336, 32, 32, 8, 128256, 131072, rope_scaling=SCALING, **LLAMA)
QWEN: dict[str, Any] = {"rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "use_sliding_window": False, "use_mrope": False}
QWEN_25 = published(
    *("Qwen2ForCausalLM", 3584, 18944, 28, 28, 4, 152064, 131072), sliding_window=131072, max_window_layers=28, **QWEN
)
QWEN |= {"sliding_window": None, "max_window_layers": 64, "rope_scaling": None, "attention_bias": False}
QWEN_3 = published("Qwen3ForCausalLM", 5120, 25600, 64, 64, 8, 151936, 40960, head_dim=128, **QWEN)
WINDOW: dict[str, Any] = {"rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096}
MISTRAL = published("MistralForCausalLM", 4096, 14336, 32, 32, 8, 32000, 32768, **WINDOW)
MISTRAL_3 = MISTRAL | {"rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 32768}
#: A file of each kind, as its maker published it, and the preset of that shape.
PUBLISHED = {
    "70B": LLAMA_2,
    "llama-3.1-8B": LLAMA_3,
    "qwen-2.5-7B": QWEN_25,
    "qwen-3-32B": QWEN_3,
    "mistral-7B": MISTRAL_3,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_the_presets(name: str) -> None:
    found, preset = model_config(PUBLISHED[name], where=""), model_preset(name, dtype="bfloat16")
    assert found == preset
    # Exported without the former file, transformers makes the same shapes and angles of it.
    theirs = AutoConfig.for_model(**huggingface_config(preset, torch.bfloat16))
    former = AutoConfig.for_model(**PUBLISHED[name])
    # A Mistral without sliding window computes what a Llama does.
    assert type(theirs) is type(former) or name == "mistral-7B"
    for key in (*SIZES[:-1], "rms_norm_eps", "tie_word_embeddings"):
        assert getattr(theirs, key) == getattr(former, key), key
    assert theirs.rope_parameters == former.rope_parameters
    # And what transformers 5 writes is the same model.
    written = json.loads(theirs.to_json_string()) | {"dtype": "bfloat16"}
    assert model_config(written, where="") == found


def test_defaults_are_those_of_transformers() -> None:
    for kind in ARCHITECTURES:
        theirs = AutoConfig.for_model(kind.model_type)
        for key, value in kind.defaults.items():
            # Theirs is None where it is not used.
            assert getattr(theirs, key) in (value, None), (kind, key)
        part = model_config({"model_type": kind.model_type}, where="", whole=False)
        assert part.hidden_size == theirs.hidden_size and part.kv_heads == theirs.num_key_value_heads
        assert part.head_width == getattr(theirs, "head_dim", part.head_width)
        assert part.sliding_window == getattr(theirs, "sliding_window", None)


def test_sliding_windows() -> None:
    slides = QWEN_25 | {"use_sliding_window": True, "sliding_window": 300}
    for values, window in [
        (MISTRAL, 4096),
        (MISTRAL | {"sliding_window": None}, None),
        ({key: value for key, value in MISTRAL.items() if key != "sliding_window"}, 4096),
        (slides, None),  # 28 layers, and those from the 28th on would have one
        (slides | {"max_window_layers": 0}, 300),
        (slides | {"layer_types": ["sliding_attention"] * 28}, 300),
        (slides | {"layer_types": ["full_attention"] * 28}, None),
    ]:
        assert model_config(values, where="").sliding_window == window
    mixed = ["sliding_attention", "full_attention"] * 14
    for at, value in {"max_window_layers": 3, "layer_types": mixed}.items():
        with pytest.raises(ConfigError, match="some layers have a sliding window") as caught:
            model_config(slides | {at: value}, where="config.json")
        assert caught.value.at == at


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"model_type": "qwen3_moe", "architectures": []}, "qwen3_moe"),
        ({"model_type": "qwen2"}, "LlamaForCausalLM"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"head_dim": 63}, "63"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"sliding_window": 4096}, "sliding_window is 4096"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_scaling": SCALING | {"attention_factor": 2.0}}, "attention_factor"),
        ({"rope_scaling": {"rope_type": "linear"}}, "missing or unknown: factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": False}}, "missing or unknown: truncate"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7}}, "missing or unknown: mscale"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"num_key_value_heads": 7}, "cannot share 7 key heads"),
    ],
)
def test_what_ours_cannot_do_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        model_config(LLAMA_3 | change, where="config.json")


def test_keys_that_are_off_or_ignored_pass_and_a_missing_one_is_named() -> None:
    plain = model_config(LLAMA_3, where="")
    assert model_config(LLAMA_3 | {"sliding_window": None, "head_dim": 128, "new_switch": False}, where="") == plain
    assert model_config(LLAMA_3 | {"new_scale": 1.0}, where="") == plain
    for key, value in (("new_thing", 3), ("new_scale", 2.0), ("sliding_window", 7)):
        assert model_config(LLAMA_3 | {key: value}, where="", ignore=[key]) == plain
        with pytest.raises(ConfigError, match=f"--ignore {key}"):
            model_config(LLAMA_3 | {key: value}, where="")
    assert model_config(LLAMA_3 | {"torch_dtype": "float16"}, where="", dtype="float32").dtype == "float32"
    with pytest.raises(ConfigError, match="'vocab_size' is missing"):
        model_config({key: value for key, value in LLAMA_2.items() if key != "vocab_size"}, where="config.json")


@given(configs, configs)
def test_there_and_back(config: ModelConfig, other: ModelConfig) -> None:
    told = huggingface_config(config, config.torch_dtype)
    back = model_config(told, where="")
    assert (back.kv_heads, back.head_width) == (config.kv_heads, config.head_width)
    assert (back.qkv_bias, back.qk_norm) == (config.qkv_bias, config.qk_norm)
    assert huggingface_config(back, config.torch_dtype) == told
    # What describes the model is kept as it is, with keys of its own; what describes another one is corrected.
    base = told | {"use_cache": False, "mine": 1}
    computed = dataclasses.replace(config, loss_chunk=7, recompute="full", attention="varlen")
    for same in (config, computed):
        assert huggingface_config(same, config.torch_dtype, base) == base
    corrected = huggingface_config(other, other.torch_dtype, base)
    assert corrected["mine"] == 1
    assert not model_changes(model_config(corrected, where="", ignore=["mine"]), other, ["patch_size"])
    assert corrected["rope_theta"] == other.rope_theta and corrected["vocab_size"] == other.vocab_size


def test_yarn_as_qwen_writes_it() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    read = model_config(QWEN_25 | {"rope_scaling": scaling}, where="").rope_scaling
    assert read == RopeScaling(4.0, 1.0, 32.0, 32768, "yarn", 0.1 * math.log(4) + 1)
    # Without a former length, it is the longest of the file.
    del scaling["original_max_position_embeddings"]
    read = model_config(QWEN_25 | {"rope_scaling": scaling | {"truncate": True}}, where="").rope_scaling
    assert read is not None and read.original_length == QWEN_25["max_position_embeddings"]


def test_a_model_that_they_have_not() -> None:
    with pytest.raises(StateError, match="image_size=4"):
        huggingface_config(ModelConfig(image_size=4), torch.float32)
    with pytest.raises(StateError, match="qkv_bias=True, qk_norm=True together"):
        huggingface_config(ModelConfig(qkv_bias=True, qk_norm=True), torch.float32)
    with pytest.raises(StateError, match="norm='mine'"):
        exported_part(ModelConfig(norm="mine"))


def test_a_model_is_the_kind_that_it_was_if_it_can_be() -> None:
    def kind(former: dict[str, Any] | None = None, **settings: Any) -> Any:
        return huggingface_config(ModelConfig(**settings), torch.float32, former)["architectures"][0]

    assert kind() == "LlamaForCausalLM"
    assert kind(MISTRAL_3) == "MistralForCausalLM"
    assert kind(MISTRAL_3, qkv_bias=True) == "Qwen2ForCausalLM"
    assert kind(QWEN_25, qk_norm=True) == "Qwen3ForCausalLM"
    assert kind(QWEN_25) == kind({"model_type": "gpt2"}) == "LlamaForCausalLM"
    assert kind(sliding_window=9) == "MistralForCausalLM"
    assert kind(sliding_window=9, qk_norm=True) == "Qwen3ForCausalLM"
    # Transformers' Llama counts heads into the hidden size, whatever their width.
    assert kind(hidden_size=100, num_heads=8, head_dim=32) == "MistralForCausalLM"
    made = huggingface_config(ModelConfig(), torch.float32, QWEN_25)
    assert not [key for key in made if "window" in key]
    for scaling, longest in ((None, 2048), (RopeScaling(factor=4.0, original_length=100), 400)):
        told = huggingface_config(ModelConfig(rope_scaling=scaling), torch.float32)
        assert told["max_position_embeddings"] == longest


# -- scaled rotary frequencies: those of transformers, in float64 ------------------------------------------------------


@settings(max_examples=examples(20), deadline=None)
@given(configs, scalings)
def test_logits_of_scaled_rotations_are_theirs(config: ModelConfig, scaling: RopeScaling) -> None:
    """The logits, in float64."""
    config = dataclasses.replace(config, rope_scaling=scaling, dtype="float64", vocab_size=50, init_std=0.2)
    told = AutoConfig.for_model(**huggingface_config(config, torch.float64))
    ours = LlamaModel(config, build_mesh(), seed=3)
    tokens = torch.arange(40)[None]
    with torch.no_grad(), in_double():
        theirs = AutoModelForCausalLM.from_config(told, attn_implementation="eager").double()
        for name, p in ours.named_parameters():
            parameter = theirs.get_parameter(huggingface_name(name))
            parameter.copy_(p[: len(parameter)])
        wanted = theirs(tokens).logits
    torch.testing.assert_close(ours.all_logits(tokens), wanted, rtol=1e-6, atol=1e-6)


@settings(max_examples=examples(450))
@given(scalings, st.sampled_from([8, 12, 64, 96, 128]), st.sampled_from([1e3, 1e4, 5e5, 1e6]))
def test_frequencies_are_theirs(scaling: RopeScaling, width: int, theta: float) -> None:
    """For widths of heads, bases, former lengths, and bounds of the waves that are kept."""
    config = ModelConfig(head_dim=width, rope_theta=theta, rope_scaling=scaling)
    with in_double():
        told = AutoConfig.for_model(**huggingface_config(config, torch.float32))
        wanted, size = ROPE_INIT_FUNCTIONS[scaling.kind](told, "cpu")
    plain = theta ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    torch.testing.assert_close(scaled_frequencies(plain, scaling, theta), wanted, rtol=1e-12, atol=0)
    assert scaling.attention_factor == pytest.approx(size, rel=1e-12)
