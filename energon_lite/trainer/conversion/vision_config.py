"""Conversion between the configurations of ``SiglipVisionModel`` and ``CLIPVisionModel`` and ours."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from energon_lite.errors import ConfigError
from energon_lite.trainer.models.config import ModelConfig
from energon_lite.trainer.models.vision_config import CHOICES, VisionConfig

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
#: Settings of :class:`VisionConfig` without a counterpart in Hugging Face.
_OURS = ("feature_layer", "pooling", "projector", "image_token", "tp", "recompute")
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
    for key, value in values.items():
        if key not in {*_PLAIN, *_HARMLESS.split(), *ignore} and value:
            what = f"{key} is {value!r}, which ours does not know"
            raise ConfigError(what, file=where, at=key, fix=f"if it changes nothing, give --ignore {key}")
    if values.get("num_channels", 3) != 3:
        raise ConfigError("images have other than 3 channels", file=where, at="num_channels", fix="ours are of colours")
    values = {**defaults, **values}
    if values["hidden_act"] not in CHOICES["activation"]:
        what = f"the activation is {values['hidden_act']!r}"
        raise ConfigError(what, file=where, at="hidden_act", fix=f"ours has {', '.join(CHOICES['activation'])}")
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
    stored_name = str(stored).removeprefix("torch.")
    if base is not None and base.get("model_type") in _KINDS:
        assert config.vision is not None
        ours = dataclasses.asdict(config.vision)
        mine = {name: ours[name] for name in (*_OURS, "image_mean", "image_std")}
        settings = vision_settings(base, where=where, ignore=base.keys(), **mine)
        same = all(getattr(config, name) == value for name, value in settings.items())
        base_dtype = str(base.get("dtype") or base.get("torch_dtype") or stored_name).removeprefix("torch.")
        if same and base_dtype == stored_name:
            return dict(base)
    return huggingface_vision_config(config) | {"torch_dtype": stored_name}


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
