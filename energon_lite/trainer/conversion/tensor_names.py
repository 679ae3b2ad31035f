"""Tensors of models, with images or without: their names in both formats, and their shapes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping

import torch

from energon_lite.errors import StateMismatchError, counted, listed
from energon_lite.trainer.models.config import ModelConfig
from energon_lite.trainer.models.llama import LlamaModel
from energon_lite.trainer.parallel.mesh import ParallelMesh

#: Names of the embedding table and of the output layer.
EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
#: Tensors whose rows are tokens; ours are padded with further rows, for even sharding.
PADDED = (EMBEDDING, HEAD)
#: Ends of names of tensors in old files that are computed from the configuration, and ignored.
COMPUTED = ("rotary_emb.inv_freq", "embeddings.position_ids")

#: Most tensors listed in a message before it is abbreviated.
_MOST_SHOWN = 5


#: Parts of a block in the order of Hugging Face's modules.
_BLOCK = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")


def model_shapes(config: ModelConfig, *, padded: bool = False) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all weights by our names, in the order of Hugging Face's modules, images last.

    Args:
        config: the model's shape.
        padded: the vocabulary has our padding.
    """
    config = dataclasses.replace(config, compile=False, recompute_budget=1.0)
    model = LlamaModel(config, ParallelMesh(device=torch.device("meta")), drawn=())
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    if not padded:
        shapes |= {name: (config.vocab_size, *shapes[name][1:]) for name in PADDED if name in shapes}
    return {name: shapes[name] for name in sorted(shapes, key=_place)}


def _place(name: str) -> tuple[int, ...]:
    """Return the place of a weight in the order of Hugging Face's modules."""
    part, number, module, *_ = f"{name}..".split(".")
    if part == "layers":
        return 1, int(number), _BLOCK.index(module)
    return ({"embed_tokens": 0, "norm": 2, "lm_head": 3}.get(part, 4),)


def huggingface_name(name: str) -> str:
    """Return Hugging Face's name for a weight of ours."""
    return name if name == HEAD else f"model.{name}"


def check_tensors(found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Check that tensors have the expected names and shapes.

    Raises:
        StateMismatchError: some tensors are missing, unexpected, or of another shape; with their names.
    """
    wrongs = {
        "missing": [name for name in wanted if name not in found],
        "not part of the model": [name for name in found if name not in wanted],
        "of another shape": [
            f"{name} is {list(found[name])} instead of {list(shape)}"
            for name, shape in wanted.items()
            if name in found and tuple(found[name]) != shape
        ],
    }
    for what, names in wrongs.items():
        if names:
            number = f"{counted(len(names), 'tensor')} {'is' if len(names) == 1 else 'are'} {what}"
            fix = "is config.json that of these weights?"
            raise StateMismatchError(f"{number}: {listed(names, _MOST_SHOWN)}", where=where, fix=fix)


#: Prefixes of Hugging Face's names, as several versions of transformers write them, and our replacements.
_BEGINNINGS = (
    (r"(model\.)?vision_tower\.(vision_model\.)?", "vision."),
    (r"vision_model\.", "vision."),
    (r"(embeddings|encoder|pre_layrnorm|post_layernorm|head)\.", r"vision.\1."),
    (r"(model\.)?multi_modal_projector\.", "projector."),
    (r"(language_model\.model|model\.language_model|language_model|model)\.", ""),
)
#: Prefixes of parts of SigLIP and CLIP models other than their image encoders.
OTHER_MODELS = ("text_model.", "text_projection.", "visual_projection.", "logit_scale", "logit_bias")


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


def _written(ours: str, *, llava: bool) -> str:
    """Return the name of a weight on the Hugging Face Hub, as transformers 4 writes and 5 reads it."""
    part, _, rest = ours.partition(".")
    if part == "vision":
        return f"vision_tower.vision_model.{rest}" if llava else f"vision_model.{rest}"
    if part == "projector":
        return f"multi_modal_projector.{rest}"
    return f"language_model.{huggingface_name(ours)}" if llava else huggingface_name(ours)
