"""Resizing of one image: the scale at which it is decoded, and the one resize after it.

A JPEG is made of blocks of 8 x 8 coefficients, of which 4 x 4, 2 x 2 or 1 make an image of half, a quarter or an eighth
of the size, for less work. (libjpeg-turbo has other scales too, but the full size takes less time than these.) The
blocks cut off high frequencies, and the filter of the resize does the rest, so the result is near to that of decoding
all pixels.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from energon_lite.storage.samples.image_size import ImageTarget

#: The decoded image is larger than needed by at least this factor, for each divisor of its size. The less the resize
#: reduces, the less of its filter is left, and the larger is the difference from decoding all pixels.
MARGINS = {8: 2.0, 4: 1.5, 2: 1.125}
#: Sides of results, in pixels, below which all pixels are decoded: each of so few pixels would differ more.
_LEAST_SIDE = 16


class Resizing:
    """Resizing of one image to a target.

    Args:
        target: the rule for its size.
        rng: generator of the sample, for targets that draw.
    """

    def __init__(self, target: ImageTarget, rng: np.random.Generator | None) -> None:
        self._target = target
        self._rng = rng
        self._size: tuple[int, int] | None = None
        self._box = (0, 0, 0, 0)
        self._divisor = 1

    def fit(self, height: int, width: int, *, divisible: bool) -> int:
        """Return the number by which both sides are divided when the image is decoded: 8, 4, 2 or 1.

        Args:
            height, width: size of the stored image in pixels.
            divisible: the decoder can divide.
        """
        if self._size is None:  # once: a second decoder, for a damaged image, must not draw again
            *size, box = self._target.fit(height, width, self._rng)
            self._size, self._box = (size[0], size[1]), box or (0, 0, height, width)
        top, left, high, wide = self._box
        reduced = min(high / self._size[0], wide / self._size[1])
        fitting = (n for n, margin in MARGINS.items() if reduced >= n * margin and not (top % n or left % n))
        self._divisor = next(fitting, 1) if divisible and min(self._size) >= _LEAST_SIDE else 1
        return self._divisor

    def resize(self, pixels: Any, *, planar: bool) -> Any:
        """Resize the decoded image.

        Args:
            pixels: uint8 ``[height, width]`` or ``[height, width, channels]``, of the size that :meth:`fit` returned.
                With four channels, the last one is opacity, and the colours are weighted by it.
            planar: return ``[channels, height, width]``.

        Returns:
            A new array, contiguous.
        """
        assert self._size is not None
        top, left, high, wide = (side / self._divisor for side in self._box)
        # The last row and column of a divided image may be parts of a pixel: its size is not the box's.
        part = pixels[int(top) : math.ceil(top + high), int(left) : math.ceil(left + wide)]
        if part.shape[2:] == (4,):
            from PIL import Image

            method = Image.Resampling[self._target.resample.upper()]
            array = np.array(Image.fromarray(part).resize(self._size[::-1], method, (0, 0, wide, high)))
            return array.transpose(2, 0, 1).copy() if planar else array
        import torch

        kernels, is_grey = torch.ops.aten, part.ndim == 2
        bilinear = self._target.resample == "bilinear"
        kernel = kernels._upsample_bilinear2d_aa if bilinear else kernels._upsample_bicubic2d_aa
        source = torch.from_numpy(part[..., None] if is_grey else part).permute(2, 0, 1)[None]
        scale = self._size[0] / high, self._size[1] / wide
        if planar or is_grey:
            resized = kernel(source, self._size, False, *scale)[0].contiguous().numpy()
            return resized[0] if is_grey else resized
        resized = torch.empty(1, *self._size, 3, dtype=torch.uint8)
        kernel.out(source, self._size, False, *scale, out=resized.permute(0, 3, 1, 2))
        return resized[0].numpy()
