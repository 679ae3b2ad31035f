"""Conversion between ``config.json`` of models with images and ours: SigLIP and CLIP encoders, and LLaVA.

LLaVA (Liu et al., arXiv:2310.03744, ``LlavaForConditionalGeneration``) is an image encoder, a projector of two layers,
and a language model with images in its rows.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from energon_lite.errors import ConfigError, StateError
from energon_lite.trainer.conversion.language_config import (
    dtype_in,
    huggingface_config,
    model_config,
    refuse_unknown,
    unless_same,
)
from energon_lite.trainer.models.config import VISION_CHOICES, ModelConfig, VisionConfig

PREPROCESSOR = "preprocessor_config.json"

#: Hugging Face's keys, with ours.
_PLAIN = {
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "intermediate_size": "ffn_size",
    "layer_norm_eps": "norm_eps",
    "hidden_act": "activation",
}
_SIGLIP: dict[str, Any] = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
_SIGLIP |= {"intermediate_size": 3072, "layer_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh"}
_SIGLIP |= {"image_size": 224, "patch_size": 16}
_CLIP = _SIGLIP | {"patch_size": 32, "layer_norm_eps": 1e-5, "hidden_act": "quick_gelu"}
#: For each model_type: our kind, the name of the class, and values of missing keys.
_KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "siglip_vision_model": ("siglip", "SiglipVisionModel", _SIGLIP),
    "clip_vision_model": ("clip", "CLIPVisionModel", _CLIP),
}
#: Keys about the use or training of a model.
_HARMLESS = """
    _name_or_path architectures attention_dropout dropout dtype initializer_factor initializer_range model_type
    output_attentions output_hidden_states projection_dim return_dict torch_dtype transformers_version vocab_size
    vision_use_head num_channels image_size patch_size
"""
#: Mean and deviation of pixels for CLIP; SigLIP's are 0.5.
CLIP_PIXELS = {
    "image_mean": (0.48145466, 0.4578275, 0.40821073),
    "image_std": (0.26862954, 0.26130258, 0.27577711),
}


def vision_settings(
    values: Mapping[str, Any], *, where: str, ignore: Collection[str] = (), **settings: Any
) -> dict[str, Any]:
    """Return the settings of :class:`ModelConfig` about images.

    Args:
        values: a ``config.json`` of an image encoder, or of a whole SigLIP or CLIP model.
        where: its path, for messages; :data:`PREPROCESSOR` may be next to it.
        ignore: keys that may have any value.
        settings: settings of :class:`VisionConfig` without a counterpart in the file.

    Raises:
        ConfigError: another architecture, or a feature that ours lacks; with the key.
    """
    whole = values.get("model_type")
    if whole in ("siglip", "clip"):
        values = {"model_type": f"{whole}_vision_model", **values.get("vision_config", {})}
    check_encoder(values.get("model_type"), where)
    kind, _, defaults = _KINDS[values["model_type"]]
    refuse_unknown(values, {*_PLAIN, *_HARMLESS.split(), *ignore}, where)
    if values.get("num_channels", 3) != 3:
        raise ConfigError("images have other than 3 channels", file=where, at="num_channels", fix="ours are of colours")
    values = {**defaults, **values}
    if values["hidden_act"] not in VISION_CHOICES["activation"]:
        what = f"the activation is {values['hidden_act']!r}"
        raise ConfigError(what, file=where, at="hidden_act", fix=f"ours has {', '.join(VISION_CHOICES['activation'])}")
    plain = {ours: values[theirs] for theirs, ours in _PLAIN.items()} | _pixels(kind, Path(where).parent)
    plain |= {"head": kind == "siglip" and values.get("vision_use_head", True)}
    vision = VisionConfig(kind, **(plain | settings))
    return {"image_size": values["image_size"], "patch_size": values["patch_size"], "vision": vision}


def check_encoder(model_type: object, where: str) -> None:
    """Raise an error for an unsupported kind of image encoder.

    Raises:
        ConfigError: the kind is not supported.
    """
    if model_type not in _KINDS:
        what = f"the image encoder is a {model_type!r}"
        raise ConfigError(what, file=where, at="model_type", fix=f"only {' and '.join(_KINDS)} can be converted")


def encoder_config(
    config: ModelConfig, stored: torch.dtype, base: Mapping[str, Any] | None = None, *, where: str = "config.json"
) -> dict[str, Any]:
    """Return Hugging Face's configuration of the image encoder alone; arguments as for :func:`huggingface_config`."""
    values = huggingface_vision_config(config) | {"torch_dtype": str(stored).removeprefix("torch.")}
    return unless_same(
        values, base, lambda these, ignore: ModelConfig(**vision_settings(these, where=where, ignore=ignore))
    )


def huggingface_vision_config(config: ModelConfig) -> dict[str, Any]:
    """Return Hugging Face's configuration of the image encoder, as a part of a larger one."""
    vision = config.vision
    assert vision is not None
    model_type = f"{vision.kind}_vision_model"
    values = {theirs: getattr(vision, ours) for theirs, ours in _PLAIN.items()}
    values |= {"image_size": config.image_size, "patch_size": config.patch_size, "num_channels": 3}
    values |= {"model_type": model_type, "architectures": [_KINDS[model_type][1]], "attention_dropout": 0.0}
    return values | ({"vision_use_head": vision.head} if vision.kind == "siglip" else {})


def preprocessor_json(config: ModelConfig) -> bytes:
    """Return settings of transformers' image processor that prepare images as our encoder expects."""
    vision = config.vision
    assert vision is not None
    values = {
        "image_processor_type": "SiglipImageProcessor" if vision.kind == "siglip" else "CLIPImageProcessor",
        **{"do_resize": True, "do_center_crop": False, "do_rescale": True, "do_normalize": True},
        "size": {"height": config.image_size, "width": config.image_size},
        "resample": 2,  # bilinear
        "rescale_factor": 1 / 255,
        "image_mean": list(vision.image_mean),
        "image_std": list(vision.image_std),
    }
    return (json.dumps(values, indent=2) + "\n").encode()


def _pixels(kind: str, folder: Path) -> dict[str, tuple[float, ...]]:
    """Return mean and deviation of pixels from a folder, or the defaults of its kind."""
    pixels: dict[str, tuple[float, ...]] = dict(CLIP_PIXELS) if kind == "clip" else {}
    path = folder / PREPROCESSOR
    preprocessor = json.loads(path.read_bytes()) if path.is_file() else {}
    return pixels | {
        key: tuple(map(float, preprocessor[key])) for key in CLIP_PIXELS if len(preprocessor.get(key) or ()) == 3
    }


MODEL_TYPE = "llava"

#: Keys about the use of a model, or read elsewhere.
_LLAVA_HARMLESS = """
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
    config = model_config(
        {"model_type": "llama", **text},
        where=where,
        dtype=dtype or dtype_in(values),
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
    language = dataclasses.replace(config, image_size=0, vision=None)
    # The former model may be the language model alone.
    former = {} if base is None or base.get("model_type") != MODEL_TYPE else base
    text = former.get("text_config") if former else base
    values = {key: value for key, value in former.items() if key not in ("dtype", "image_token_id")}
    values |= {
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
        "torch_dtype": str(stored).removeprefix("torch."),
    }
    return values if max_length else unless_same(values, base, partial(any_model_config, where=where, dtype="float32"))


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
            f"{wrong} cannot be stored as transformers' LLaVA",
            where=where,
            fix="export a part with --text-only or --vision-only, name a token with --image-token, or write a file of "
            "our names with to-file",
        )


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
    refuse_unknown(values, {*_LLAVA_HARMLESS.split(), *ignore}, where)
