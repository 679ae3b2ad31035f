"""Images among tokens: patches become vectors that stand where tokens keep their place."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from energon_lite.trainer.models.config import ModelConfig
from energon_lite.trainer.parallel.mesh import ParallelMesh
from energon_lite.trainer.parallel.parameters import ParameterLayout, new_parameter


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
