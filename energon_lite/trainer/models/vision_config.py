"""Configuration of an image encoder, as a frozen dataclass."""

from __future__ import annotations

from dataclasses import dataclass

from energon_lite.errors import ConfigError, require, require_at_least

#: Valid values, by setting.
CHOICES: dict[str, tuple[str, ...]] = {
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
        require_at_least(self, at, hidden_size=1, num_layers=1, num_heads=1, ffn_size=1, image_token=0)
        for name, choices in CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise ConfigError(f"unknown {name} {value!r}", at=f"{at}.{name}", choices=choices, suggest_for=value)
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
        require(pooled, what, f"{at}.pooling", "set head: true and feature_layer: null beside it")
        require(self.tp in (None, 1), f"tp={self.tp}", f"{at}.tp", "use 1, or null for the ranks of the language model")
        require(min(self.image_std) > 0, "a deviation is not above 0", f"{at}.image_std", "e.g. [0.5, 0.5, 0.5]")

    @property
    def used_layers(self) -> int:
        """Number of blocks up to the features."""
        return self.num_layers + 1 + (-1 if self.feature_layer is None else self.feature_layer)

    def meaning(self) -> dict[str, object]:
        """Return the settings that determine the meaning of the weights."""
        return {name: value for name, value in vars(self).items() if name not in _NO_MEANING}
