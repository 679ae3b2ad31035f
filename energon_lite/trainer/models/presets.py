"""Shapes of known models by name: ``model: {preset: 1.1B}``; other keys of the section take precedence."""

from __future__ import annotations

from typing import Any

from energon_lite.errors import ConfigError
from energon_lite.trainer.models.config import ModelConfig, RopeScaling


def _shape(hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "num_layers": layers, "num_heads": heads, "ffn_size": ffn}
    return sizes | ({} if kv_heads == heads else {"num_kv_heads": kv_heads}) | more


_LLAMA = {"vocab_size": 32000}
_LLAMA_1 = _LLAMA | {"norm_eps": 1e-6}
_LLAMA_3 = {"vocab_size": 128256, "rope_theta": 500000.0}
_SCALING = {"low_frequency": 1.0, "high_frequency": 4.0, "original_length": 8192}
_LLAMA_31 = _LLAMA_3 | {"rope_scaling": {"factor": 8.0, **_SCALING}}
_LLAMA_32 = _LLAMA_3 | {"rope_scaling": {"factor": 32.0, **_SCALING}, "tie_embeddings": True}
_QWEN = {"rope_theta": 1000000.0}
_QWEN_25 = _QWEN | {"vocab_size": 152064, "qkv_bias": True, "norm_eps": 1e-5}
_QWEN_25_SMALL = _QWEN_25 | {"vocab_size": 151936, "norm_eps": 1e-6, "tie_embeddings": True}
_QWEN_3 = _QWEN | {"vocab_size": 151936, "qk_norm": True, "norm_eps": 1e-6, "head_dim": 128}
_QWEN_3_SMALL = _QWEN_3 | {"tie_embeddings": True}
#: Keys of :class:`ModelConfig`, as plain values. ``1.1B`` is TinyLlama's shape, ``160M`` JackFram's; ``30B`` and
#: ``65B`` are Llama's, the other plain sizes Llama 2's; ``mistral-7B`` is its third version, without sliding window.
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": _shape(64, 2, 4, 2, 160),
    "160M": _shape(768, 12, 12, 12, 3072, **_LLAMA),
    "1.1B": _shape(2048, 22, 32, 4, 5632, **_LLAMA),
    "7B": _shape(4096, 32, 32, 32, 11008, **_LLAMA),
    "13B": _shape(5120, 40, 40, 40, 13824, **_LLAMA),
    "30B": _shape(6656, 60, 52, 52, 17920, **_LLAMA_1),
    "65B": _shape(8192, 80, 64, 64, 22016, **_LLAMA_1),
    "70B": _shape(8192, 80, 64, 8, 28672, **_LLAMA),
    "llama-3-8B": _shape(4096, 32, 32, 8, 14336, **_LLAMA_3),
    "llama-3-70B": _shape(8192, 80, 64, 8, 28672, **_LLAMA_3),
    "llama-3.1-8B": _shape(4096, 32, 32, 8, 14336, **_LLAMA_31),
    "llama-3.1-70B": _shape(8192, 80, 64, 8, 28672, **_LLAMA_31),
    "llama-3.2-1B": _shape(2048, 16, 32, 8, 8192, **_LLAMA_32),
    "llama-3.2-3B": _shape(3072, 28, 24, 8, 8192, **_LLAMA_32),
    "qwen-2.5-0.5B": _shape(896, 24, 14, 2, 4864, **_QWEN_25_SMALL),
    "qwen-2.5-1.5B": _shape(1536, 28, 12, 2, 8960, **_QWEN_25_SMALL),
    "qwen-2.5-3B": _shape(2048, 36, 16, 2, 11008, **_QWEN_25_SMALL),
    "qwen-2.5-7B": _shape(3584, 28, 28, 4, 18944, **_QWEN_25 | {"norm_eps": 1e-6}),
    "qwen-2.5-14B": _shape(5120, 48, 40, 8, 13824, **_QWEN_25),
    "qwen-2.5-32B": _shape(5120, 64, 40, 8, 27648, **_QWEN_25),
    "qwen-2.5-72B": _shape(8192, 80, 64, 8, 29568, **_QWEN_25),
    "qwen-3-0.6B": _shape(1024, 28, 16, 8, 3072, **_QWEN_3_SMALL),
    "qwen-3-1.7B": _shape(2048, 28, 16, 8, 6144, **_QWEN_3_SMALL),
    "qwen-3-4B": _shape(2560, 36, 32, 8, 9728, **_QWEN_3_SMALL),
    "qwen-3-8B": _shape(4096, 36, 32, 8, 12288, **_QWEN_3),
    "qwen-3-14B": _shape(5120, 40, 40, 8, 17408, **_QWEN_3),
    "qwen-3-32B": _shape(5120, 64, 64, 8, 25600, **_QWEN_3),
    "mistral-7B": _shape(4096, 32, 32, 8, 14336, vocab_size=32768, rope_theta=1000000.0),
}


def model_preset(name: str, **changes: Any) -> ModelConfig:
    """Return the configuration of a known shape.

    Args:
        name: one of :data:`PRESETS`.
        changes: keys of :class:`ModelConfig` with other values.

    Raises:
        ConfigError: there is no such preset.

    Example:
        >>> model_preset("1.1B", dtype="bfloat16").num_kv_heads
        4
    """
    if name not in PRESETS:
        what = f"there is no preset {name!r}"
        raise ConfigError(what, at="model.preset", choices=list(PRESETS), suggest_for=name)
    values = PRESETS[name] | changes
    if isinstance(scaling := values.get("rope_scaling"), dict):
        values["rope_scaling"] = RopeScaling(**scaling)
    return ModelConfig(**values)
