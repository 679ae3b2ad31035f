"""Chains of torchvision's geometric transforms as one warp.

The pixels are interpolated once, and no intermediate image is made.

>>> from torchvision import transforms as T
>>> augment = MergeTransform([T.RandomRotation(20), T.RandomResizedCrop(224), T.RandomHorizontalFlip()])
>>> augment(image).size
(224, 224)

Each transform becomes a mapper, which returns the movement of the points of the plane (a 3 x 3 matrix) and the new
size; the random numbers are those of torchvision. Needs torchvision. The idea is Megatron-Energon's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from energon_lite.errors import UsageError
from energon_lite.extras.tools.transforms.mappers import (
    CenterCropMapper,
    CustomTransform,
    Matrix,
    RandomCropMapper,
    RandomHorizontalFlipMapper,
    RandomPerspectiveMapper,
    RandomResizedCropMapper,
    RandomRotationMapper,
    RandomVerticalFlipMapper,
    ResizeMapper,
    Size,
    TransformMapper,
)

__all__ = [
    "CenterCropMapper",
    "CustomTransform",
    "MergeTransform",
    "RandomCropMapper",
    "RandomHorizontalFlipMapper",
    "RandomPerspectiveMapper",
    "RandomResizedCropMapper",
    "RandomRotationMapper",
    "RandomVerticalFlipMapper",
    "ResizeMapper",
    "TransformMapper",
]

#: Pillow's resampling filters by the values of torchvision's ``InterpolationMode``.
_PILLOW = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
}


class MergeTransform(torch.nn.Module):
    """Several transforms as one: their matrices are multiplied, and the pixels are interpolated once.

    The result differs from that of the transforms in sequence in two ways: it is sharper, and pixels that one transform
    moves out of the image and another moves back are not black.

    Args:
        transforms: ``Resize``, ``RandomResizedCrop``, ``CenterCrop``, ``RandomCrop``, ``RandomHorizontalFlip``,
            ``RandomVerticalFlip``, ``RandomRotation``, ``RandomPerspective`` of ``torchvision.transforms``, classes
            derived from them, or :class:`~energon_lite.extras.tools.transforms.CustomTransform`. Those with an
            interpolation must have the same one (bilinear if none has), and those with a fill value the same value.

    Raises:
        ValueError: a transform of another kind, or different interpolations or fill values.

    Example:
        >>> MergeTransform([T.RandomRotation(20), T.CenterCrop(64)])(image).size
        (64, 64)
    """

    def __init__(self, transforms: Sequence[torch.nn.Module | CustomTransform]):
        super().__init__()
        self.transforms = [_mapper(transform) for transform in transforms]
        self.interpolation = _common("interpolation", self.transforms)
        self.fill_value = _common("fill", self.transforms)

    def forward(self, x: Any) -> Any:
        """Warp an image.

        Args:
            x: a Pillow image, or a tensor of shape (..., channels, height, width).

        Raises:
            TypeError: ``x`` has another type.
        """
        if not isinstance(x, (Image.Image, torch.Tensor)):
            raise TypeError(f"MergeTransform takes a Pillow image or a tensor, not a {type(x).__name__}")
        size = (x.height, x.width) if isinstance(x, Image.Image) else x.shape[-2:]
        matrix, dst_size = np.eye(3), np.array(size, np.int64)
        for transform in self.transforms:
            matrix, dst_size, _ = transform.apply_transform(matrix, dst_size)
        back = np.linalg.inv(matrix)
        back /= back[2, 2]
        mode = "bilinear" if self.interpolation is None else self.interpolation.value
        if mode not in _PILLOW:
            raise NotImplementedError(f"interpolation {mode!r}: only {', '.join(_PILLOW)} can be merged")
        warp: Callable[..., Any] = _warp_image if isinstance(x, Image.Image) else _warp_tensor
        return warp(x, back, dst_size, mode, self.fill_value)


def _warp_image(image: Image.Image, back: Matrix, size: Size, mode: str, fill: Any) -> Image.Image:
    """Warp a Pillow image; ``back`` maps points of the new image to those of ``image``."""
    affine = np.allclose(back[2, :2], 0)
    method = Image.Transform.AFFINE if affine else Image.Transform.PERSPECTIVE
    if isinstance(fill, (int, float)):
        fill = (fill,) * len(image.getbands())
    numbers = back.flatten()[: 6 if affine else 8].tolist()
    color = None if fill is None else tuple(int(value) for value in fill)
    if color is not None and len(color) == 1:
        color = color[0]  # type: ignore[assignment]
    height, width = size.tolist()
    return image.transform((width, height), method, numbers, _PILLOW[mode], fillcolor=color)


def _warp_tensor(image: torch.Tensor, back: Matrix, size: Size, mode: str, fill: Any) -> torch.Tensor:
    """Warp a tensor; ``back`` maps points of the new image to those of ``image``."""
    height, width = size.tolist()
    *many, channels, rows, columns = image.shape
    x, y = torch.arange(width, dtype=torch.float64) + 0.5, torch.arange(height, dtype=torch.float64) + 0.5
    points = torch.stack([x.expand(height, -1), y[:, None].expand(-1, width), torch.ones(height, width)], -1)
    points = points @ torch.from_numpy(back).T
    # grid_sample places the image's borders at -1 and 1.
    grid = points[..., :2] / points[..., 2:] * torch.tensor([2 / columns, 2 / rows]) - 1
    pixels = image.reshape(-1, channels, rows, columns)
    floats = pixels if pixels.is_floating_point() else pixels.float()
    grid = grid.to(floats).expand(len(floats), -1, -1, -1)
    if fill is not None and np.any(fill):
        color = torch.as_tensor(fill).to(floats)[..., None, None]
        # Zero outside stands for the fill color, so the color is subtracted before and added after.
        warped = color + torch.nn.functional.grid_sample(floats - color, grid, mode, align_corners=False)
    else:
        warped = torch.nn.functional.grid_sample(floats, grid, mode, align_corners=False)
    if not pixels.is_floating_point():
        limits = torch.iinfo(pixels.dtype)
        warped = warped.round_().clamp_(limits.min, limits.max).to(pixels.dtype)
    return warped.reshape(*many, channels, height, width)


def _mapper(transform: Any) -> TransformMapper[Any]:
    if isinstance(transform, TransformMapper):
        return transform
    for mapper in _all_mappers(TransformMapper):
        if isinstance(transform, getattr(mapper, "source_type", ())):
            return mapper(transform)
    raise UsageError(
        f"MergeTransform cannot merge a {type(transform).__name__}",
        fix="apply it before or behind MergeTransform, or write it as a CustomTransform",
    )


def _all_mappers(base: Any) -> Iterator[type[TransformMapper[Any]]]:
    """Yield all mapper classes, the latest first, so that a user's mapper precedes ours."""
    for mapper in reversed(base.__subclasses__()):
        yield from _all_mappers(mapper)
        yield mapper


def _common(what: str, transforms: Sequence[TransformMapper[Any]]) -> Any:
    """Return the common value of all transforms that have one; None if none has."""
    given = [(value, transform) for transform in transforms if (value := getattr(transform, what)()) is not None]
    for value, transform in given[1:]:
        first, other = given[0]
        if value != first:
            raise UsageError(
                f"{type(other).__name__} has {what} {first}, {type(transform).__name__} has {value}: one warp has one",
                fix=f"give all of them the same {what}",
            )
    return given[0][0] if given else None
