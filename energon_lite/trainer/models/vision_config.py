"""The shape of an image encoder, as a frozen dataclass."""

from __future__ import annotations

from dataclasses import dataclass

from energon_lite.errors import ConfigError, require, require_at_least

#: What may be said, by setting.
CHOICES: dict[str, tuple[str, ...]] = {
    "kind": ("siglip", "clip"),
    "activation": ("gelu_pytorch_tanh", "gelu", "quick_gelu"),
    "pooling": ("none", "mean", "attention"),
    "projector": ("mlp", "linear"),
    "recompute": ("none", "selective", "full"),
}
#: Settings that are how it is computed or begun, not what its weights mean.
_NO_MEANING = ("tp", "recompute", "image_token")


@dataclass(frozen=True)
class VisionConfig:
    """The shape of a vision transformer (Dosovitskiy et al., arXiv:2010.11929) and of what follows it.

    Args:
        kind: ``siglip`` (Zhai et al., arXiv:2303.15343), or ``clip`` (Radford et al., arXiv:2103.00020), which has a
            class token, a norm before the blocks, and no bias at the patches.
        hidden_size: width of the residual stream.
        num_layers: number of blocks.
        num_heads: of attention; they divide ``hidden_size``.
        ffn_size: inner width of the feed-forward part.
        norm_eps: added to the variance in LayerNorm.
        activation: ``gelu_pytorch_tanh`` (SigLIP's), ``gelu`` or ``quick_gelu`` (CLIP's).
        head: there is SigLIP's pooling head, be it used or not.
        feature_layer: whose output the features are: -1 that of the last block, -2 of the one before (LLaVA's), ...;
            None: that of the last block, normed. What comes behind is there, for the sake of a whole encoder, but does
            not learn.
        pooling: ``none``: each patch is a token; ``mean``: the mean of the patches is one; ``attention``: what
            SigLIP's head makes of them is one. CLIP's class token is left out in any case.
        projector: from its width to that of the language model: ``mlp``, two layers with GELU between them (LLaVA
            1.5's; Liu et al., arXiv:2310.03744), or ``linear``, one.
        image_mean, image_std: of the pixels' three channels, in [0, 1]; the encoder evens them out by these.
        image_token: the token that keeps an image's place in rows; None for that of padding. What transformers loads
            must have one of its own.
        tp: tensor-parallel ranks over which it is cut: None for those of the language model; 1: each of these has all
            of it and sees all images, which saves messages and costs memory.
        recompute: ``none``, ``selective`` or ``full``, as that of the language model.

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
            if (said := getattr(self, name)) not in choices:
                raise ConfigError(f"unknown {name} {said!r}", at=f"{at}.{name}", choices=choices, suggest_for=said)
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
        """Blocks up to the features."""
        return self.num_layers + 1 + (-1 if self.feature_layer is None else self.feature_layer)

    def meaning(self) -> dict[str, object]:
        """The settings that decide what the weights mean."""
        return {name: value for name, value in vars(self).items() if name not in _NO_MEANING}
