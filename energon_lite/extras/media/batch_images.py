"""Images that leave the workers encoded, and are decoded where their batch goes: on a GPU, or by the processor.

A JPEG takes a tenth of its pixels' memory, so such batches are small until the hook ``encode_on_device`` has them.
Decoders of GPUs read the encoded bytes in the processor's memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from energon_lite.errors import DecodeError, UsageError
from energon_lite.storage import Fitted, ImageTarget, decode_to_size

logger = logging.getLogger(__name__)

Bytes = NDArray[np.uint8]
#: Decoder of a GPU: from encoded images to uint8 ``[3, height, width]`` on the device; None: it cannot decode one.
Backend = Callable[[Sequence[Bytes]], Sequence[torch.Tensor | None]]

_PROCESSOR = "the processor"
_JPEG = b"\xff\xd8\xff"
_EXIF = b"Exif\0\0"
#: Most bytes at the beginning of a JPEG that are searched for EXIF.
_HEAD = 1 << 16


class EncodedImages(tuple[Bytes, ...]):
    """Encoded images of a batch: a tuple of their bytes, which are in one buffer.

    It goes from worker to trainer without being copied by pickle, and ``loader.to(device)`` leaves it in the
    processor's memory.

    Args:
        images: bytes, or arrays of bytes.

    Attributes:
        data: all bytes, uint8.
        offsets: place of the first byte of each image, and the end; int64 ``[images + 1]``.

    Example:
        >>> images = EncodedImages([b"one", b"three"])
        >>> len(images), images.offsets.tolist(), bytes(images[1])
        (2, [0, 3, 8], b'three')
    """

    data: Bytes
    offsets: NDArray[np.int64]

    def __new__(cls, images: Iterable[bytes | Bytes] = ()) -> EncodedImages:
        parts = [np.frombuffer(image, dtype=np.uint8) for image in images]
        offsets = np.cumsum([0, *map(len, parts)], dtype=np.int64)
        return cls._of(np.concatenate([np.empty(0, np.uint8), *parts]), offsets)

    @classmethod
    def _of(cls, data: Bytes, offsets: NDArray[np.int64]) -> EncodedImages:
        made = super().__new__(cls, (data[start:stop] for start, stop in pairwise(offsets)))
        made.data, made.offsets = data, offsets
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return EncodedImages._of, (self.data, self.offsets)


class BatchImageDecoder:
    """Decoder of the images of a batch, for the hook ``encode_on_device``.

    On a GPU it uses nvImageCodec or torchcodec, whichever is installed; the processor decodes what they cannot, or all
    images if there is neither. Pixels of different decoders differ by a few levels, so states record the name. As the
    attribute ``device_decoder`` of a task encoder, it is prepared by ``loader.to(device)``; until then it is the
    processor. Orientations in EXIF are not applied.

    Args:
        size: size of all images, such as ``ImageSize(336)`` or ``RandomCrop(224)``.
        mean, std: values for each channel, of pixels in 0..1, by which pixels are normalised; None: uint8 pixels.
        dtype: of normalised pixels.
        damaged: for an image that no decoder can read: raise an ``"error"``, or make it ``"black"`` and count it.

    Attributes:
        name: name of the decoder.
        by_processor: number of images that the processor decoded in place of the GPU's decoder.
        blackened: number of damaged images that are black.

    Raises:
        UsageError: only one of mean and std is given.

    Example:
        >>> class Pictures(TaskEncoder):
        ...     decoder = SampleDecoder(image_decode=None)  # bytes
        ...     device_decoder = BatchImageDecoder(ImageSize(336), mean=(0.5,) * 3, std=(0.5,) * 3)
        ...
        ...     def encode_batch(self, batch):
        ...         return {"images": EncodedImages(batch.image)}
        ...
        ...     def encode_on_device(self, batch):
        ...         return {"pixels": self.device_decoder(batch["images"], self.rng)}
        >>> loader = get_savable_loader(dataset).to("cuda")
    """

    def __init__(
        self,
        size: ImageTarget,
        *,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        dtype: torch.dtype = torch.float32,
        damaged: Literal["error", "black"] = "error",
    ):
        if (mean is None) != (std is None):
            raise UsageError("one of mean and std is given", fix="give both, or none for uint8 pixels")
        self.size, self.dtype, self.damaged = size, dtype, damaged
        self._scale: torch.Tensor | None = None  # mean and std, on the device
        if mean is not None and std is not None:
            self._scale = torch.tensor([[*mean], [*std]], dtype=dtype).view(2, 3, 1, 1)
        self.name = _PROCESSOR
        self.by_processor = self.blackened = 0
        self._device = torch.device("cpu")
        self._backend: Backend | None = None

    def opened(self, device: torch.device) -> str:
        """Choose the decoder for a device; return its name."""
        self.name, self._device, self._backend = _PROCESSOR, device, None
        self._scale = None if self._scale is None else self._scale.to(device)
        reasons = []
        for name, open_backend in BACKENDS.items() if device.type == "cuda" else ():
            try:
                version, self._backend = open_backend(device)
            except (ImportError, OSError, RuntimeError) as error:  # not installed, or without its libraries
                reasons.append(f"{name}: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
                continue
            self.name = f"{name} {version}"
            return self.name
        if reasons:
            logger.warning("the processor decodes the images of batches on %s: %s", device, "; ".join(reasons))
        return self.name

    def __call__(self, images: Sequence[bytes | Bytes], rng: np.random.Generator | None = None) -> torch.Tensor:
        """Decode images: ``[images, 3, height, width]`` on the device.

        Args:
            images: :class:`EncodedImages`, or other sequences of bytes.
            rng: generator for sizes that draw: ``self.rng``.

        Raises:
            DecodeError: an image is damaged, or too large.
            UsageError: the size draws, and there is no generator.
        """
        parts = [np.frombuffer(image, dtype=np.uint8) for image in images]
        seeds = [0] * len(parts)
        if self.size.draws:  # one for each image, so that crops do not depend on the decoder
            if rng is None:
                raise UsageError(f"{type(self.size).__name__} draws random numbers", fix="give self.rng of the hook")
            seeds = rng.integers(1 << 63, size=len(parts)).tolist()
        decoded = self._backend(parts) if self._backend is not None and parts else [None] * len(parts)
        made = [self._one(*one) for one in zip(range(len(parts)), parts, decoded, seeds, strict=True)]
        pixels = torch.stack(made) if made else self._black()[None][:0]
        if pixels.device != self._device:
            pixels = pixels.pin_memory().to(self._device, non_blocking=True)
        if self._scale is None:
            return pixels
        mean, std = self._scale
        return pixels.to(self.dtype).div_(255).sub_(mean).div_(std)

    def _one(self, place: int, data: Bytes, decoded: torch.Tensor | None, seed: int) -> torch.Tensor:
        """Return the pixels of one image, of the size."""
        rng = np.random.Generator(np.random.Philox(key=seed)) if self.size.draws else None
        if decoded is not None:
            _, height, width = decoded.shape
            return _resized(decoded, self.size.fit(height, width, rng), self.size.resample)
        self.by_processor += self._backend is not None
        try:
            made: torch.Tensor = decode_to_size(data.tobytes(), self.size, rng)
        except DecodeError as error:
            if self.damaged == "error":
                raise DecodeError(f"image {place} of the batch: {error.what}", fix=error.fix) from error
            if not self.blackened:
                logger.warning("image %d of a batch is made black (logged once): %s", place, error.what)
            self.blackened += 1
            made = self._black()
        return made.to(self._stacked_on)

    @property
    def _stacked_on(self) -> torch.device:
        """Device on which the images become a batch."""
        return torch.device("cpu") if self._backend is None else self._device

    def _black(self) -> torch.Tensor:
        fitted = self.size.fit(64, 64, np.random.default_rng(0))
        return torch.zeros((3, fitted.height, fitted.width), dtype=torch.uint8, device=self._stacked_on)

    def __getstate__(self) -> dict[str, Any]:
        # Workers may be started by spawn, and never decode.
        scale = None if self._scale is None else self._scale.cpu()
        return self.__dict__ | {
            "_backend": None,
            "_device": torch.device("cpu"),
            "_scale": scale,
            "name": _PROCESSOR,
        }


def _resized(image: torch.Tensor, fitted: Fitted, resample: str) -> torch.Tensor:
    """Return a part of an image, resized once, antialiased: uint8."""
    if fitted.box is not None:
        top, left, height, width = fitted.box
        image = image[:, top : top + height, left : left + width]
    size = fitted.height, fitted.width
    if tuple(image.shape[1:]) == size:
        return image
    resized = torch.nn.functional.interpolate(image[None].float(), size, mode=resample, antialias=True)
    return resized[0].round_().clamp_(0, 255).to(torch.uint8)


def _open_nvimgcodec(device: torch.device) -> tuple[str, Backend]:
    from nvidia import nvimgcodec

    decoder = nvimgcodec.Decoder(device_id=device.index)
    params = nvimgcodec.DecodeParams(apply_exif_orientation=False, color_spec=nvimgcodec.ColorSpec.SRGB)

    def decode(images: Sequence[Bytes]) -> list[torch.Tensor | None]:
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        made = decoder.decode(list(images), params=params, cuda_stream=stream)
        return [None if one is None else torch.as_tensor(one, device=device).permute(2, 0, 1) for one in made]

    return nvimgcodec.__version__, decode


def _open_torchcodec(device: torch.device) -> tuple[str, Backend]:
    import torchcodec
    from torchcodec.decoders import decode_jpeg

    def decode(images: Sequence[Bytes]) -> list[torch.Tensor | None]:
        places = [place for place, image in enumerate(images) if image[:3].tobytes() == _JPEG]
        jpegs = [torch.from_numpy(_without_exif(images[place])) for place in places]
        made: list[torch.Tensor | None] = [None] * len(images)
        try:
            found = decode_jpeg(jpegs, mode="RGB", device=device) if jpegs else []
        except RuntimeError:  # one of them; it does not say which
            return made if len(images) == 1 else [decode([image])[0] for image in images]
        for place, image in zip(places, found, strict=True):
            made[place] = image
        return made

    return torchcodec.__version__, decode


def _without_exif(image: Bytes) -> Bytes:
    """Return a copy of a JPEG without the mark of EXIF, whose orientation this decoder would apply."""
    image = image.copy()
    place = image[:_HEAD].tobytes().find(_EXIF)
    if place >= 0:
        image[place] = 0
    return image


#: Decoders of GPUs by name, in the order in which they are tried; each returns its version.
BACKENDS: dict[str, Callable[[torch.device], tuple[str, Backend]]] = {
    "nvImageCodec": _open_nvimgcodec,
    "torchcodec": _open_torchcodec,
}
