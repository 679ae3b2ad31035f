"""Small random models with images of Hugging Face."""

from __future__ import annotations

from typing import Any

import torch

#: An image of 14 pixels has patches of 4, and two pixels are over.
SHAPE: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 14,
    "patch_size": 4,
}
#: The token that stands for images.
IMAGE = 100


def make_encoder(kind: str, seed: int = 0, **changes: Any) -> Any:
    """A random ``SiglipVisionModel`` or ``CLIPVisionModel``."""
    from transformers import CLIPVisionConfig, CLIPVisionModel, SiglipVisionConfig, SiglipVisionModel

    classes = {"siglip": (SiglipVisionModel, SiglipVisionConfig), "clip": (CLIPVisionModel, CLIPVisionConfig)}
    model, config = classes[kind]
    torch.manual_seed(seed)
    return _at_random(model(config(**(SHAPE | changes))))


def make_llava(kind: str, language: str = "llama", seed: int = 0, **changes: Any) -> Any:
    """A random ``LlavaForConditionalGeneration``, with features as LLaVA takes them of such an encoder."""
    import transformers

    classes = {"llama": "LlamaConfig", "qwen2": "Qwen2Config", "mistral": "MistralConfig"}
    text = {
        **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
        "vocab_size": changes.pop("vocab_size", 101),
        "tie_word_embeddings": changes.pop("tie_word_embeddings", False),
    }
    vision = transformers.CLIPVisionConfig if kind == "clip" else transformers.SiglipVisionConfig
    taken = {"vision_feature_layer": -2, "vision_feature_select_strategy": "default"}
    if kind == "siglip":
        taken = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    torch.manual_seed(seed)
    config = transformers.LlavaConfig(
        vision_config=vision(**SHAPE),
        text_config=getattr(transformers, classes[language])(**text),
        image_token_index=IMAGE,
        image_seq_length=9,
        **(taken | changes),
    )
    return _at_random(transformers.LlavaForConditionalGeneration(config))


def _at_random(model: Any) -> Any:
    """Larger weights than at the start of training, so that a wrong head or a wrong place shows in what comes out."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            norm = "norm" in name and name.endswith("weight")
            parameter.normal_(1.0 if norm else 0.0, 0.2)
    return model.eval()
