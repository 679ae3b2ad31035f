"""Conversion between ``config.json`` of Hugging Face's language models and :class:`ModelConfig`.

Features that our model lacks are errors that name the key. So are unknown keys, unless they are off: an error is better
than a model that silently differs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from energon_lite.errors import ConfigError, StateError
from energon_lite.trainer.models.config import DTYPES, ModelConfig, RopeScaling, model_changes

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
            f"a model with images (image_size={config.image_size}) is not a language model, but has an image prefix",
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


#: Keys about the use or training of a model, not about its computation.
_HARMLESS = """
    _attn_implementation _attn_implementation_autoset _attn_implementation_internal _name_or_path add_cross_attention
    attention_dropout auto_map begin_suppress_tokens bos_token_id chunk_size_feed_forward eos_token_id id2label
    is_decoder is_encoder_decoder label2id max_position_embeddings max_sequence_length output_attentions
    output_hidden_states pad_token_id prefix pretraining_tp problem_type return_dict sep_token_id task_specific_params
    tf_legacy_loss tokenizer_class transformers_version unsloth_version use_bfloat16 use_cache
"""
#: Keys that are read, with their names in our configuration.
_PLAIN = {
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "intermediate_size": "ffn_size",
    "vocab_size": "vocab_size",
    "rms_norm_eps": "norm_eps",
}
#: Keys that may be missing: our defaults then apply.
_OPTIONAL = {
    "num_key_value_heads": "num_kv_heads",
    "tie_word_embeddings": "tie_embeddings",
    "initializer_range": "init_std",
}
#: Other keys that are read, or refused depending on their values.
_READ = """
    architectures attention_bias dtype head_dim hidden_act mlp_bias model_type rope_parameters rope_scaling rope_theta
    torch_dtype
"""
#: Keys of a former configuration that are replaced by other keys, or follow from them.
_REPLACED = {"rope_parameters", "dtype", *(key for kind in ARCHITECTURES for key in kind.window_keys)}
#: Keys of a rotary scaling by its rule, with our names.
_LENGTH = {"original_max_position_embeddings": "original_length"}
_SCALING: dict[str, dict[str, str]] = {
    "linear": {"factor": "factor"},
    "llama3": {"factor": "factor", "low_freq_factor": "low_frequency", "high_freq_factor": "high_frequency"} | _LENGTH,
    "yarn": {"factor": "factor", "beta_slow": "low_frequency", "beta_fast": "high_frequency"}
    | _LENGTH
    | {"attention_factor": "attention_factor"},
}
#: Those of them that may be missing, for our defaults.
_DEFAULTED = {"beta_slow", "beta_fast", "attention_factor"}


def model_config(
    values: Mapping[str, Any],
    *,
    where: str,
    dtype: str | None = None,
    vocab_multiple: int = 64,
    ignore: Collection[str] = (),
    whole: bool = True,
) -> ModelConfig:
    """Convert a Hugging Face configuration to ours.

    Args:
        values: the content of ``config.json``, of transformers 4 or 5.
        where: its path, for messages.
        dtype: type to compute in; None for that of the file, or float32.
        vocab_multiple: see :class:`ModelConfig`.
        ignore: keys that may have any value.
        whole: False for a part of a larger model's configuration, which omits defaults.

    Raises:
        ConfigError: another architecture, or a feature that ours lacks; with the key.
    """
    kind = architecture_of(values, where)
    _refuse(values, kind, where, ignore)
    values = {**{key: value for key, value in kind.defaults.items() if not whole or key not in _PLAIN}, **values}
    missing = [key for key in _PLAIN if key not in values]
    if missing:
        raise ConfigError(f"{missing[0]!r} is missing", file=where, fix="use the config.json that came with the model")
    settings: dict[str, Any] = {ours: values[theirs] for theirs, ours in _PLAIN.items()}
    settings |= {ours: values[theirs] for theirs, ours in _OPTIONAL.items() if values.get(theirs) is not None}
    width = values.get("head_dim")
    if width and width * values["num_attention_heads"] != values["hidden_size"]:
        settings["head_dim"] = width
    settings |= dict.fromkeys(kind.traits, True) | {"sliding_window": kind.window(values, where)}
    dtype_name = dtype or dtype_in(values) or "float32"
    if dtype_name not in DTYPES:
        raise ConfigError(
            f"the trainer does not compute in {dtype_name}",
            file=where,
            at="dtype",
            fix="give --dtype bfloat16 or float32",
        )
    theta, scaling = _rope(values, where)
    return ModelConfig(
        **settings, vocab_multiple=vocab_multiple, rope_theta=theta, rope_scaling=scaling, dtype=dtype_name
    )


def huggingface_config(
    config: ModelConfig,
    stored: torch.dtype,
    base: Mapping[str, Any] | None = None,
    *,
    where: str = "config.json",
    max_length: int | None = None,
    whole: bool = True,
) -> dict[str, Any]:
    """Convert our configuration to Hugging Face's, for transformers 4 and 5.

    Args:
        config: the model.
        stored: type of the weights.
        base: the ``config.json`` that the model was converted from; unknown keys are kept, and if it describes this
            model, it is returned.
        where: its path, for messages.
        max_length: the longest row; None for that of ``base``, or what follows from the rotary scaling, or 2048.
        whole: False for a part of a larger model's configuration.

    Raises:
        StateError: Hugging Face has no such model among the supported kinds.
    """
    kind = architecture_for(config, None if base is None else base.get("model_type"))
    values: dict[str, Any] = {"hidden_act": "silu", "attention_dropout": 0.0, "use_cache": True}
    values |= {"attention_bias": False, "mlp_bias": False} if kind.model_type == "llama" else {}
    values |= {"bos_token_id": None, "eos_token_id": None}
    values |= {key: value for key, value in (base or {}).items() if key not in _REPLACED}
    values |= {theirs: getattr(config, ours) for theirs, ours in (_PLAIN | _OPTIONAL).items()}
    scaling = config.rope_scaling
    values |= {
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "torch_dtype": str(stored).removeprefix("torch."),
    }
    values |= {"architectures": [kind.name], "model_type": kind.model_type} | kind.window_settings(config)
    if scaling is not None:
        values["rope_scaling"] = {key: getattr(scaling, ours) for key, ours in _SCALING[scaling.kind].items()}
        values["rope_scaling"]["rope_type"] = scaling.kind
    follows = 2048 if scaling is None else int(scaling.factor * scaling.original_length)
    values["max_position_embeddings"] = max_length or values.get("max_position_embeddings") or follows
    read = partial(model_config, where=where, dtype="float32", whole=whole)
    return values if max_length else unless_same(values, base, read)


def unless_same(
    values: dict[str, Any], base: Mapping[str, Any] | None, read: Callable[..., ModelConfig]
) -> dict[str, Any]:
    """Return ``base`` if it describes the same model, with weights of the same type, as ``values``; else ``values``."""
    alike = base is not None and base.get("model_type") == values["model_type"]
    if base is None or not alike or dtype_in(base) not in (None, dtype_in(values)):
        return values
    parts = [base, values, *(base.get(part) or {} for part in ("text_config", "vision_config"))]
    one, other = (read(these, ignore={key for part in parts for key in part}) for these in (base, values))
    tokens = [None if config.vision is None else config.vision.image_token for config in (one, other)]
    return values if model_changes(one, other) or tokens[0] != tokens[1] else dict(base)


def dtype_in(values: Mapping[str, Any]) -> str | None:
    """Return the name of the type that a ``config.json`` gives for the weights; None if it gives none."""
    name = values.get("dtype") or values.get("torch_dtype")
    return None if name is None else str(name).removeprefix("torch.")


def refuse_unknown(values: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Raise an error for keys that we do not know, unless they are off."""
    for key, value in values.items():
        if key not in known and value and not (isinstance(value, float) and value == 1.0):
            what, fix = f"{key} is {value!r}, which ours does not know", f"if it changes nothing, give --ignore {key}"
            raise ConfigError(what, file=where, at=key, fix=fix)


