"""Configuration of a model, as frozen dataclasses."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from energon_lite.documents import from_plain, read
from energon_lite.errors import ConfigError, require, require_at_least
from energon_lite.trainer.models.vision_config import VisionConfig

#: Data types that a model may compute in.
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
#: Settings that determine the meaning of a model's weights. (The other settings concern computation or initialization,
#: or show in the shapes of the weights.)
MODEL_MEANING = (
    *("hidden_size", "num_layers", "num_heads", "num_kv_heads", "ffn_size", "vocab_size", "rope_theta", "rope_scaling"),
    *("norm_eps", "tie_embeddings", "norm", "image_size", "patch_size", "vision"),
    *("head_dim", "qkv_bias", "qk_norm", "sliding_window"),
)
#: Settings of an image prefix; a checkpoint without one leaves it at its initial weights.
_PREFIX = ("image_size", "patch_size", "vision")


@dataclass(frozen=True)
class RopeScaling:
    """Rotary frequencies for longer rows, by Llama 3.1's rule; see :func:`scaled_frequencies`.

    Args:
        factor: factor by which the slowest waves are stretched.
        low_frequency: waves with fewer turns than this in the old context are stretched by the whole factor.
        high_frequency: waves with more turns than this are kept.
        original_length: the old context, in tokens.
    """

    factor: float = 8.0
    low_frequency: float = 1.0
    high_frequency: float = 4.0
    original_length: int = 8192

    def __post_init__(self) -> None:
        at = "model.rope_scaling"
        require(self.factor >= 1, f"factor={self.factor} would shrink rows", f"{at}.factor", "give a number >= 1")
        good = 0 < self.low_frequency < self.high_frequency
        require(good, "low_frequency is not below high_frequency", f"{at}.low_frequency", "e.g. 1 and 4")
        require_at_least(self, at, original_length=1)


@dataclass(frozen=True)
class ModelConfig:
    """Configuration of the model: a decoder like Llama, Qwen and Mistral, with an image prefix if ``image_size`` > 0.

    Args:
        hidden_size: width of the residual stream.
        num_layers: number of decoder blocks.
        num_heads: query heads.
        num_kv_heads: key and value heads, each shared by ``num_heads / num_kv_heads`` query heads; None for one each.
        head_dim: width of a head; None for ``hidden_size / num_heads``.
        qkv_bias: add biases to queries, keys and values, as Qwen 2.5 does.
        qk_norm: norm the queries and keys of each head before rotation, as Qwen 3 does.
        sliding_window: the most tokens a token attends to, itself included, as in Mistral 7B's first version; None for
            all. Longer rows need a dense mask, and are computed by ``sdpa``.
        ffn_size: inner width of the feed-forward part.
        vocab_size: number of tokens.
        vocab_multiple: the embedding table is padded to a multiple of this, so that it can be sharded evenly.
        rope_theta: base of the rotary frequencies.
        rope_scaling: change of the rotary frequencies for longer rows; None for none.
        norm_eps: constant added to the mean square in RMSNorm.
        tie_embeddings: use the embedding table as the output layer too.
        image_size: height and width of the images, in pixels; 0 for a model without images.
        patch_size: height and width of a patch, in pixels.
        vision: the image encoder; None: each patch is mapped linearly to one token.
        init_std: standard deviation of the initial weights.
        dtype: ``float32``, ``float64`` or ``bfloat16``.
        norm, attention: names of a norm and of an attention function (:func:`register_norm`,
            :func:`register_attention`). Built-in are ``rms_norm``, and ``sdpa``, ``varlen`` and ``auto``, the fastest
            of the device.
        recompute: activations that are recomputed in the backward pass: ``none``, ``selective`` (all except the outputs
            of matrix products and attention: a third less memory for little time) or ``full`` (all except the input of
            each block, for a third more time; Chen et al., arXiv:1604.06174).
        recompute_budget: with ``compile``, the share of activations that the compiler may keep, 0 to 1; it recomputes
            the cheapest ones.
        compile: compile each block with ``torch.compile``.
        fuse_projections: compute queries, keys and values by one matrix product, and gate and up by one.
        loss_chunk: number of tokens whose logits exist at a time; 0: all of a micro-batch.
    """

    hidden_size: int = 96
    num_layers: int = 3
    num_heads: int = 4
    num_kv_heads: int | None = None
    head_dim: int | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    ffn_size: int = 256
    vocab_size: int = 259
    vocab_multiple: int = 64
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    image_size: int = 0
    patch_size: int = 2
    vision: VisionConfig | None = None
    init_std: float = 0.02
    dtype: str = "float32"
    norm: str = "rms_norm"
    attention: str = "auto"
    recompute: str = "none"
    recompute_budget: float = 1.0
    compile: bool = False
    fuse_projections: bool = False
    loss_chunk: int = 0

    def __post_init__(self) -> None:
        require_at_least(self, "model", hidden_size=1, num_layers=1, num_heads=1, ffn_size=1, vocab_size=1)
        require_at_least(self, "model", vocab_multiple=1, patch_size=1, loss_chunk=0)
        known = self.dtype in DTYPES
        require(known, f"unknown dtype {self.dtype!r}", "model.dtype", f"use one of: {', '.join(DTYPES)}")
        if self.recompute not in (choices := ("none", "selective", "full")):
            what = f"cannot recompute {self.recompute!r}"
            raise ConfigError(what, at="model.recompute", choices=choices, suggest_for=self.recompute)
        share = self.recompute_budget == 1 or (self.compile and 0 <= self.recompute_budget < 1)
        what = f"recompute_budget={self.recompute_budget} is no share that a compiler could keep to"
        require(share, what, "model.recompute_budget", "give a number from 0 to 1, and model.compile: true")
        even = self.head_dim is not None or self.hidden_size % (2 * self.num_heads) == 0
        what = f"hidden_size={self.hidden_size} does not give {self.num_heads} heads of an even width"
        require(even, what, "model.hidden_size", f"use a multiple of {2 * self.num_heads}, or give head_dim")
        even = self.head_width >= 2 and self.head_width % 2 == 0
        require(even, f"heads of a width of {self.head_width} cannot be turned", "model.head_dim", "use an even number")
        if self.sliding_window is not None:
            require_at_least(self, "model", sliding_window=1)
        shared = self.kv_heads >= 1 and self.num_heads % self.kv_heads == 0
        what = f"{self.num_heads} query heads cannot share {self.kv_heads} key heads evenly"
        require(shared, what, "model.num_kv_heads", f"use a divisor of {self.num_heads}")
        if self.vision is not None:  # the encoder drops pixels over at the edges, like SigLIP's
            what = f"patches of {self.patch_size} pixels do not fit into an image of {self.image_size}"
            require(self.image_size >= self.patch_size, what, "model.image_size", "give the encoder's, e.g. 224")
            return
        whole = self.image_size >= 0 and self.image_size % self.patch_size == 0
        what = f"an image of {self.image_size} pixels cannot be cut into patches of {self.patch_size}"
        require(whole, what, "model.patch_size", "use a divisor of image_size")

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_width(self) -> int:
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def prefix_length(self) -> int:
        """Number of tokens of an image of ``image_size``."""
        return self.image_tokens(self.image_size, self.image_size)

    def image_tokens(self, height: int, width: int) -> int:
        """Return the number of tokens of an image of the given size in pixels."""
        pooled = self.vision is not None and self.vision.pooling != "none"
        return 1 if pooled else (height // self.patch_size) * (width // self.patch_size)

    @property
    def image_grid(self) -> int:
        """Number of patches along a side of an image of ``image_size``."""
        return self.image_size // self.patch_size

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding table. They do not depend on the layout, so checkpoints fit every layout."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


def model_config_of(values: Mapping[str, Any]) -> ModelConfig:
    """Read the model section of a configuration in plain values; a weights-only checkpoint has no other.

    Raises:
        ConfigError: an unknown key, or an invalid value.
    """
    return read(from_plain(values.get("model", {}), "<dict>", "model"), ModelConfig)


def model_changes(there: ModelConfig, here: ModelConfig, ignore: Collection[str] = ()) -> list[tuple[str, Any, Any]]:
    """Return the settings by which two models compute differently, with both values."""
    ignore = {*ignore, *(_PREFIX if there.image_size == 0 else ())}
    # None stands for a value derived from other settings.
    same = {"num_kv_heads": there.kv_heads == here.kv_heads, "head_dim": there.head_width == here.head_width}
    compared = [name for name in MODEL_MEANING if name not in ignore and not same.get(name)]
    values = [(name, _meaning(there, name), _meaning(here, name)) for name in compared]
    return [(name, theirs, ours) for name, theirs, ours in values if theirs != ours]


def _meaning(config: ModelConfig, name: str) -> Any:
    """Return a setting; for an encoder, only its settings that determine the meaning of its weights."""
    value = getattr(config, name)
    return value.meaning() if isinstance(value, VisionConfig) else value
