"""Configuration of a model and of its image encoder, as frozen dataclasses, and the shapes of known models by name.

``model: {preset: 1.1B}`` names a shape; other keys of the section take precedence.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from energon_lite.documents import from_plain, read
from energon_lite.errors import require, require_at_least, require_choice

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


#: Valid values, by setting.
VISION_CHOICES: dict[str, tuple[str, ...]] = {
    "kind": ("siglip", "clip"),
    "activation": ("gelu_pytorch_tanh", "gelu", "quick_gelu"),
    "pooling": ("none", "mean", "attention"),
    "projector": ("mlp", "linear"),
    "recompute": ("none", "selective", "full"),
}
#: Settings of computation or initialization, which do not change the meaning of the weights.
_NO_MEANING = ("tp", "recompute", "image_token")


@dataclass(frozen=True)
class VisionConfig:
    """Configuration of a vision transformer (Dosovitskiy et al., arXiv:2010.11929) and its projector.

    Args:
        kind: ``siglip`` (Zhai et al., arXiv:2303.15343), or ``clip`` (Radford et al., arXiv:2103.00020), which has a
            class token, a norm before the blocks, and no bias at the patches.
        hidden_size: width of the residual stream.
        num_layers: number of blocks.
        num_heads: number of attention heads; it divides ``hidden_size``.
        ffn_size: inner width of the feed-forward part.
        norm_eps: constant added to the variance in LayerNorm.
        activation: ``gelu_pytorch_tanh`` (SigLIP's), ``gelu`` or ``quick_gelu`` (CLIP's).
        head: True if there is SigLIP's pooling head, used or not.
        feature_layer: block whose output is the features: -1 for the last block, -2 for the one before (LLaVA), ...;
            None: the last block, normed. Later modules exist, to complete the encoder, but are not trained.
        pooling: ``none``: each patch is a token; ``mean``: the mean of the patches is one token; ``attention``: the
            output of SigLIP's head is one token. CLIP's class token is dropped in any case.
        projector: map from the encoder's width to the language model's: ``mlp``, two layers with GELU between them
            (LLaVA 1.5; Liu et al., arXiv:2310.03744), or ``linear``, one layer.
        image_mean, image_std: mean and deviation of the pixels' three channels, in [0, 1]; the encoder normalizes by
            these.
        image_token: placeholder token of images in rows; None for the padding token. Models exported to transformers
            need a distinct one.
        tp: tensor-parallel ranks of the encoder: None for those of the language model; 1: each of these holds all of it
            and encodes all images, which saves messages and costs memory.
        recompute: ``none``, ``selective`` or ``full``, as for the language model.

    Example:
        >>> VisionConfig(hidden_size=1024, num_layers=24, num_heads=16, ffn_size=4096, kind="clip", feature_layer=-2)
    """

    kind: str = "siglip"
    hidden_size: int = 768
    num_layers: int = 12
    num_heads: int = 12
    ffn_size: int = 3072
    norm_eps: float = 1e-6
    activation: str = "gelu_pytorch_tanh"
    head: bool = False
    feature_layer: int | None = -1
    pooling: str = "none"
    projector: str = "mlp"
    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_token: int | None = None
    tp: int | None = None
    recompute: str = "none"

    def __post_init__(self) -> None:
        at = "model.vision"
        require_at_least(self, at, hidden_size=1, num_layers=1, num_heads=1, ffn_size=1, image_token=0, norm_eps=0)
        for name, choices in VISION_CHOICES.items():
            value = getattr(self, name)
            require_choice(value, choices, f"unknown {name} {value!r}", f"{at}.{name}")
        even = self.hidden_size % self.num_heads == 0
        what = f"hidden_size={self.hidden_size} cannot be cut into {self.num_heads} heads"
        require(even, what, f"{at}.hidden_size", f"use a multiple of {self.num_heads}")
        there = self.feature_layer is None or -self.num_layers <= self.feature_layer <= -1
        what = f"there is no block {self.feature_layer} of {self.num_layers}"
        require(there, what, f"{at}.feature_layer", "count from the end: -1 is the last; null for the normed output")
        headless = not self.head or self.kind == "siglip"
        require(headless, "CLIP has no pooling head", f"{at}.head", "leave it out, or use kind: siglip")
        pooled = self.pooling != "attention" or (self.head and self.feature_layer is None)
        what = "pooling by attention is done by the head, from the normed output"
        require(pooled, what, f"{at}.pooling", "also set head: true and feature_layer: null")
        require(self.tp in (None, 1), f"tp={self.tp}", f"{at}.tp", "use 1, or null for the ranks of the language model")
        require(min(self.image_std) > 0, "a deviation is not above 0", f"{at}.image_std", "e.g. [0.5, 0.5, 0.5]")

    @property
    def used_layers(self) -> int:
        """Number of blocks up to the features."""
        return self.num_layers + 1 + (-1 if self.feature_layer is None else self.feature_layer)

    def meaning(self) -> dict[str, object]:
        """Return the settings that determine the meaning of the weights."""
        return {name: value for name, value in vars(self).items() if name not in _NO_MEANING}


@dataclass(frozen=True)
class RopeScaling:
    """Rotary frequencies for longer rows; see :func:`scaled_frequencies`.

    Args:
        factor: factor by which the slowest waves are stretched.
        low_frequency: waves with fewer turns than this in the old context are stretched by the whole factor.
        high_frequency: waves with more turns than this are kept; None for 4, or 32 by the rule ``yarn``.
        original_length: the old context, in tokens.
        kind: the rule: ``llama3``, ``yarn``, or ``linear``, by which all waves are stretched.
        attention_factor: factor of queries and of keys; None for 1, or ``0.1 * log(factor) + 1`` by the rule ``yarn``.
    """

    factor: float = 8.0
    low_frequency: float = 1.0
    high_frequency: float | None = None
    original_length: int = 8192
    kind: str = "llama3"
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        at = "model.rope_scaling"
        require_choice(self.kind, ("llama3", "yarn", "linear"), f"unknown kind {self.kind!r}", f"{at}.kind")
        yarn = self.kind == "yarn"
        high, size = self.high_frequency, self.attention_factor
        high = (32.0 if yarn else 4.0) if high is None else high
        size = (0.1 * math.log(max(self.factor, 1)) + 1 if yarn else 1.0) if size is None else size
        # Set here, so that a default equals the same number given.
        object.__setattr__(self, "high_frequency", high)
        object.__setattr__(self, "attention_factor", size)
        require(self.factor >= 1, f"factor={self.factor} would shrink rows", f"{at}.factor", "give a number >= 1")
        good = 0 < self.low_frequency < high
        require(good, "low_frequency is not below high_frequency", f"{at}.low_frequency", "e.g. 1 and 4")
        positive = size > 0 and (yarn or size == 1)
        what = f"attention_factor={size} with kind={self.kind}"
        require(positive, what, f"{at}.attention_factor", "leave it out, or give a number above 0 with kind: yarn")
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
    loss_chunk: int = 0

    def __post_init__(self) -> None:
        require_at_least(self, "model", hidden_size=1, num_layers=1, num_heads=1, ffn_size=1, vocab_size=1)
        require_at_least(self, "model", vocab_multiple=1, patch_size=1, loss_chunk=0)
        require_at_least(self, "model", rope_theta=1, norm_eps=0, init_std=0)
        known = self.dtype in DTYPES
        require(known, f"unknown dtype {self.dtype!r}", "model.dtype", f"use one of: {', '.join(DTYPES)}")
        choices, what = ("none", "selective", "full"), f"cannot recompute {self.recompute!r}"
        require_choice(self.recompute, choices, what, "model.recompute")
        share = self.recompute_budget == 1 or (self.compile and 0 <= self.recompute_budget < 1)
        what = f"recompute_budget={self.recompute_budget} is not a share that a compiler can obey"
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


def _shape(hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "num_layers": layers, "num_heads": heads, "ffn_size": ffn}
    return sizes | ({} if kv_heads == heads else {"num_kv_heads": kv_heads}) | more


_LLAMA = {"vocab_size": 32000}
_LLAMA_1 = _LLAMA | {"norm_eps": 1e-6}
_LLAMA_3 = {"vocab_size": 128256, "rope_theta": 500000.0}
_SCALING = {"low_frequency": 1.0, "high_frequency": 4.0, "original_length": 8192}
_LLAMA_31 = _LLAMA_3 | {"rope_scaling": {"factor": 8.0, **_SCALING}}
_LLAMA_32 = _LLAMA_3 | {"rope_scaling": {"factor": 32.0, **_SCALING}, "tie_embeddings": True}
_QWEN = {"rope_theta": 1000000.0}
_QWEN_25 = _QWEN | {"vocab_size": 152064, "qkv_bias": True, "norm_eps": 1e-5}
_QWEN_25_SMALL = _QWEN_25 | {"vocab_size": 151936, "norm_eps": 1e-6, "tie_embeddings": True}
_QWEN_3 = _QWEN | {"vocab_size": 151936, "qk_norm": True, "norm_eps": 1e-6, "head_dim": 128}
_QWEN_3_SMALL = _QWEN_3 | {"tie_embeddings": True}
#: Keys of :class:`ModelConfig`, as plain values. ``1.1B`` is TinyLlama's shape, ``160M`` JackFram's; ``30B`` and
#: ``65B`` are Llama's, the other plain sizes Llama 2's; ``mistral-7B`` is its third version, without sliding window.
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": _shape(64, 2, 4, 2, 160),
    "160M": _shape(768, 12, 12, 12, 3072, **_LLAMA),
    "1.1B": _shape(2048, 22, 32, 4, 5632, **_LLAMA),
    "7B": _shape(4096, 32, 32, 32, 11008, **_LLAMA),
    "13B": _shape(5120, 40, 40, 40, 13824, **_LLAMA),
    "30B": _shape(6656, 60, 52, 52, 17920, **_LLAMA_1),
    "65B": _shape(8192, 80, 64, 64, 22016, **_LLAMA_1),
    "70B": _shape(8192, 80, 64, 8, 28672, **_LLAMA),
    "llama-3-8B": _shape(4096, 32, 32, 8, 14336, **_LLAMA_3),
    "llama-3-70B": _shape(8192, 80, 64, 8, 28672, **_LLAMA_3),
    "llama-3.1-8B": _shape(4096, 32, 32, 8, 14336, **_LLAMA_31),
    "llama-3.1-70B": _shape(8192, 80, 64, 8, 28672, **_LLAMA_31),
    "llama-3.2-1B": _shape(2048, 16, 32, 8, 8192, **_LLAMA_32),
    "llama-3.2-3B": _shape(3072, 28, 24, 8, 8192, **_LLAMA_32),
    "qwen-2.5-0.5B": _shape(896, 24, 14, 2, 4864, **_QWEN_25_SMALL),
    "qwen-2.5-1.5B": _shape(1536, 28, 12, 2, 8960, **_QWEN_25_SMALL),
    "qwen-2.5-3B": _shape(2048, 36, 16, 2, 11008, **_QWEN_25_SMALL),
    "qwen-2.5-7B": _shape(3584, 28, 28, 4, 18944, **_QWEN_25 | {"norm_eps": 1e-6}),
    "qwen-2.5-14B": _shape(5120, 48, 40, 8, 13824, **_QWEN_25),
    "qwen-2.5-32B": _shape(5120, 64, 40, 8, 27648, **_QWEN_25),
    "qwen-2.5-72B": _shape(8192, 80, 64, 8, 29568, **_QWEN_25),
    "qwen-3-0.6B": _shape(1024, 28, 16, 8, 3072, **_QWEN_3_SMALL),
    "qwen-3-1.7B": _shape(2048, 28, 16, 8, 6144, **_QWEN_3_SMALL),
    "qwen-3-4B": _shape(2560, 36, 32, 8, 9728, **_QWEN_3_SMALL),
    "qwen-3-8B": _shape(4096, 36, 32, 8, 12288, **_QWEN_3),
    "qwen-3-14B": _shape(5120, 40, 40, 8, 17408, **_QWEN_3),
    "qwen-3-32B": _shape(5120, 64, 64, 8, 25600, **_QWEN_3),
    "mistral-7B": _shape(4096, 32, 32, 8, 14336, vocab_size=32768, rope_theta=1000000.0),
}


def model_preset(name: str, **changes: Any) -> ModelConfig:
    """Return the configuration of a known shape.

    Args:
        name: one of :data:`PRESETS`.
        changes: keys of :class:`ModelConfig` with other values.

    Raises:
        ConfigError: there is no such preset.

    Example:
        >>> model_preset("1.1B", dtype="bfloat16").num_kv_heads
        4
    """
    require_choice(name, PRESETS, f"there is no preset {name!r}", "model.preset")
    values = PRESETS[name] | changes
    if isinstance(scaling := values.get("rope_scaling"), dict):
        values["rope_scaling"] = RopeScaling(**scaling)
    return ModelConfig(**values)
