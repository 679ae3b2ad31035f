"""Operations of a transformer, counted from its shape."""

from __future__ import annotations

from dataclasses import dataclass

from energon_lite.errors import at_least_one


@dataclass(frozen=True)
class TransformerShape:
    """Sizes of a transformer, a language model or an image encoder, that determine its number of operations.

    Floating point operations are those of a training step: 6 for each weight of a matrix that a position is multiplied
    with (a multiplication and an addition, once forward and twice backward), and 12 for each layer, attention channel
    and pair of positions that attend to each other.

    Args:
        hidden_size: width of the residual stream.
        num_layers: number of blocks; 0: only the matrices of ``outer_weights``.
        num_heads: query heads.
        ffn_size: inner width of the feed-forward part.
        kv_heads: key and value heads; None: as many as query heads.
        head_width: width of a head; None: ``hidden_size / num_heads``.
        gated: the feed-forward part has three matrices, as in SwiGLU; False: two.
        causal: a position attends to itself and earlier ones; False: to all of its sequence.
        vocab_size: number of tokens of the output layer; 0: it has none.
        outer_weights: weights of other matrices that are applied to each position, such as those of patches.
        once_weights: weights of matrices that are applied once to a sequence, such as those after a pooling.

    Example:
        >>> shape = TransformerShape(hidden_size=4096, num_layers=32, num_heads=32, kv_heads=8, ffn_size=14336)
        >>> round(shape.position_flops / 1e9, 1), shape.pair_flops
        (41.9, 1572864)
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    ffn_size: int
    kv_heads: int | None = None
    head_width: int | None = None
    gated: bool = True
    causal: bool = True
    vocab_size: int = 0
    outer_weights: int = 0
    once_weights: int = 0

    def __post_init__(self) -> None:
        at_least_one(hidden_size=self.hidden_size, num_heads=self.num_heads, kv_heads=self.kv_heads)
        at_least_one(ffn_size=self.ffn_size, head_width=self.head_width, layers_and_one=self.num_layers + 1)

    @property
    def position_flops(self) -> int:
        """Operations for each position, without attention and the output layer."""
        width = self.hidden_size // self.num_heads if self.head_width is None else self.head_width
        kv_heads = self.num_heads if self.kv_heads is None else self.kv_heads
        attention = self.hidden_size * width * (2 * self.num_heads + 2 * kv_heads)
        ffn = (3 if self.gated else 2) * self.hidden_size * self.ffn_size
        return 6 * (self.num_layers * (attention + ffn) + self.outer_weights)

    @property
    def pair_flops(self) -> int:
        """Operations for each pair of positions of which one attends to the other."""
        width = self.hidden_size // self.num_heads if self.head_width is None else self.head_width
        return 12 * self.num_layers * self.num_heads * width

    @property
    def head_flops(self) -> int:
        """Operations of the output layer for each position whose logits are computed."""
        return 6 * self.hidden_size * self.vocab_size

    @property
    def sequence_flops(self) -> int:
        """Operations for each sequence, independent of its length."""
        return 6 * self.once_weights
