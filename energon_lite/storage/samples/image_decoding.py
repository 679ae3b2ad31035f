"""Decoding of images: the formats of each extension, and the forms of the result.

Pillow recognises formats by the bytes and not by the name. Some of its formats run programs, so for each extension it
gets the formats that it may try.
"""

from __future__ import annotations

import io
import math
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from energon_lite.errors import DecodeError, FatalSampleError
from energon_lite.storage.samples.image_size import ImageTarget

#: ``image_decode``: (container, dtype, mode). Torch images are ``[channels, height, width]`` (grey images
#: ``[height, width]``), numpy ones ``[height, width, channels]``; floats are float32 in 0 .. 1.
IMAGE_FORMS: dict[str, tuple[str, str, str]] = {
    "l8": ("numpy", "uint8", "L"),
    "rgb8": ("numpy", "uint8", "RGB"),
    "rgba8": ("numpy", "uint8", "RGBA"),
    "l": ("numpy", "float", "L"),
    "rgb": ("numpy", "float", "RGB"),
    "rgba": ("numpy", "float", "RGBA"),
    "torchl8": ("torch", "uint8", "L"),
    "torchrgb8": ("torch", "uint8", "RGB"),
    "torchrgba8": ("torch", "uint8", "RGBA"),
    "torchl": ("torch", "float", "L"),
    "torchrgb": ("torch", "float", "RGB"),
    "torch": ("torch", "float", "RGB"),
    "torchrgba": ("torch", "float", "RGBA"),
    "pill": ("pil", "", "L"),
    "pil": ("pil", "", "RGB"),
    "pilrgb": ("pil", "", "RGB"),
    "pilrgba": ("pil", "", "RGBA"),
}

#: Image formats of the web. Their names are often mixed up, so the extension of one means any of them.
_WEB = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
#: Other formats of extensions, by Pillow's names; most equal the extension.
_NAMED_ALIKE = "BLP CUR DCX DDS DIB GBR ICNS ICO IM MSP PCD PCX PSD XBM XPM".split()  # noqa: SIM905
FORMATS = {
    extension: (kind,)
    for kind, extensions in {
        **{kind: kind.lower() for kind in _NAMED_ALIKE},
        "FITS": "fit fits",
        "FLI": "flc fli",
        "FTEX": "ftc ftu",
        "JPEG2000": "j2c j2k jp2 jpc jpf jpx",
        "PIXAR": "pxr",
        "PPM": "pbm pgm pnm ppm",
        "SGI": "bw rgb rgba sgi",
        "SUN": "ras",
        "TGA": "icb tga vda vst",
        "TIFF": "tif tiff",
    }.items()
    for extension in extensions.split()
} | dict.fromkeys("apng bmp gif jfif jpe jpeg jpg png webp".split(), _WEB)  # noqa: SIM905
#: Images whose reading can start another program: PostScript, and IPTC, in which Pillow opens any format.
PROGRAMS = {"ps": ("EPS",), "eps": ("EPS",), "iim": ("IPTC",)}
#: Extensions of images, valid in lower and upper case.
IMAGE_EXTENSIONS = frozenset([*FORMATS, "iim"])
_JPEG = b"\xff\xd8\xff"
#: Formats whose size and mode Pillow knows from the header; in other formats they may change when the image is loaded.
_KNOWN_BY_HEADER = frozenset(["JPEG", "PNG", "WEBP", "BMP", "GIF"])
#: Formats that Pillow tries; PostScript is excluded, because Pillow starts a program for it.
_READ_BY_HEADER = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "ICO", "JPEG2000")


def check_size(unpacked: int, most: int | None, what: str = "") -> None:
    """Check the size that a part unpacks to, in bytes.

    Raises:
        DecodeError: it exceeds ``most``.
    """
    if most is not None and unpacked > most:
        raise DecodeError(
            f"unpacks to more than {most} bytes{what}, which is more than is taken from a sample",
            fix="leave the sample out, or give SampleDecoder(max_unpacked_bytes=...) if it is meant to be so large",
        )


def decode_image(
    container: str,
    dtype: str,
    mode: str,
    formats: tuple[str, ...],
    most: int | None,
    size: ImageTarget | None,
    data: bytes,
    rng: np.random.Generator | None = None,
) -> Any:
    """Decode an image into one of the forms of :data:`IMAGE_FORMS`.

    Args:
        formats: the formats it may have, by Pillow's names.
        most: limit of the size in bytes before it is resized, with one for each channel of a pixel; None: no limit.
        size: rule for the size of the result; None: the stored size.
        rng: generator of the sample, for rules that draw.

    Raises:
        DecodeError: the image exceeds the limit. Other defects raise other exceptions.
    """
    resizing = None if size is None else Resizing(size, rng)
    pixels: Any = None
    if mode == "RGB" and (container != "pil" or resizing) and "JPEG" in formats and data.startswith(_JPEG):
        pixels = _decode_jpeg(data, most, resizing)
    if pixels is None:
        image = _decode_with_pillow(mode, formats, most, data, resizing)
        if container == "pil" and resizing is None:
            return image
        pixels = np.asarray(image) if resizing is None else np.array(image)  # torch takes writable arrays only
    if resizing is not None:
        pixels = resizing.resize(pixels, opacity=mode == "RGBA")
        if container == "pil":
            from PIL import Image

            return Image.fromarray(pixels)
    if container == "torch" and pixels.ndim == 3:
        pixels = pixels.transpose(2, 0, 1)
    # One pass that scales and moves the channels to the front; a division, for the same bits as in Energon.
    if dtype == "float":
        pixels = np.divide(pixels, np.float32(255), dtype=np.float32, order="C")
    elif not (pixels.flags.writeable and pixels.flags.c_contiguous):
        pixels = pixels.copy(order="C")
    if container == "numpy":
        return pixels
    import torch

    return torch.from_numpy(pixels)


