"""Bytes to objects, by the extension of the part's name.

The table is that of WebDataset's autodecode as Energon 7.4 uses it, so that a sample looks the same in both, with these
differences: formats whose reading can run code (pickles, and PostScript, for which Pillow starts Ghostscript) are
refused unless the caller says ``trust_code=True``; what an image decoder is given there but cannot read (HDF5, MPEG)
stays bytes; audio and video stay bytes. Pillow looks at the bytes and not at the name, so it is told for each extension
which formats it may try: a ``.png`` that is PostScript in truth is no image. What a few bytes may unpack to is bounded.

==================================  ===============================================================================
extension                           becomes
==================================  ===============================================================================
png jpg jpeg webp bmp gif tif ...   what ``image_decode`` says, see :data:`IMAGE_FORMS`; JPEG by simplejpeg if that is
                                    installed, else by Pillow: the pixels are the same
txt text transcript                 str (UTF-8)
json jsn                            what JSON says
cls cls2 index inx id               int
npy, npz                            numpy array, dict of numpy arrays (no object arrays)
mp msg msgpack                      what msgpack says (Energon leaves ``msgpack`` as bytes)
ten tb                              list of numpy arrays (WebDataset's tensor format)
<any>.gz                            unpacked, then decoded as <any>
pth pkl pickle pyd                  refused, see above
anything else                       bytes, unchanged
==================================  ===============================================================================
"""

from __future__ import annotations

import io
import json
import math
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

from energon_lite.errors import DecodeError, UsageError, nearest

__all__ = ["IMAGE_EXTENSIONS", "IMAGE_FORMS", "SampleDecoder"]

Decode = Callable[[bytes], Any]

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
#: The formats that an extension means, as Pillow calls them, where it is not one of the web's.
_FORMATS = {
    extension: (kind,)
    for kind, extensions in {
        "BLP": "blp",
        "CUR": "cur",
        "DCX": "dcx",
        "DDS": "dds",
        "DIB": "dib",
        "FITS": "fit fits",
        "FLI": "flc fli",
        "FTEX": "ftc ftu",
        "GBR": "gbr",
        "ICNS": "icns",
        "ICO": "ico",
        "IM": "im",
        "JPEG2000": "j2c j2k jp2 jpc jpf jpx",
        "MSP": "msp",
        "PCD": "pcd",
        "PCX": "pcx",
        "PIXAR": "pxr",
        "PPM": "pbm pgm pnm ppm",
        "PSD": "psd",
        "SGI": "bw rgb rgba sgi",
        "SUN": "ras",
        "TGA": "icb tga vda vst",
        "TIFF": "tif tiff",
        "XBM": "xbm",
        "XPM": "xpm",
    }.items()
    for extension in extensions.split()
} | dict.fromkeys("apng bmp gif jfif jpe jpeg jpg png webp".split(), _WEB)  # noqa: SIM905
#: Images whose reading can start another program: PostScript, and IPTC, in which Pillow opens whatever it finds.
_PROGRAMS = {"ps": ("EPS",), "eps": ("EPS",), "iim": ("IPTC",)}
#: Extensions (in any case) that are images.
IMAGE_EXTENSIONS = frozenset([*_FORMATS, "iim"])
_JPEG = b"\xff\xd8\xff"
_NUMPY = b"\x93NUMPY"
#: The beginning of a ``.npy`` file (version 1) of plain numbers in C order.
_NPY = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '(?P<dtype>[<|>][biufc]\d+)', 'fortran_order': False, "
    rb"'shape': \((?P<shape>[\d, ]*)\), \} *\n",
    re.DOTALL,
)
_PICKLES = frozenset(["pth", "pkl", "pickle", "pyd"])


