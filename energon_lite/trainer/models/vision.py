"""Insertion of encoded images into rows of tokens, at their placeholders."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from energon_lite.errors import UsageError
from energon_lite.trainer.models.config import ModelConfig
from energon_lite.trainer.models.vision_transformer import VisionTransformer
from energon_lite.trainer.parallel.mesh import ParallelMesh
from energon_lite.trainer.parallel.parameters import ParameterLayout, new_parameter


def make_vision(config: ModelConfig, mesh: ParallelMesh) -> nn.Module | None:
    """Make a model's encoder: images ``[n, 3, height, width]`` -> ``[n, tokens, width]``; None for none."""
    if not config.image_size:
        return None
    return PatchEmbedding(config, mesh) if config.vision is None else VisionTransformer(config, mesh)


class PatchEmbedding(nn.Module):
    """Linear embedding of image patches, plus a learned vector for each position.

    It is small, so every rank has all of it.

    Args:
        config: the model's shape; ``image_size`` and ``patch_size`` are used.
        mesh: the ranks.
    """

    def __init__(self, config: ModelConfig, mesh: ParallelMesh):
        super().__init__()
        self.patch_size = config.patch_size
        self.image_size = config.image_size
        pixels = 3 * config.patch_size**2
        hidden = config.hidden_size
        # Pixels, unlike hidden states, do not have zero mean and unit variance; 1/sqrt(inputs) compensates for that.
        projection = ParameterLayout((hidden, pixels), std=pixels**-0.5)
        self.weight = new_parameter(projection, mesh, config.torch_dtype)
        self.bias = new_parameter(ParameterLayout((hidden,)), mesh, config.torch_dtype)
        positions = ParameterLayout((config.prefix_length, hidden), std=config.init_std)
        self.position = new_parameter(positions, mesh, config.torch_dtype)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Embed ``[n, 3, height, width]`` in [0, 1] -> ``[n, prefix, hidden]``, patches row by row.

        Raises:
            UsageError: the images have another size than that of the model.
        """
        if tuple(image.shape[-2:]) != (self.image_size, self.image_size):
            what = f"images of {image.shape[-2]} x {image.shape[-1]} pixels in a model of {self.image_size}"
            raise UsageError(what, fix="bring them to size, or set model.vision: its positions fit any size")
        patches = F.pixel_unshuffle(image.to(self.weight.dtype) - 0.5, self.patch_size).flatten(2).transpose(1, 2)
        return F.linear(patches, self.weight, self.bias) + self.position


#: Images of a micro-batch -> the tokens of all of them, concatenated, and the number of tokens of each.
Exchange = Callable[[torch.Tensor], tuple[torch.Tensor, list[int]]]


def encode_images(
    images: Sequence[torch.Tensor], encoder: nn.Module, projector: nn.Module | None
) -> tuple[torch.Tensor, list[int]]:
    """Encode images of any sizes, those of one size together.

    Args:
        images: at least one image, ``[3, height, width]`` each.
        encoder: result of :func:`make_vision`.
        projector: map from the encoder's width to that of the text.

    Returns:
        The tokens of all images, concatenated, ``[tokens, hidden]``; and the number of tokens of each.
    """
    by_size: dict[torch.Size, list[int]] = {}
    for number, image in enumerate(images):
        by_size.setdefault(image.shape, []).append(number)
    made: dict[int, torch.Tensor] = {}
    for numbers in by_size.values():
        tokens = encoder(torch.stack([images[number] for number in numbers]))
        made |= zip(numbers, (tokens if projector is None else projector(tokens)).unbind(), strict=True)
    return torch.cat([made[number] for number in range(len(images))]), [len(made[n]) for n in range(len(images))]


def place_tokens(
    text: torch.Tensor, tokens: torch.Tensor, counts: list[int], rows: torch.Tensor, starts: torch.Tensor
) -> torch.Tensor:
    """Insert image tokens at their placeholders; a row may have any number of images.

    Args:
        text: ``[rows, length, hidden]``
        tokens: tokens of all images, ``[tokens, hidden]``.
        counts: number of tokens of each image.
        rows, starts: see :class:`MultimodalBatch`.

    Returns:
        ``[rows, length, hidden]``
    """
    # From pinned memory, and with known sizes, so that the host does not wait for the device.
    each = torch.tensor(counts, dtype=torch.int64, pin_memory=text.is_cuda).to(text.device, non_blocking=True)
    numbers = torch.arange(len(counts), device=text.device)
    number = torch.repeat_interleave(numbers, each, output_size=sum(counts))
    inside = torch.arange(len(number), device=text.device) - (each.cumsum(0) - each)[number]
    return text.index_put((rows[number], starts[number] + inside), tokens)