def _refuse(values: Mapping[str, Any], kind: Architecture, where: str, ignore: Collection[str]) -> None:
    """Raise an error for features that our decoder lacks."""
    wrong = {key: f"{key} is set: biases, which our model does not have" for key in ("attention_bias", "mlp_bias")}
    wrong = {key: what for key, what in wrong.items() if values.get(key)}
    if (activation := values.get("hidden_act", "silu")) != "silu":
        wrong["hidden_act"] = f"the activation is {activation!r}; ours is 'silu'"
    for key, what in wrong.items():
        if key not in ignore:
            raise ConfigError(what, file=where, at=key, fix="such a model cannot be converted")
    refuse_unknown(values, {*_PLAIN, *_OPTIONAL, *_READ.split(), *_HARMLESS.split(), *kind.window_keys, *ignore}, where)


def _rope(values: Mapping[str, Any], where: str) -> tuple[float, RopeScaling | None]:
    """Return the base of the rotary frequencies, and their scaling."""
    parameters = (values.get("rope_parameters") or {}) | (values.get("rope_scaling") or {})
    theta = parameters.pop("rope_theta", None) or values.get("rope_theta", 10000.0)
    kind, old_kind = (parameters.pop(key, None) for key in ("rope_type", "type"))
    kind = kind or old_kind or "default"
    at = "rope_parameters" if values.get("rope_parameters") else "rope_scaling"
    if kind == "default":
        return float(theta), None
    if kind not in _SCALING:
        fix = f"only {', '.join(_SCALING)} and none can be converted"
        raise ConfigError(f"the rotary scaling is {kind!r}", file=where, at=at, fix=fix)
    names = _SCALING[kind]
    if kind == "yarn":  # keys that may state what is so anyway
        parameters = {"original_max_position_embeddings": values.get("max_position_embeddings")} | parameters
        parameters = {key: value for key, value in parameters.items() if (key, value) != ("truncate", True)}
    parameters = {key: value for key, value in parameters.items() if value is not None}
    if wrong := sorted((names.keys() ^ parameters.keys()) - _DEFAULTED.difference(parameters)):
        what = f"missing or unknown: {', '.join(wrong)}"
        raise ConfigError(what, file=where, at=at, fix=f"use {', '.join(names)}")
    numbers: dict[str, Any] = {names[theirs]: float(number) for theirs, number in parameters.items()}
    if "original_length" in numbers:
        numbers["original_length"] = int(numbers["original_length"])
    return float(theta), RopeScaling(**numbers, kind=kind)
