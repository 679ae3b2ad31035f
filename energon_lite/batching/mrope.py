"""Three-dimensional positions for rows of text and images, for multimodal rotary embeddings (M-RoPE)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from energon_lite.errors import UsageError

__all__ = ["mrope_positions"]


def mrope_positions(length: int, starts: Sequence[int], grids: Sequence[Sequence[int]]) -> torch.Tensor:
    """Frame, row and column of each position of one sample, ``[3, length]``.

    Text positions count up by one, equal in all three dimensions. Each position of an image has its place in the grid,
    offset by the end of the text before it; the text after the image continues from the largest of these values.

    Args:
        length: positions of the sample. An image may be cut at the sample's end.
        starts: the first position of each image, ascending.
        grids: frames, rows and columns of each image or clip, in positions (after merging of patches into tokens).

    Returns:
        int64 ``[3, length]``.

    Raises:
        UsageError: images overlap, or the numbers of images and grids differ.

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
