"""Small random models of Hugging Face, with images and without, their files, and random configurations of ours."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st

from energon_lite.trainer import (
    LlamaModel,
    ModelConfig,
    OverlappedDistributedOptimizer,
    RopeScaling,
    build_mesh,
    config_from_dict,
    config_to_dict,
    save_checkpoint,
)
from energon_lite.trainer.conversion.language_config import ARCHITECTURES

#: ``save_model(name="hf", shard="10GB", seed=0, **config) -> folder``
SaveModel = Callable[..., Path]

TEXT: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}
SCALING = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def make_model(seed: int = 0, kind: str = "llama", **changes: Any) -> Any:
    """A random ``LlamaForCausalLM``, or another kind by its ``model_type``, with norms that are not all ones."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = TEXT | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(shape | changes)))
    return _at_random(model, 0.15)


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def write_words(folder: Path) -> Path:
    """A tokenizer of words, as the ``tokenizers`` library leaves one: it does not say what transformers shall take."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir(exist_ok=True)
    words = {word: number for number, word in enumerate(["?", "<s>", "</s>", *"abcdefgh"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return folder


def change_config(folder: Path, **values: Any) -> None:
    """Change keys of ``config.json``; a value of ``...`` removes the key."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def save_run(folder: Path, *, tokenizer: Path | str | None = None, **model: Any) -> LlamaModel:
    """The model of a checkpoint that is written as the Trainer leaves one."""
    shape = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "ffn_size": 24} | model
    data = {"path": "texts", "tokenizer": None if tokenizer is None else str(tokenizer)}
    config = config_from_dict({"data": data, "model": shape})
    made = LlamaModel(config.model, build_mesh(), seed=4)
    optimizer = OverlappedDistributedOptimizer(made, made.mesh, config.optimizer)
    save_checkpoint(folder, 7, made, optimizer, made.mesh, {"config": config_to_dict(config), "loader": None})
    return made


#: An image of 14 pixels has patches of 4, and two pixels are over.
VISION: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 14,
    "patch_size": 4,
}
#: The token that stands for images.
IMAGE = 100
PIXELS = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.6, 0.7]}


def make_encoder(kind: str) -> Any:
    """A random ``SiglipVisionModel`` or ``CLIPVisionModel``."""
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(0)
    return _at_random(AutoModel.from_config(AutoConfig.for_model(f"{kind}_vision_model", **VISION)))


def make_llava(kind: str, language: str = "llama", **changes: Any) -> Any:
    """A random ``LlavaForConditionalGeneration``, with features as LLaVA takes them of such an encoder."""
    from transformers import AutoConfig, LlavaConfig, LlavaForConditionalGeneration

    text = TEXT | {"num_key_value_heads": 2, "vocab_size": changes.pop("vocab_size", 101)}
    text["tie_word_embeddings"] = changes.pop("tie_word_embeddings", False)
    taken = {"vision_feature_layer": -2, "vision_feature_select_strategy": "default"}
    if kind == "siglip":
        taken = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    torch.manual_seed(0)
    config = LlavaConfig(
        vision_config=AutoConfig.for_model(f"{kind}_vision_model", **VISION),
        text_config=AutoConfig.for_model(language, **text),
        image_token_index=IMAGE,
        image_seq_length=9,
        **(taken | changes),
    )
    return _at_random(LlavaForConditionalGeneration(config))


def _at_random(model: Any, size: float = 0.2) -> Any:
    """Larger weights than at the start of training, so that a wrong head, angle or place shows in what comes out."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            norm = "norm" in name and name.endswith("weight")
            parameter.normal_(1.0, 0.2) if norm else parameter.normal_(0.0, size)
    return model.eval()


@contextmanager
def in_double() -> Iterator[None]:
    """Their rotations and norms are float32, whatever the model is; here they are as precise as ours."""
    import transformers

    for kind in ARCHITECTURES:  # what is imported inside would keep the types of here
        getattr(transformers, kind.name)
    with ExitStack() as stack:
        for owner, name, wide in (
            (torch, "float", torch.float64),
            (torch, "float32", torch.float64),
            (torch.Tensor, "float", torch.Tensor.double),
        ):
            stack.enter_context(mock.patch.object(owner, name, wide))
        yield


#: Scalings of the rotary frequencies, and configurations of language models with any of them.
scalings = st.builds(
    RopeScaling,
    factor=st.floats(1, 32),
    low_frequency=st.floats(0.5, 1),
    high_frequency=st.floats(2, 8),
    original_length=st.integers(1, 9000),
)
scalings |= st.builds(RopeScaling, factor=st.floats(1, 32), kind=st.just("linear"))
scalings |= st.builds(
    RopeScaling,
    factor=st.floats(1, 64),
    low_frequency=st.floats(0.5, 4),
    high_frequency=st.none() | st.floats(5, 40),
    original_length=st.integers(1, 9000),
    kind=st.just("yarn"),
    attention_factor=st.none() | st.floats(0.5, 2),
)
configs = st.builds(
    lambda heads, groups, traits, **more: ModelConfig(
        hidden_size=heads * 8, num_heads=heads, num_kv_heads=groups, **traits, **more
    ),
    heads=st.sampled_from([4, 8]),
    groups=st.sampled_from([1, 2, 4, None]),
    traits=st.sampled_from([{}, {"qkv_bias": True}, {"qk_norm": True}]),
    head_dim=st.sampled_from([None, 8, 12]),
    num_layers=st.integers(1, 4),
    ffn_size=st.integers(1, 100),
    vocab_size=st.integers(1, 1000),
    rope_theta=st.floats(1000, 1e6),
    rope_scaling=st.none() | scalings,
    tie_embeddings=st.booleans(),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