def _check_pixels(width: int, height: int, channels: int, most: int | None) -> None:
    check_size(width * height * channels, most, f" ({width} x {height} pixels)")


def _decode_with_pillow(
    mode: str, formats: tuple[str, ...], most: int | None, data: bytes, resizing: Resizing | None
) -> Any:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data), formats=formats) as opened:
            width, height = opened.size
            _check_pixels(width, height, max(len(mode), len(opened.getbands())), most)
            if resizing is not None:
                # Inks are no amounts of light: to reduce them before they are converted gives other colours.
                is_divisible = opened.format == "JPEG" and opened.mode in ("RGB", "L")
                divisor = resizing.fit(height, width, divisible=is_divisible)
                if divisor > 1:
                    opened.draft(None, (width // divisor, height // divisor))
            opened.load()
            return opened.convert(mode)
    except UnidentifiedImageError:  # its text only names an object in memory
        raise ValueError(f"these bytes are not an image as the name means ({', '.join(formats)})") from None


def _decode_jpeg(data: bytes, most: int | None, resizing: Resizing | None) -> Any:
    """Decode ``[height, width, 3]`` uint8 by simplejpeg; None: it is not installed, or the image is left to Pillow.

    Both use libjpeg-turbo with its accurate settings, and give the same pixels for the images that simplejpeg gets
    here: colours as luma and chroma, or grey. So its installation changes only the time.
    """
    try:
        import simplejpeg
    except ImportError:
        return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
        if colours not in ("YCbCr", "Gray"):
            return None
        _check_pixels(width, height, 3, most)
        if resizing is None:
            return simplejpeg.decode_jpeg(data, "RGB")
        divisor = resizing.fit(height, width, divisible=True)
        return simplejpeg.decode_jpeg(data, "RGB", min_height=-(-height // divisor), min_width=-(-width // divisor))
    except DecodeError:
        raise
    except ValueError:  # damaged: Pillow decides if it can be decoded
        return None


class ImageHeader(NamedTuple):
    """Properties of an image.

    Attributes:
        width, height: size in pixels.
        format, mode: Pillow's names.
    """

    width: int
    height: int
    format: str
    mode: str


def read_image_header(stream: BinaryIO) -> ImageHeader:
    """Return the properties of an image, by Pillow.

    Raises:
        DecodeError: the image is damaged, or has an unknown format.
        FatalSampleError: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        fix = "pip install 'energon-lite[image]'"
        raise FatalSampleError(f"the metadata of pictures needs Pillow: {error}", fix=fix) from error
    try:
        with Image.open(stream, formats=_READ_BY_HEADER) as image:
            if image.format not in _KNOWN_BY_HEADER:
                image.load()
            return ImageHeader(image.width, image.height, image.format or "UNKNOWN", image.mode or "UNKNOWN")
    except Exception as error:  # decoders raise exceptions of all kinds
        raise DecodeError(
            f"the picture cannot be read: {type(error).__name__}: {error}", fix="repair or remove it"
        ) from error


# -- resizing --------------------------------------------------------------------------------------------------------
#
# A JPEG is made of blocks of 8 x 8 coefficients, of which 4 x 4, 2 x 2 or 1 make an image of half, a quarter or an
# eighth of the size, for less work. (libjpeg-turbo has other scales too, but the full size takes less time than
# these.) The blocks cut off high frequencies, and the filter of the resize does the rest, so the result is near to
# that of decoding all pixels.

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

    def resize(self, pixels: Any, *, opacity: bool) -> Any:
        """Resize the decoded image.

        Args:
            pixels: uint8 ``[height, width]`` or ``[height, width, channels]``, of the size that :meth:`fit` returned.
            opacity: the fourth channel is opacity, and the colours are weighted by it.

        Returns:
            A new array, contiguous.
        """
        assert self._size is not None
        top, left, high, wide = (side / self._divisor for side in self._box)
        # The last row and column of a divided image may be parts of a pixel: its size is not the box's.
        part = pixels[int(top) : math.ceil(top + high), int(left) : math.ceil(left + wide)]
        if opacity:
            from PIL import Image

            method = Image.Resampling[self._target.resample.upper()]
            return np.array(Image.fromarray(part).resize(self._size[::-1], method, (0, 0, wide, high)))
        import torch

        kernel = getattr(torch.ops.aten, f"_upsample_{self._target.resample}2d_aa")
        resized = np.empty((*self._size, *part.shape[2:]), np.uint8)
        # Channels stay last for torch, which is slow to move them to the front.
        source, out = (
            torch.from_numpy(array.reshape(1, *array.shape[:2], -1).transpose(0, 3, 1, 2)) for array in (part, resized)
        )
        kernel.out(source, self._size, False, self._size[0] / high, self._size[1] / wide, out=out)
        return resized
