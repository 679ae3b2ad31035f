"""Chains of torchvision's geometric transforms as one warp.

The pixels are interpolated once, and no intermediate image is made.

>>> from torchvision import transforms as T
>>> augment = MergeTransform([T.RandomRotation(20), T.RandomResizedCrop(224), T.RandomHorizontalFlip()])
>>> augment(image).size
(224, 224)

Each transform becomes a mapper, which returns the movement of the points of the plane (a 3 x 3 matrix) and the new
size; the random numbers are those of torchvision. Needs torchvision. The idea is Megatron-Energon's.
"""

from energon_lite.extras.tools.transforms.mappers import (
    CenterCropMapper,
    CustomTransform,
    RandomCropMapper,
    RandomHorizontalFlipMapper,
    RandomPerspectiveMapper,
    RandomResizedCropMapper,
    RandomRotationMapper,
    RandomVerticalFlipMapper,
    ResizeMapper,
    TransformMapper,
)
from energon_lite.extras.tools.transforms.merge import MergeTransform

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
