"""Decoding of an image at the size that is needed, in a hook, where a sample has its generator."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from energon_lite.errors import UsageError, did_you_mean
from energon_lite.storage.samples.decoding import SampleDecoder
from energon_lite.storage.samples.image_decoding import FORMATS, IMAGE_FORMS, decode_image
from energon_lite.storage.samples.image_size import ImageTarget


def decode_to_size(
    data: bytes,
    size: ImageTarget,
    rng: np.random.Generator | None = None,
    *,
    image_decode: str = "torchrgb8",
    max_unpacked_bytes: int | None = 1 << 30,
) -> Any:
    """Decode an image of any format of the web (JPEG, PNG, WebP, GIF, BMP) at the size that is needed, in a hook.

    Args:
        data: its bytes; ``SampleDecoder(image_decode=None)`` leaves them to the hook.
        size: the size, such as ``RandomCrop(224)``.
        rng: generator of the sample, for sizes that draw: ``self.rng``.
        image_decode: a key of :data:`IMAGE_FORMS`.
        max_unpacked_bytes: as for :class:`SampleDecoder`.

    Raises:
        DecodeError: the image is damaged, or too large.

    Example:
        >>> decode_to_size(sample.image, RandomCrop(224), self.rng).shape
        torch.Size([3, 224, 224])
    """
    form = IMAGE_FORMS.get(image_decode)
    if form is None:
        fix = did_you_mean(image_decode, IMAGE_FORMS, f"give one of {', '.join(IMAGE_FORMS)}", always=True)
        raise UsageError(f"image_decode {image_decode!r} is unknown", fix=fix)
    decode = partial(decode_image, *form, FORMATS["jpg"], max_unpacked_bytes, size, rng=rng)
    return SampleDecoder(handlers={"image": decode}).decode("image", data)
