"""Tensors of a language model: their names in both formats, and their shapes."""

from __future__ import annotations

from collections.abc import Mapping

from energon_lite.errors import StateMismatchError
from energon_lite.trainer.models.config import ModelConfig

#: Names of the embedding table and of the output layer.
EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
#: Tensors whose rows are tokens; ours are padded with further rows, for even sharding.
PADDED = (EMBEDDING, HEAD)
#: Ends of names of tensors in old files that are computed from the configuration, and ignored.
COMPUTED = ("rotary_emb.inv_freq", "embeddings.position_ids")

#: Tensors listed in a message before it is abbreviated.
_MOST_SHOWN = 5


def language_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all weights by our names, in order, the vocabulary without padding."""
    hidden = config.hidden_size
    inner = config.ffn_size
    rows = config.vocab_size
    width = config.head_width
    queries, keys = config.num_heads * width, config.kv_heads * width
    # In the order of Hugging Face's modules.
    outputs = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    attention: dict[str, tuple[int, ...]] = {}
    for name, number in outputs.items():
        attention[f"{name}.weight"] = (number, hidden)
        if config.qkv_bias:
            attention[f"{name}.bias"] = (number,)
    attention["o_proj.weight"] = (hidden, queries)
    if config.qk_norm:
        attention |= {"q_norm.weight": (width,), "k_norm.weight": (width,)}
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (rows, hidden)}
    for number in range(config.num_layers):
        block = {
            **{f"self_attn.{name}": shape for name, shape in attention.items()},
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
        }
        shapes |= {f"layers.{number}.{name}": shape for name, shape in block.items()}
    shapes["norm.weight"] = (hidden,)
    if not config.tie_embeddings:
        shapes[HEAD] = (rows, hidden)
    return shapes


def native_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes in our checkpoints, the vocabulary with padding."""
    rows = config.padded_vocab_size
    return {name: (rows, *shape[1:]) if name in PADDED else shape for name, shape in language_shapes(config).items()}


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
            number = "1 tensor is" if len(names) == 1 else f"{len(names)} tensors are"
            more = [f"and {len(names) - _MOST_SHOWN} more"] if len(names) > _MOST_SHOWN else []
            raise StateMismatchError(
                f"{number} {what}: {', '.join(names[:_MOST_SHOWN] + more)}",
                where=where,
                fix="is config.json that of these weights?",
            )
