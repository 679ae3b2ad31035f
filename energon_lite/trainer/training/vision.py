"""An image as a prefix: patches become tokens that stand before the text of their row."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from energon_lite.trainer.parallel.mesh import ParallelMesh
from energon_lite.trainer.parallel.parameters import ParameterLayout, new_parameter
from energon_lite.trainer.training.config import ModelConfig


class PatchEmbedding(nn.Module):
    """Cuts images into patches and maps each to a vector, plus a learned vector for its place.

    It is small, so every rank has all of it.

    Args:
        config: the model's shape; ``image_size`` and ``patch_size`` count.
        mesh: the ranks.
    """

    def __init__(self, config: ModelConfig, mesh: ParallelMesh):
        super().__init__()
        self.patch_size = config.patch_size
        pixels, hidden, std = 3 * config.patch_size**2, config.hidden_size, config.init_std
        # Pixels are not centred around zero with unit size as hidden states are; 1/sqrt(inputs) evens that out.
        projection = ParameterLayout((hidden, pixels), std=pixels**-0.5)
        self.weight = new_parameter(projection, mesh, config.torch_dtype)
        self.bias = new_parameter(ParameterLayout((hidden,)), mesh, config.torch_dtype)
        positions = ParameterLayout((config.prefix_length, hidden), std=std)
        self.position = new_parameter(positions, mesh, config.torch_dtype)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """``[n, 3, height, width]`` in [0, 1] -> ``[n, prefix, hidden]``, patches row by row."""
        patches = F.pixel_unshuffle(image.to(self.weight.dtype) - 0.5, self.patch_size).flatten(2).transpose(1, 2)
        return F.linear(patches, self.weight, self.bias) + self.position


def put_prefix(text: torch.Tensor, prefix: torch.Tensor, image_rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Put each image's tokens before the text of its row; rows without an image keep their text at the start.

    All rows stay flush left, with padding at the end only. Hence a row sees the same positions whatever it is batched
    with, and attention needs no mask besides the causal one.

    Args:
        text: ``[rows, length, hidden]``
        prefix: ``[images, prefix, hidden]``
        image_rows: ``[images]``, the row of each image; each row at most once.

    Returns:
        ``[rows, prefix + length, hidden]``, and ``[rows]`` true where a row has an image.
    """
    rows, _, hidden = text.shape
    length = prefix.shape[1]
    by_row = prefix.new_zeros(rows, length, hidden).index_copy(0, image_rows, prefix)
    has_image = torch.zeros(rows, dtype=torch.bool, device=text.device).index_fill(0, image_rows, True)
    with_image = torch.cat([by_row, text], dim=1)
    without = F.pad(text, (0, 0, 0, length))
    return torch.where(has_image[:, None, None], with_image, without), has_image


def shift_text(
    values: torch.Tensor, image_rows: torch.Tensor, prefix_length: int, *, before: torch.Tensor | int, behind: int
) -> torch.Tensor:
    """Put a value of each token where :func:`put_prefix` puts the token.

    Args:
        values: ``[rows, length]``, e.g. labels.
        image_rows: ``[images]``, the row of each image.
        prefix_length: tokens of an image.
        before: what stands at the image's tokens; a number, or one for each row ``[rows, 1]``.
        behind: what stands at the end of rows without image.

    Returns:
        ``[rows, prefix_length + length]``
    """
    rows, length = values.shape
    has_image = torch.zeros(rows, dtype=torch.bool, device=values.device).index_fill(0, image_rows, True)
    shifted = values.new_full((rows, prefix_length + length), behind)
    shifted[:, :length] = values
    with_image = torch.empty_like(shifted)
    with_image[:, :prefix_length] = before
    with_image[:, prefix_length:] = values
    return torch.where(has_image[:, None], with_image, shifted)


def place_images(
    text: torch.Tensor, images: torch.Tensor, image_rows: torch.Tensor, image_starts: torch.Tensor
) -> torch.Tensor:
    """Put each image's tokens over the ones that keep its place in a row; any number of images in a row.

    Args:
        text: ``[rows, length, hidden]``
        images: ``[images, prefix, hidden]``
        image_rows: int64 ``[images]``, the row of each image.
        image_starts: int64 ``[images]``, the position in the row at which it begins.

    Returns:
        ``[rows, length, hidden]``
    """
    positions = image_starts[:, None] + torch.arange(images.shape[1], device=text.device)
    return text.index_put((image_rows[:, None].expand_as(positions), positions), images)


def take_text(states: torch.Tensor, has_image: torch.Tensor, prefix_length: int) -> torch.Tensor:
    """The inverse of :func:`put_prefix`: the text part of each row, ``[rows, length, hidden]``."""
    length = states.shape[1] - prefix_length
    return torch.where(has_image[:, None, None], states[:, prefix_length:], states[:, :length])
