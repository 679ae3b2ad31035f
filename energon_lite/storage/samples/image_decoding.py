"""Pictures: which formats an extension means, and what they become.

Pillow looks at the bytes and not at the name. Among what it may find there are programs, so for each extension it is
told which formats it may try.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from energon_lite.errors import DecodeError

__all__ = ["FORMATS", "IMAGE_EXTENSIONS", "IMAGE_FORMS", "PROGRAMS", "check_size", "decode_image"]

#: ``image_decode``: (container, dtype, mode). Torch images are ``[channels, height, width]`` (grey ones
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

#: The pictures of the web. Their names are often mixed up there, so the extension of one means any of them.
_WEB = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
#: The formats that an extension means, as Pillow calls them, where it is not one of the web's: most are its name.
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
#: Images whose reading can start another program: PostScript, and IPTC, in which Pillow opens whatever it finds.
PROGRAMS = {"ps": ("EPS",), "eps": ("EPS",), "iim": ("IPTC",)}
#: Extensions (in any case) that are images.
IMAGE_EXTENSIONS = frozenset([*FORMATS, "iim"])
_JPEG = b"\xff\xd8\xff"


def check_size(unpacked: int, most: int | None, what: str = "") -> None:
    """Whether something may unpack to so many bytes.

    Raises:
        DecodeError: these are more than ``most``.
    """
    if most is not None and unpacked > most:
        raise DecodeError(
            f"unpacks to more than {most} bytes{what}, which is more than is taken from a sample",
            fix="leave the sample out, or give SampleDecoder(max_unpacked_bytes=...) if it is meant to be so large",
        )


def decode_image(container: str, dtype: str, mode: str, formats: tuple[str, ...], most: int | None, data: bytes) -> Any:
    """A picture in one of the forms of :data:`IMAGE_FORMS`.

    Args:
        formats: those it may have, as Pillow calls them.
        most: bytes that it may become, with one for each channel of a pixel; None: any number.

    Raises:
        DecodeError: it would become more. What else is wrong with it shows as any other exception.
    """
    pixels: Any = None
    if mode == "RGB" and container != "pil" and "JPEG" in formats and data.startswith(_JPEG):
        pixels = _decode_jpeg(data, most)
    if pixels is None:
        image = _decode_with_pillow(mode, formats, most, data)
        if container == "pil":
            return image
        pixels = np.asarray(image)
    if container == "torch" and pixels.ndim == 3:
        pixels = pixels.transpose(2, 0, 1)
    # One pass that scales and brings the channels to the front; a division, for the same bits as in Energon.
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


def _decode_with_pillow(mode: str, formats: tuple[str, ...], most: int | None, data: bytes) -> Any:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data), formats=formats) as opened:
            _check_pixels(*opened.size, max(len(mode), len(opened.getbands())), most)
            opened.load()
            return opened.convert(mode)
    except UnidentifiedImageError:  # its own text names an object in memory, nothing else
        raise ValueError(f"these bytes are no image of a format that the name means ({', '.join(formats)})") from None


def _decode_jpeg(data: bytes, most: int | None) -> Any:
    """``[height, width, 3]`` uint8 by simplejpeg; None: it is not installed, or this image is left to Pillow.

    Both use libjpeg-turbo with its accurate settings, and give the same pixels for what simplejpeg gets here: colours
    as luma and chroma, or grey. So whether it is installed changes the time, and nothing else.
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
        return simplejpeg.decode_jpeg(data, "RGB")
    except DecodeError:
        raise
    except ValueError:  # damaged: Pillow decides what can be made of it
        return None
