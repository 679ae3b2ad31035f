"""The exported part of a model: a language model, an image encoder, or both with the projector."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from energon_lite.errors import StateError
from energon_lite.trainer.conversion.architectures import architecture_for
from energon_lite.trainer.conversion.language_config import huggingface_config
from energon_lite.trainer.conversion.llava import MODEL_TYPE, check_is_llava, llava_config
from energon_lite.trainer.conversion.vision_config import encoder_config
from energon_lite.trainer.conversion.vision_tensors import model_shapes
from energon_lite.trainer.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class ExportedPart:
    """A part of a model that is exported, or all of it.

    Args:
        kind: ``language``, ``vision`` or ``llava``.
        config: configuration of the model; for a language model, without images.
    """

    kind: str
    config: ModelConfig

    def has(self, name: str) -> bool:
        """Return whether a weight, by our name, belongs to the part."""
        part = name.split(".")[0]
        return {"language": part not in ("vision", "projector"), "vision": part == "vision"}.get(self.kind, True)

    def shapes(self, *, padded: bool = False) -> dict[str, tuple[int, ...]]:
        """Return the shapes of its weights by our names."""
        return {name: shape for name, shape in model_shapes(self.config, padded=padded).items() if self.has(name)}

    def values(
        self, stored: torch.dtype, base: Mapping[str, Any] | None, *, where: str, max_length: int | None
    ) -> dict[str, Any]:
        """Return its ``config.json``; arguments as for :func:`huggingface_config`."""
        if self.kind == "vision":
            return encoder_config(self.config, stored, base, where=where)
        if self.kind == MODEL_TYPE:
            return llava_config(self.config, stored, base, where=where, max_length=max_length)
        if base is not None and base.get("model_type") == MODEL_TYPE:
            # The section of a part omits defaults; everything else follows from our configuration.
            max_length = max_length or (base.get("text_config") or {}).get("max_position_embeddings")
            base = None
        return huggingface_config(self.config, stored, base, where=where, max_length=max_length)


def exported_part(
    config: ModelConfig, *, text_only: bool = False, vision_only: bool = False, where: str | None = None
) -> ExportedPart:
    """Select the part of a model to export.

    Raises:
        StateError: Hugging Face has no such model, or the model has no image encoder.
    """
    if vision_only:
        if config.vision is None:
            fix = "export all of it" if not config.image_size else "write a file of our names with to-file"
            raise StateError("the model has no image encoder that Hugging Face knows", where=where, fix=fix)
        return ExportedPart("vision", config)
    if text_only or not config.image_size:
        language = dataclasses.replace(config, image_size=0, vision=None)
        architecture_for(language, where=where)
        return ExportedPart("language", language)
    check_is_llava(config, where=where)
    architecture_for(dataclasses.replace(config, image_size=0, vision=None), where=where)
    return ExportedPart(MODEL_TYPE, config)
