"""Tensors of models with images: their names in both formats, and their shapes."""

from __future__ import annotations

import re
from collections.abc import Collection

import torch

from energon_lite.trainer.conversion.language_tensors import HEAD, PADDED, huggingface_name, language_shapes
from energon_lite.trainer.models.config import ModelConfig
from energon_lite.trainer.models.vision_transformer import Projector, VisionTransformer
from energon_lite.trainer.parallel.mesh import ParallelMesh

#: Prefixes of Hugging Face's names, as several versions of transformers write them, and our replacements.
_BEGINNINGS = (
    (r"(model\.)?vision_tower\.(vision_model\.)?", "vision."),
    (r"vision_model\.", "vision."),
    (r"(embeddings|encoder|pre_layrnorm|post_layernorm|head)\.", r"vision.\1."),
    (r"(model\.)?multi_modal_projector\.", "projector."),
    (r"(language_model\.model|model\.language_model|language_model|model)\.", ""),
)
#: Prefixes of parts of SigLIP and CLIP models other than their image encoders.
_OTHERS = ("text_model.", "text_projection.", "visual_projection.", "logit_scale", "logit_bias")


def vision_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights of the image encoder and projector by our names; empty without images."""
    if config.vision is None:
        return {}
    nowhere = ParallelMesh(device=torch.device("meta"))
    parts = {"vision": VisionTransformer(config, nowhere), "projector": Projector(config, nowhere)}
    return {f"{part}.{name}": tuple(p.shape) for part, module in parts.items() for name, p in module.named_parameters()}


def model_shapes(config: ModelConfig, *, padded: bool = False) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all weights by our names, the vocabulary without or with our padding."""
    shapes = language_shapes(config) | vision_shapes(config)
    if padded:
        shapes |= {name: (config.padded_vocab_size, *shapes[name][1:]) for name in PADDED if name in shapes}
    return shapes


def native_name(theirs: str) -> str:
    """Return our name for a weight of Hugging Face.

    Example:
        >>> native_name("vision_tower.vision_model.post_layernorm.bias")
        'vision.post_layernorm.bias'
    """
    for beginning, ours in _BEGINNINGS:
        if (match := re.match(beginning, theirs)) is not None:
            return match.expand(ours) + theirs[match.end() :]
    return theirs


def their_names(ours: Collection[str], found: Collection[str] = (), *, llava: bool) -> dict[str, str]:
    """Return Hugging Face's names for weights of ours.

    Args:
        ours: our names.
        found: existing names of Hugging Face, which weights among them keep.
        llava: True for a model with images; False for a language model, or an image encoder alone.
    """
    here = {native_name(name): name for name in found}
    return {name: here.get(name) or _written(name, llava=llava) for name in ours}


def belongs_to_encoder(theirs: str) -> bool:
    """Return False for weights of SigLIP and CLIP models outside their image encoders."""
    return not theirs.startswith(_OTHERS)


def _written(ours: str, *, llava: bool) -> str:
    """Return the name of a weight on the Hugging Face Hub, as transformers 4 writes and 5 reads it."""
    part, _, rest = ours.partition(".")
    if part == "vision":
        return f"vision_tower.vision_model.{rest}" if llava else f"vision_model.{rest}"
    if part == "projector":
        return f"multi_modal_projector.{rest}"
    return f"language_model.{huggingface_name(ours)}" if llava else huggingface_name(ours)


def is_head(theirs: str) -> bool:
    """Return whether a name is that of the output layer's weight."""
    return native_name(theirs) == HEAD
