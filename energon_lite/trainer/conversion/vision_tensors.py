"""The tensors of models with images: their names here and there, and their shapes."""

from __future__ import annotations

import re
from collections.abc import Collection

import torch

from energon_lite.trainer.conversion.language_tensors import HEAD, PADDED, huggingface_name, language_shapes
from energon_lite.trainer.models.config import ModelConfig
from energon_lite.trainer.models.vision_transformer import Projector, VisionTransformer
from energon_lite.trainer.parallel.mesh import ParallelMesh

#: What their names begin with, as several versions of transformers have written them, and ours instead.
_BEGINNINGS = (
    (r"(model\.)?vision_tower\.(vision_model\.)?", "vision."),
    (r"vision_model\.", "vision."),
    (r"(embeddings|encoder|pre_layrnorm|post_layernorm|head)\.", r"vision.\1."),
    (r"(model\.)?multi_modal_projector\.", "projector."),
    (r"(language_model\.model|model\.language_model|language_model|model)\.", ""),
)
#: Parts of whole SigLIP and CLIP models that are not their image encoders.
_OTHERS = ("text_model.", "text_projection.", "visual_projection.", "logit_scale", "logit_bias")


def vision_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights of a model's image encoder and projector by our names; none of a model without."""
    if config.vision is None:
        return {}
    nowhere = ParallelMesh(device=torch.device("meta"))
    parts = {"vision": VisionTransformer(config, nowhere), "projector": Projector(config, nowhere)}
    return {f"{part}.{name}": tuple(p.shape) for part, module in parts.items() for name, p in module.named_parameters()}


def model_shapes(config: ModelConfig, *, padded: bool = False) -> dict[str, tuple[int, ...]]:
    """Shapes of all weights by our names, the vocabulary without or with our padding."""
    shapes = language_shapes(config) | vision_shapes(config)
    if padded:
        shapes |= {name: (config.padded_vocab_size, *shapes[name][1:]) for name in PADDED if name in shapes}
    return shapes


def native_name(theirs: str) -> str:
    """Our name for a weight of theirs.

    Example:
        >>> native_name("vision_tower.vision_model.post_layernorm.bias")
        'vision.post_layernorm.bias'
    """
    for beginning, ours in _BEGINNINGS:
        if (found := re.match(beginning, theirs)) is not None:
            return found.expand(ours) + theirs[found.end() :]
    return theirs


def their_names(ours: Collection[str], found: Collection[str] = (), *, llava: bool) -> dict[str, str]:
    """Their names for weights of ours.

    Args:
        ours: our names.
        found: names of theirs that are there, or were; what is among them keeps its name.
        llava: of a model with images; otherwise of a language model, or of an image encoder alone.
    """
    here = {native_name(name): name for name in found}
    return {name: here.get(name) or _written(name, llava=llava) for name in ours}


def belongs_to_encoder(theirs: str) -> bool:
    """False for weights of whole SigLIP and CLIP models that are not of their image encoders."""
    return not theirs.startswith(_OTHERS)


def _written(ours: str, *, llava: bool) -> str:
    """Their name for a weight of ours, as on the Hugging Face Hub, which transformers 4 wrote and 5 reads."""
    part, _, rest = ours.partition(".")
    if part == "vision":
        return f"vision_tower.vision_model.{rest}" if llava else f"vision_model.{rest}"
    if part == "projector":
        return f"multi_modal_projector.{rest}"
    return f"language_model.{huggingface_name(ours)}" if llava else huggingface_name(ours)


def is_head(theirs: str) -> bool:
    """True for the output layer's weight."""
    return native_name(theirs) == HEAD