@dataclass(frozen=True)
class SampleDecoder:
    """Decode the parts of samples.

    Args:
        image_decode: a key of :data:`IMAGE_FORMS`; None leaves images as bytes.
        trust_code: allow formats that can run code when they are read (pickle, ``pth``, PostScript).
        handlers: own decoders by extension, such as ``{"tok": read_tokens}``; they come before the built-in ones. They
            must be importable functions if workers are started by spawn.
        max_unpacked_bytes: what a compressed part (``.gz``, ``.npz``) or a picture (one byte a channel) may grow to;
            a sample with a larger one is an error, before the memory is taken. None: anything. For pictures through
            Pillow, ``PIL.Image.MAX_IMAGE_PIXELS`` holds as well.

    Raises:
        UsageError: ``image_decode`` is unknown.

    Example:
        >>> SampleDecoder().decode("json", b'{"text": ["a"]}')
        {'text': ['a']}
        >>> SampleDecoder(image_decode="torchrgb8").decode("png", png_bytes).shape
        torch.Size([3, 28, 28])
    """

    image_decode: str | None = "torchrgb"
    trust_code: bool = False
    handlers: Mapping[str, Decode] = field(default_factory=dict, hash=False)
    max_unpacked_bytes: int | None = 1 << 30

    def __post_init__(self) -> None:
        if self.max_unpacked_bytes is not None and self.max_unpacked_bytes < 1:
            raise UsageError(f"max_unpacked_bytes is {self.max_unpacked_bytes}", fix="give a number of bytes, or None")
        if self.image_decode is not None and self.image_decode not in IMAGE_FORMS:
            close = nearest(self.image_decode, IMAGE_FORMS)
            hint = f"did you mean {close!r}? " if close else ""
            raise UsageError(
                f"image_decode {self.image_decode!r} is unknown", fix=f"{hint}Known: {', '.join(IMAGE_FORMS)}, or None"
            )

    def decode(self, part_name: str, data: bytes) -> Any:
        """Decode one part.

        Args:
            part_name: everything after the key, such as ``"seg.png"``; the last extension counts.
            data: its bytes.

        Raises:
            DecodeError: the bytes are not what the extension says, or reading them could run code.
        """
        extension = part_name.rpartition(".")[2]
        decode = self.handlers.get(extension) if self.handlers else None
        try:
            if decode is not None:
                return decode(data)
            if extension == "gz":
                unpacked = _gunzip(data, self.max_unpacked_bytes)
                return self.decode(part_name[:-3] if part_name.endswith(".gz") else "", unpacked)
            decode = self._built_in(extension)
            return data if decode is None else decode(data)
        except DecodeError as error:
            if error.what.startswith("part "):
                raise
            raise DecodeError(f"part {part_name!r} {error.what}", fix=error.fix) from error.__cause__
        except Exception as error:  # decoders raise anything; what matters is which part of which sample it was
            raise DecodeError(
                f"part {part_name!r} ({len(data)} bytes) cannot be decoded: {type(error).__name__}: {error}",
                fix="repair or remove the sample, or exclude it in split.yaml",
            ) from error

    def function(self, part_name: str) -> Decode | None:
        """What decodes parts of this name, for many of them: :meth:`decode` without the look-up and without the error's
        words. None: they stay bytes."""
        extension = part_name.rpartition(".")[2]
        if extension == "gz" or extension in self.handlers:
            return partial(self.decode, part_name)
        return self._built_in(extension)

    def _built_in(self, extension: str) -> Decode | None:
        return _decoder_for(extension, self.image_decode, self.trust_code, self.max_unpacked_bytes)


@lru_cache(maxsize=4096)
def _decoder_for(extension: str, image_decode: str | None, trust_code: bool, most: int | None) -> Decode | None:
    """The function for an extension; None leaves the bytes as they are."""
    lower = extension.lower()
    if lower in _FORMATS or lower in _PROGRAMS:
        if image_decode is None:
            return None
        if lower in _PROGRAMS and not trust_code:
            what = "is PostScript, which is a program" if lower != "iim" else "is IPTC, which can hold PostScript"
            return partial(_refuse, f"{what}; it is not run")
        formats = _FORMATS.get(lower) or _PROGRAMS[lower]
        return partial(_decode_image, *IMAGE_FORMS[image_decode], formats, most)
    if extension in _PICKLES:
        if not trust_code:
            return partial(_refuse, "is a pickle, which can run code; it is not read")
        return _decode_torch if extension == "pth" else _decode_pickle
    return partial(_decode_arrays, most) if extension == "npz" else _BY_EXTENSION.get(extension)


