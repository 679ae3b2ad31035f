"""Positions in three dimensions for rows of text and images, as multimodal rotary embeddings (M-RoPE) take them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from energon_lite.errors import UsageError

__all__ = ["mrope_positions"]


def mrope_positions(length: int, starts: Sequence[int], grids: Sequence[Sequence[int]]) -> torch.Tensor:
    """Frame, row and column of each position of one sample.

    Text counts on by one, in all three alike. Of an image, each position has the place in its grid, from where the text
    before it ended; the text behind it goes on behind the largest of these.

    Args:
        length: positions of the sample. An image may be cut at its end.
        starts: the position at which each image begins, ascending.
        grids: of each image or clip, its frames, rows and columns, in positions: a token is what is merged into one.

    Returns:
        int64 ``[3, length]``.

    Raises:
        UsageError: images overlap, or do not go together with their grids.

    Example:
        >>> mrope_positions(8, [1], [(1, 2, 2)])  # a token, an image of two rows and columns, three tokens
        tensor([[0, 1, 1, 1, 1, 3, 4, 5],
                [0, 1, 1, 2, 2, 3, 4, 5],
                [0, 1, 2, 1, 2, 3, 4, 5]])
    """
    if len(starts) != len(grids):
        raise UsageError(f"{len(starts)} images have {len(grids)} grids", fix="give a grid for each image")
    parts: list[torch.Tensor] = []
    at = following = 0
    for start, (frames, rows, columns) in zip(starts, grids, strict=True):
        if not at <= start <= length:
            raise UsageError(
                f"an image begins at position {start}, where the one before it ends at {at}, of {length} in all",
                fix="give the images of one sample, in their order",
            )
        parts.append(torch.arange(following, following + start - at).expand(3, -1))
        following += start - at
        axes = (torch.arange(size) + following for size in (frames, rows, columns))
        parts.append(torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1)[:, : length - start])
        at = start + frames * rows * columns
        following += max(frames, rows, columns)
    parts.append(torch.arange(following, following + max(0, length - at)).expand(3, -1))
    return torch.cat(parts, dim=1)
