"""Small random models of Hugging Face."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

#: ``save_model(name="hf", shard="10GB", seed=0, **config) -> folder``
SaveModel = Callable[..., Path]

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

    shape: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(shape | changes)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Larger than at the start of training, so that a wrong head or a wrong angle shows in the logits.
            parameter.normal_(1.0, 0.2) if "norm" in name else parameter.normal_(0.0, 0.15)
    return model.eval()


def change_config(folder: Path, **values: Any) -> None:
    """Change keys of ``config.json``; a value of ``...`` removes the key."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
