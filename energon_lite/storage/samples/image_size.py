"""Sizes of decoded images, as rules of the stored size.

A decoder that knows the size that is needed decodes a JPEG at a fraction of its size and resizes the result once. See
:class:`~energon_lite.storage.SampleDecoder` (argument ``image_size``) and
:func:`~energon_lite.storage.decode_to_size`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import numpy as np

from energon_lite.documents import Node, located, read
from energon_lite.errors import DecodeError, UsageError, at_least_one

#: Filters of the one resize. Both are antialiased when they reduce.
Resample = Literal["bicubic", "bilinear"]
#: Corners of crops are multiples of this number where that costs nothing: such crops can be decoded at any scale.
CORNERS = 8
#: Attempts to place a random crop inside of the image, as in torchvision.
_ATTEMPTS = 10
#: Largest ratio of the sides of an image that :class:`PatchBudget` accepts, as in Qwen2-VL.
_LONGEST_RATIO = 200


class Fitted(NamedTuple):
    """Size of the result for one image, and the part of the image that it shows.

    Attributes:
        height, width: size of the result in pixels.
        box: top, left, height and width of the part of the stored image; None: all of it.
    """

    height: int
    width: int
    box: tuple[int, int, int, int] | None = None


class ImageTarget(ABC):
    """Rule for the size of decoded images. Own rules are frozen dataclasses derived from this class.

    Attributes:
        resample: the filter.
        draws: :meth:`fit` draws random numbers, so the rule is for hooks.
    """

    resample: Resample = "bicubic"
    draws: ClassVar[bool] = False

    @abstractmethod
    def fit(self, height: int, width: int, rng: np.random.Generator | None) -> Fitted:
        """Return the size of the result for a stored image of this size."""


@dataclass(frozen=True)
class ImageSize(ImageTarget):
    """An exact size, whatever the ratio of the sides.

    Args:
        height, width: in pixels; without a width: a square.
        resample: the filter: ``bicubic`` or ``bilinear``.

    Example:
        >>> ImageSize(336).fit(768, 1024, None)
        Fitted(height=336, width=336, box=None)
    """

    height: int
    width: int | None = None
    resample: Resample = "bicubic"

    def __post_init__(self) -> None:
        at_least_one(height=self.height, width=self.width)
        _check_filter(self.resample)

    def fit(self, height: int, width: int, rng: np.random.Generator | None) -> Fitted:
        """Return this size."""
        return Fitted(self.height, self.width or self.height)


@dataclass(frozen=True)
class ShorterSide(ImageTarget):
    """Length of the shorter side. The ratio of the sides stays.

    Args:
        pixels: length of the shorter side.
        longest: limit of the longer side; where it applies, the shorter side is less than ``pixels``.
        resample: the filter: ``bicubic`` or ``bilinear``.

    Example:
        >>> ShorterSide(336).fit(768, 1024, None)[:2]
        (336, 448)
        >>> ShorterSide(336, longest=400).fit(768, 1024, None)[:2]
        (300, 400)
    """

    pixels: int
    longest: int | None = None
    resample: Resample = "bicubic"

    def __post_init__(self) -> None:
        at_least_one(pixels=self.pixels, longest=self.longest)
        _check_filter(self.resample)

    def fit(self, height: int, width: int, rng: np.random.Generator | None) -> Fitted:
        """Return the size, rounded down, as in torchvision."""
        short, long = self.pixels, self.pixels * max(height, width) // min(height, width)
        if self.longest is not None and long > self.longest:
            short, long = max(1, self.longest * short // long), self.longest
        return Fitted(short, long) if height <= width else Fitted(long, short)


@dataclass(frozen=True)
class PatchBudget(ImageTarget):
    """Sides that are multiples of a factor, with a number of pixels inside of limits, as Qwen2-VL resizes images.

    The ratio of the sides stays as near as this allows.

    Args:
        factor: sides are multiples of it: the size of a patch, times the number of patches that are merged.
        min_pixels, max_pixels: limits of height x width.
        resample: the filter: ``bicubic`` or ``bilinear``.

    Example:
        >>> PatchBudget(28, max_pixels=256 * 28 * 28).fit(768, 1024, None)[:2]
        (364, 504)
    """

    factor: int = 28
    min_pixels: int = 56 * 56
    max_pixels: int = 14 * 14 * 4 * 1280
    resample: Resample = "bicubic"

    def __post_init__(self) -> None:
        at_least_one(factor=self.factor, min_pixels=self.min_pixels, max_pixels=self.max_pixels)
        _check_filter(self.resample)
        if self.max_pixels < max(self.min_pixels, self.factor**2):
            raise UsageError(
                f"max_pixels is {self.max_pixels}, less than min_pixels, or than one patch of {self.factor} x "
                f"{self.factor}",
                fix="give a larger max_pixels",
            )

    def fit(self, height: int, width: int, rng: np.random.Generator | None) -> Fitted:
        """Return the size.

        Raises:
            DecodeError: one side is more than 200 times as long as the other.
        """
        if max(height, width) > _LONGEST_RATIO * min(height, width):
            raise DecodeError(
                f"is an image of {width} x {height} pixels, one side of which is more than {_LONGEST_RATIO} times as "
                "long as the other",
                fix="leave the sample out",
            )
        factor = self.factor
        high, wide = (round(side / factor) * factor for side in (height, width))
        if high * wide > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            high, wide = (max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width))
        elif high * wide < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            high, wide = (math.ceil(side * grow / factor) * factor for side in (height, width))
        return Fitted(high, wide)


@dataclass(frozen=True)
class RandomCrop(ImageTarget):
    """A random part of the image, resized to an exact size, as by torchvision's ``RandomResizedCrop``.

    Corners are multiples of 8 pixels, so that a JPEG can be decoded at a fraction of its size.

    Args:
        height, width: size of the result in pixels; without a width: a square.
        scale: least and largest share of the image's area.
        ratio: least and largest ratio of width to height, before the resize.
        resample: the filter: ``bicubic`` or ``bilinear``.

    Example:
        >>> image = decode_to_size(sample.image, RandomCrop(224), self.rng)  # in a hook
    """

    height: int
    width: int | None = None
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    resample: Resample = "bicubic"
    draws: ClassVar[bool] = True

    def __post_init__(self) -> None:
        at_least_one(height=self.height, width=self.width)
        _check_filter(self.resample)
        for name, (low, high) in {"scale": self.scale, "ratio": self.ratio}.items():
            if not 0 < low <= high:
                raise UsageError(f"{name} is {(low, high)}", fix="give the least and the largest value, above 0")

    def fit(self, height: int, width: int, rng: np.random.Generator | None) -> Fitted:
        """Return the size and a random part of the image."""
        if rng is None:
            raise UsageError("RandomCrop draws random numbers", fix="give a generator, such as self.rng of a hook")
        size = self.height, self.width or self.height
        for _ in range(_ATTEMPTS):
            area = height * width * rng.uniform(*self.scale)
            ratio = math.exp(rng.uniform(math.log(self.ratio[0]), math.log(self.ratio[1])))
            wide, high = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < wide <= width and 0 < high <= height:
                top, left = (int(rng.integers(room + 1)) for room in (height - high, width - wide))
                return Fitted(*size, (top - top % CORNERS, left - left % CORNERS, high, wide))
        ratio = min(max(width / height, self.ratio[0]), self.ratio[1])
        wide, high = min(width, max(1, round(height * ratio))), min(height, max(1, round(width / ratio)))
        top, left = (height - high) // 2, (width - wide) // 2
        return Fitted(*size, (top - top % CORNERS, left - left % CORNERS, high, wide))


def read_image_size(node: Node) -> ImageTarget:
    """Read a size from a document: ``336``, ``[height, width]``, or the arguments of one of the classes of this module.

    Raises:
        ConfigError: it is not a size.
    """
    with located(node):
        if isinstance(node.value, dict):
            classes: dict[str, type[ImageTarget]] = {"pixels": ShorterSide, "factor": PatchBudget}
            return read(node, next((cls for key, cls in classes.items() if key in node.value), ImageSize))
        if isinstance(node.value, list):
            if len(node.value) != 2:
                raise node.wrong("a list of height and width")
            return ImageSize(*(side.integer() for side in node.value))
        return ImageSize(node.integer())


def _check_filter(resample: str) -> None:
    if resample not in ("bicubic", "bilinear"):
        raise UsageError(f"resample {resample!r} is unknown", fix="give bicubic or bilinear")
