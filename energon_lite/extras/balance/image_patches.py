"""Number of patches that an encoder makes of an image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from energon_lite.batching.capacity import Ints, at_least_one
from energon_lite.errors import UsageError

__all__ = ["ImagePatches"]


@dataclass(frozen=True)
class ImagePatches:
    """Function from image sizes to numbers of patches, after the encoder's preprocessing.

    Args:
        patch_size: height and width of a patch, in pixels.
        image_size: each image is scaled to a square of this width in pixels; None: images keep their sizes.
        multiple: height and width are rounded to the nearest positive multiple of this number, as Qwen2-VL does with
            twice its patch size; None: incomplete patches at the edges are cut off.
        min_pixels, max_pixels: images of fewer or more pixels are scaled in proportion; None: no scaling.
            With ``multiple``, scaled sides are rounded up for the first, down for the second.

    Example:
        >>> ImagePatches(14, image_size=336)([[480, 640]]).tolist()
        [576]
        >>> ImagePatches(14, multiple=28, max_pixels=401_408)([[480, 640], [1080, 1920], [20, 30]]).tolist()
        [1564, 1976, 4]
    """

    patch_size: int
    image_size: int | None = None
    multiple: int | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None

    def __post_init__(self) -> None:
        at_least_one(patch_size=self.patch_size, image_size=self.image_size, multiple=self.multiple)
        at_least_one(min_pixels=self.min_pixels, max_pixels=self.max_pixels)
        if self.multiple is not None and self.multiple % self.patch_size:
            raise UsageError(
                f"multiple={self.multiple} is no multiple of patches of {self.patch_size}",
                fix=f"give e.g. {2 * self.patch_size}",
            )
        scaled = (self.multiple, self.min_pixels, self.max_pixels) != (None, None, None)
        if self.image_size is not None and scaled:
            raise UsageError("image_size goes together with no other size", fix="leave out multiple and pixels")

    def __call__(self, sizes: Any) -> Ints:
        """Number of patches of each image.

        Args:
            sizes: height and width in pixels, ``[images, 2]``.

        Returns:
            int64 ``[images]``.
        """
        sizes = np.asarray(sizes, dtype=np.int64).reshape(-1, 2)
        if self.image_size is not None:
            return np.full(len(sizes), (self.image_size // self.patch_size) ** 2, dtype=np.int64)
        patches: Ints = (self._scaled(sizes) // self.patch_size).prod(axis=1)
        return patches

    def _scaled(self, sizes: Ints) -> Ints:
        multiple = self.multiple or 1
        scaled = np.maximum(np.rint(sizes / multiple).astype(np.int64), 1) * multiple
        pixels, given = scaled.prod(axis=1), sizes.prod(axis=1)
        for limit, wrong, rounded in (
            (self.max_pixels, pixels > (self.max_pixels or 0), np.floor),
            (self.min_pixels, pixels < (self.min_pixels or 0), np.ceil),
        ):
            if limit is not None and wrong.any():
                scale = np.sqrt(limit / np.maximum(given[wrong], 1))[:, None]
                scaled[wrong] = np.maximum(rounded(sizes[wrong] * scale / multiple).astype(np.int64), 1) * multiple
        return scaled
