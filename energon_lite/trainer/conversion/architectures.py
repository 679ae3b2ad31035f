"""Hugging Face's language model architectures that our decoder covers, each by its differences from Llama."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from energon_lite.errors import ConfigError, StateError
from energon_lite.trainer.models.config import ModelConfig

#: Settings that a kind of models has or lacks, at any size.
_TRAITS = ("qkv_bias", "qk_norm")


@dataclass(frozen=True)
class Architecture:
    """A kind of language model.

    Args:
        name: name of its class, as in ``architectures`` of ``config.json``.
        model_type: its short name.
        traits: settings of :class:`ModelConfig` that are on in all its models.
        window_keys: keys of the sliding window; empty if it has none.
        defaults: values of missing keys. (The file of a model has all its sizes; the section of a part of a larger
            model omits defaults.)
    """

    name: str
    model_type: str
    traits: tuple[str, ...] = ()
    window_keys: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def window(self, values: Mapping[str, Any], where: str) -> int | None:
        """Return the sliding window of a model in tokens, or None.

        Raises:
            ConfigError: only some of its layers have one.
        """
        window = values.get("sliding_window", self.defaults.get("sliding_window"))
        if "use_sliding_window" not in self.window_keys:
            return window if self.window_keys else None
        layers = int(values["num_hidden_layers"])
        first = values.get("max_window_layers", self.defaults["max_window_layers"])
        kinds = values.get("layer_types") or [
            "sliding_attention" if n >= first else "full_attention" for n in range(layers)
        ]
        if not values.get("use_sliding_window") or window is None or "sliding_attention" not in kinds:
            return None
        if set(kinds) != {"sliding_attention"}:
            at = "layer_types" if values.get("layer_types") else "max_window_layers"
            what = "some layers have a sliding window and others have none"
            raise ConfigError(what, file=where, at=at, fix="only all layers or none can have one")
        return window

    def window_settings(self, config: ModelConfig) -> dict[str, Any]:
        """Return the keys of the sliding window for a model of ours."""
        window = config.sliding_window
        ours = {"sliding_window": window, "use_sliding_window": window is not None}
        ours["max_window_layers"] = config.num_layers if window is None else 0
        return {key: ours[key] for key in self.window_keys if key in ours}

    def fits(self, config: ModelConfig) -> bool:
        """Return whether a model of ours can be exported as this kind."""
        same = all(getattr(config, trait) == (trait in self.traits) for trait in _TRAITS)
        # Transformers' Llama takes any width of heads, but first requires that heads divide the hidden size.
        counted = self.model_type != "llama" or config.hidden_size % config.num_heads == 0
        return same and counted and (config.sliding_window is None or bool(self.window_keys))


_COMMON = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "rms_norm_eps": 1e-6}
_LLAMA = _COMMON | {"intermediate_size": 11008, "vocab_size": 32000}
_MISTRAL = _COMMON | {"intermediate_size": 14336, "vocab_size": 32000, "num_key_value_heads": 8, "sliding_window": 4096}
_QWEN = _COMMON | {"intermediate_size": 22016, "vocab_size": 151936, "num_key_value_heads": 32}
_QWEN |= {"sliding_window": 4096, "max_window_layers": 28}
_QWEN_WINDOW = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")

#: Supported kinds; by default, a model is exported as the first one that fits.
ARCHITECTURES = (
    Architecture("LlamaForCausalLM", "llama", defaults=_LLAMA),
    Architecture("Qwen2ForCausalLM", "qwen2", ("qkv_bias",), _QWEN_WINDOW, _QWEN),
    Architecture("Qwen3ForCausalLM", "qwen3", ("qk_norm",), _QWEN_WINDOW, _QWEN | {"head_dim": 128}),
    Architecture("MistralForCausalLM", "mistral", (), ("sliding_window",), _MISTRAL),
)


def architecture_of(values: Mapping[str, Any], where: str) -> Architecture:
    """Return the kind of model that a ``config.json`` describes.

    Raises:
        ConfigError: the kind cannot be converted.
    """
    classes = [str(kind) for kind in values.get("architectures") or []]
    for kind in ARCHITECTURES:
        if values.get("model_type") == kind.model_type and all(name == kind.name for name in classes):
            return kind
    known = [kind.name for kind in ARCHITECTURES]
    named = ", ".join(classes) or values.get("model_type")
    fix = f"only {', '.join(known[:-1])} and {known[-1]} can be converted"
    raise ConfigError(f"the architecture is {named}", file=where, at="architectures", fix=fix)


def architecture_for(config: ModelConfig, former: str | None = None, *, where: str | None = None) -> Architecture:
    """Return the kind as which a model of ours is exported.

    Args:
        config: the model's shape.
        former: short name of the kind that it was converted from, which is kept if it fits.
        where: the checkpoint, for error messages.

    Raises:
        StateError: no kind fits; the message says which part can be exported.
    """
    if config.norm != "rms_norm":
        what = f"no model of Hugging Face that we know has norm={config.norm!r}"
        raise StateError(what, where=where, fix="write a file of our names with to-file")
    if config.image_size:
        raise StateError(
            f"a model with images (image_size={config.image_size}) is no language model, and has an image prefix",
            where=where,
            fix="export its language model alone with --text-only, or write a file of our names with to-file",
        )
    fitting = [kind for kind in ARCHITECTURES if kind.fits(config)]
    if not fitting:
        names = (*_TRAITS, "sliding_window", "head_dim")
        settings = ", ".join(f"{name}={value}" for name in names if (value := getattr(config, name)))
        raise StateError(
            f"no model of Hugging Face that we know has {settings} together",
            where=where,
            fix="write a file of our names with to-file",
        )
    return next((kind for kind in fitting if kind.model_type == former), fitting[0])