def _refuse(reason: str, data: bytes) -> Any:
    raise DecodeError(
        reason,
        fix="store npy, msgpack or json instead; or leave the part out of field_map or part_filter; or, if you trust "
        "whoever made the data, use SampleDecoder(trust_code=True)",
    )


def _check_size(unpacked: int, most: int | None, what: str = "") -> None:
    if most is not None and unpacked > most:
        raise DecodeError(
            f"unpacks to more than {most} bytes{what}, which is more than is taken from a sample",
            fix="leave the sample out, or give SampleDecoder(max_unpacked_bytes=...) if it is meant to be so large",
        )


def _gunzip(data: bytes, most: int | None) -> bytes:
    """What a gzip file of any number of members holds; at most one byte above the limit is unpacked of a larger one."""
    pieces: list[bytes] = []
    size = 0
    while data:
        unpacker = zlib.decompressobj(wbits=31)
        pieces.append(unpacker.decompress(data, 0 if most is None else most - size + 1))
        size += len(pieces[-1])
        _check_size(size, most)
        if not unpacker.eof:
            raise EOFError("the compressed data ends too early")
        data = unpacker.unused_data.lstrip(b"\0")
    return b"".join(pieces)


def _decode_image(
    container: str, dtype: str, mode: str, formats: tuple[str, ...], most: int | None, data: bytes
) -> Any:
    import numpy as np

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
    _check_size(width * height * channels, most, f" ({width} x {height} pixels)")


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


def _decode_text(data: bytes) -> str:
    return data.decode("utf-8")


def _decode_array(data: bytes) -> Any:
    import numpy as np

    # numpy parses the header as Python source, which takes longer than all the rest; most headers look like this one.
    header = _NPY.match(data)
    if header is not None:
        shape = tuple(map(int, header["shape"].replace(b",", b" ").split()))
        dtype = np.dtype(header["dtype"].decode())
        if header.end() + math.prod(shape) * dtype.itemsize == len(data):
            return np.frombuffer(data, dtype, math.prod(shape), header.end()).reshape(shape).copy()
    from numpy.lib import format as npy

    stream = io.BytesIO(data)
    version = npy.read_magic(stream)
    # What the header promises is allocated before it is read, so a header alone must not decide how much that is.
    read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read_header(stream)
    if not dtype.hasobject and math.prod(shape) * dtype.itemsize > len(data) - stream.tell():
        raise ValueError(f"an array {shape} of {dtype} is longer than its bytes")
    return npy.read_array(io.BytesIO(data), allow_pickle=False)


def _decode_arrays(most: int | None, data: bytes) -> dict[str, Any]:
    from zipfile import ZipFile

    with ZipFile(io.BytesIO(data)) as archive:
        _check_size(sum(member.file_size for member in archive.infolist()), most)
        members = {name: archive.read(name) for name in archive.namelist()}
    return {
        name.removesuffix(".npy"): _decode_array(member) if member.startswith(_NUMPY) else member
        for name, member in members.items()
    }


def _decode_msgpack(data: bytes) -> Any:
    import msgpack

    return msgpack.unpackb(data)


def _decode_tenbin(data: bytes) -> Any:
    from webdataset import tenbin

    return tenbin.decode_buffer(data)


def _decode_torch(data: bytes) -> Any:
    import torch

    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def _decode_pickle(data: bytes) -> Any:
    import pickle

    return pickle.loads(data)


_BY_EXTENSION: dict[str, Decode] = {
    **dict.fromkeys(("txt", "text", "transcript"), _decode_text),
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), int),
    **dict.fromkeys(("json", "jsn"), json.loads),
    **dict.fromkeys(("mp", "msg", "msgpack"), _decode_msgpack),
    **dict.fromkeys(("ten", "tb"), _decode_tenbin),
    "npy": _decode_array,
}
