"""Shapes of known models by name: ``model: {preset: 1.1B}``; any other key of the section wins over the preset's."""

from __future__ import annotations

from typing import Any

from energon_lite.errors import ConfigError
from energon_lite.trainer.models.config import ModelConfig

_LLAMA = {"vocab_size": 32000}
#: Keys of :class:`ModelConfig`. ``1.1B`` is TinyLlama's shape, ``160M`` JackFram's, the rest are Llama's and Llama 2's.
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 160},
    "160M": _LLAMA | {"hidden_size": 768, "num_layers": 12, "num_heads": 12, "ffn_size": 3072},
    "1.1B": _LLAMA | {"hidden_size": 2048, "num_layers": 22, "num_heads": 32, "num_kv_heads": 4, "ffn_size": 5632},
    "7B": _LLAMA | {"hidden_size": 4096, "num_layers": 32, "num_heads": 32, "ffn_size": 11008},
    "13B": _LLAMA | {"hidden_size": 5120, "num_layers": 40, "num_heads": 40, "ffn_size": 13824},
    "70B": _LLAMA | {"hidden_size": 8192, "num_layers": 80, "num_heads": 64, "num_kv_heads": 8, "ffn_size": 28672},
}


def model_preset(name: str, **changes: Any) -> ModelConfig:
    """The configuration of a known shape.

    Args:
        name: one of :data:`PRESETS`.
        changes: keys of :class:`ModelConfig` that are to be otherwise.

    Raises:
        ConfigError: there is no such preset.

    Example:
        >>> model_preset("1.1B", dtype="bfloat16").num_kv_heads
        4
    """
    if name not in PRESETS:
        what = f"there is no preset {name!r}"
        raise ConfigError(what, at="model.preset", choices=list(PRESETS), suggest_for=name)
    return ModelConfig(**(PRESETS[name] | changes))
