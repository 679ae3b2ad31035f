"""Conversion between ``config.json`` of ``LlavaForConditionalGeneration`` and :class:`ModelConfig`.

Liu et al., arXiv:2310.03744: an image encoder, a projector of two layers, and a language model with images in its rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import torch

from energon_lite.errors import ConfigError, StateError
from energon_lite.trainer.conversion.language_config import huggingface_config, model_config
from energon_lite.trainer.conversion.vision_config import check_encoder, huggingface_vision_config, vision_settings
from energon_lite.trainer.models.config import ModelConfig, model_changes

MODEL_TYPE = "llava"

#: Keys about the use of a model, or read elsewhere.
_HARMLESS = """
    _name_or_path architectures bos_token_id dtype eos_token_id ignore_index image_seq_length image_token_id
    image_token_index model_type pad_token_id text_config tie_word_embeddings torch_dtype transformers_version
    vision_config vocab_size vision_feature_layer multimodal_projector_bias projector_hidden_act
    vision_feature_select_strategy
"""


def any_model_config(
    values: Mapping[str, Any],
    *,
    where: str,
    dtype: str | None = None,
    vocab_multiple: int = 64,
    ignore: Collection[str] = (),
) -> ModelConfig:
    """Convert a Hugging Face configuration to ours, with images or without; see :func:`model_config`.

    Raises:
        ConfigError: another architecture, or a feature that ours lacks; with the key.
    """
    if values.get("model_type") != MODEL_TYPE:
        return model_config(values, where=where, dtype=dtype, vocab_multiple=vocab_multiple, ignore=ignore)
    text = dict(values.get("text_config") or {})
    # LLaVA's own default is CLIP.
    vision = {"model_type": "clip_vision_model", **(values.get("vision_config") or {})}
    _refuse(values, vision["model_type"], where, ignore)
    dtype = dtype or values.get("dtype") or values.get("torch_dtype")
    config = model_config(
        {"model_type": "llama", **text},
        where=where,
        dtype=None if dtype is None else str(dtype).removeprefix("torch."),
        vocab_multiple=vocab_multiple,
        ignore=ignore,
        whole=False,
    )
    settings = {
        "feature_layer": values.get("vision_feature_layer", -2),
        "image_token": values.get("image_token_index", values.get("image_token_id", 32000)),
    }
    images = vision_settings(vision, where=where, ignore=ignore, **settings)
    tied = config.tie_embeddings or bool(values.get("tie_word_embeddings"))
    return dataclasses.replace(config, tie_embeddings=tied, **images)


def llava_config(
    config: ModelConfig,
    stored: torch.dtype,
    base: Mapping[str, Any] | None = None,
    *,
    where: str = "config.json",
    max_length: int | None = None,
) -> dict[str, Any]:
    """Convert our configuration of a model with images to Hugging Face's.

    Args:
        config, stored, base, where, max_length: as for :func:`huggingface_config`.

    Raises:
        StateError: LLaVA has no such model.
    """
    check_is_llava(config)
    assert config.vision is not None
    stored_name = str(stored).removeprefix("torch.")
    ours = base is not None and base.get("model_type") == MODEL_TYPE and max_length is None
    if base is not None and ours and _describes(base, config, stored_name, where):
        return dict(base)
    language = dataclasses.replace(config, image_size=0, vision=None)
    # The former model may be the language model alone.
    former = {} if base is None or base.get("model_type") != MODEL_TYPE else base
    text = former.get("text_config") if former else base
    values = {key: value for key, value in former.items() if key not in ("dtype", "image_token_id")}
    return values | {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": MODEL_TYPE,
        "text_config": huggingface_config(language, stored, text, where=where, max_length=max_length, whole=False),
        "vision_config": huggingface_vision_config(config),
        "image_token_index": config.vision.image_token,
        "image_seq_length": config.prefix_length,
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": True,
        "vision_feature_layer": config.vision.feature_layer,
        "vision_feature_select_strategy": _strategy(config.vision.kind),
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": stored_name,
    }


def check_is_llava(config: ModelConfig, *, where: str | None = None) -> None:
    """Raise an error for a model that LLaVA cannot represent.

    Raises:
        StateError: LLaVA would treat its images differently; the message says which part can be exported.
    """
    vision = config.vision
    wrong = None
    if vision is None:
        wrong = f"a model whose images (image_size={config.image_size}) have no encoder"
    elif vision.pooling != "none" or vision.feature_layer is None:
        wrong = f"a model with vision.pooling={vision.pooling}, vision.feature_layer={vision.feature_layer}"
    elif vision.projector != "mlp":
        wrong = f"a model with vision.projector={vision.projector}"
    elif vision.image_token is None or vision.image_token >= config.vocab_size:
        wrong = f"a model with vision.image_token={vision.image_token}, so without a token that is for images alone,"
    if wrong is not None:
        raise StateError(
            f"{wrong} is none that transformers' LLaVA can be",
            where=where,
            fix="export a part with --text-only or --vision-only, name a token with --image-token, or write a file of "
            "our names with to-file",
        )


def _describes(base: Mapping[str, Any], config: ModelConfig, stored: str, where: str) -> bool:
    """Return whether a ``config.json`` describes this model, with weights of this type."""
    assert config.vision is not None
    base_dtype = str(base.get("dtype") or base.get("torch_dtype") or stored).removeprefix("torch.")
    theirs = any_model_config(base, where=where, dtype=config.dtype, ignore=_all_keys(base))
    assert theirs.vision is not None
    # The normalization of pixels is not in this file.
    pixels = {name: getattr(config.vision, name) for name in ("image_mean", "image_std")}
    theirs = dataclasses.replace(theirs, vision=dataclasses.replace(theirs.vision, **pixels))
    same_token = theirs.vision is not None and theirs.vision.image_token == config.vision.image_token
    return base_dtype == stored and same_token and not model_changes(theirs, config)


def _all_keys(values: Mapping[str, Any]) -> set[str]:
    parts = [values, *(values.get(part) or {} for part in ("text_config", "vision_config"))]
    return {key for part in parts for key in part}


def _strategy(kind: str) -> str:
    """Return LLaVA's selection of features: without CLIP's class token; all of SigLIP's, which has none."""
    return "default" if kind == "clip" else "full"


def _refuse(values: Mapping[str, Any], kind: str, where: str, ignore: Collection[str]) -> None:
    """Raise an error for features that ours lacks."""
    check_encoder(kind, where)
    wanted = {
        "projector_hidden_act": ("gelu", "gelu"),
        "multimodal_projector_bias": (True, True),
        "vision_feature_select_strategy": (_strategy(kind.removesuffix("_vision_model")), "default"),
    }
    for key, (ours, default) in wanted.items():
        if (given := values.get(key, default)) != ours and key not in ignore:
            raise ConfigError(f"{key} is {given!r}; ours is {ours!r}", file=where, at=key, fix="it cannot be converted")
    if not isinstance(layer := values.get("vision_feature_layer", -2), int) or layer >= 0:
        what = f"the features are of {layer!r}; ours are of one layer, counted from the last"
        raise ConfigError(what, file=where, at="vision_feature_layer", fix="such a model cannot be converted")
    for key, value in values.items():
        if key not in {*_HARMLESS.split(), *ignore} and value:
            what = f"{key} is {value!r}, which ours does not know"
            raise ConfigError(what, file=where, at=key, fix=f"if it changes nothing, give --ignore {key}")
