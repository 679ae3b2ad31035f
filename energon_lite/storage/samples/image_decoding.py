"""Decoding of images: the formats of each extension, and the forms of the result.

Pillow recognises formats by the bytes and not by the name. Some of its formats run programs, so for each extension it
gets the formats that it may try.
"""

from __future__ import annotations

import io
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from energon_lite.errors import DecodeError, FatalSampleError
from energon_lite.storage.samples.image_resizing import Resizing
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
        pixels = resizing.resize(pixels, planar=container == "torch")
        if container == "pil":
            from PIL import Image

            return Image.fromarray(pixels)
    elif container == "torch" and pixels.ndim == 3:
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
    stream.seek(0)
    try:
        with Image.open(stream, formats=_READ_BY_HEADER) as image:
            if image.format not in _KNOWN_BY_HEADER:
                image.load()
            return ImageHeader(image.width, image.height, image.format or "UNKNOWN", image.mode or "UNKNOWN")
    except Exception as error:  # decoders raise exceptions of all kinds
        raise DecodeError(
            f"the picture cannot be read: {type(error).__name__}: {error}", fix="repair or remove it"
        ) from error
