"""Bytes to objects, by the extension of the part's name.

The table is that of WebDataset's autodecode as Energon 7.4 uses it, so that a sample looks the same in both, with these
differences: formats whose reading can run code (pickles, and PostScript, for which Pillow starts Ghostscript) are
refused unless the caller says ``trust_code=True``; what an image decoder is given there but cannot read (HDF5, MPEG)
stays bytes; audio and video stay bytes.

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

import gzip
import io
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

from energon_lite.errors import DecodeError, FatalSampleError, UsageError, nearest
from energon_lite.sources.shortage import SHORTAGES, out_of

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

#: Extensions (in any case) that are images.
IMAGE_EXTENSIONS = frozenset(
    """
    apng blp bmp bw cur dcx dds dib fit fits flc fli ftc ftu gbr gif icb icns ico iim im j2c j2k jfif jp2 jpc jpe jpeg
    jpf jpg jpx msp pbm pcd pcx pgm png pnm ppm psd pxr ras rgb rgba sgi tga tif tiff vda vst webp xbm xpm
    """.split()  # noqa: SIM905
)
#: Images for which Pillow starts another program.
_POSTSCRIPT = frozenset(["ps", "eps"])
_JPEG = b"\xff\xd8\xff"
#: The beginning of a ``.npy`` file (version 1) of plain numbers in C order.
_NPY = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '(?P<dtype>[<|>][biufc]\d+)', 'fortran_order': False, "
    rb"'shape': \((?P<shape>[\d, ]*)\), \} *\n",
    re.DOTALL,
)
#: Bytes that one byte of deflated data can stand for at most, about.
_MOST_PACKED = 1040
_PICKLES = frozenset(["pth", "pkl", "pickle", "pyd"])
#: Audio and video, which stay bytes.
_AV_EXTENSIONS = frozenset(["mp4", "avi", "mov", "webm", "mkv", "flac", "mp3", "wav", "flv"])
#: What Energon can make of them.
_AV_FORMS = ("AVDecoder", "torch", "pyav")


@dataclass(frozen=True)
class SampleDecoder:
    """Decode the parts of samples.

    Args:
        image_decode: a key of :data:`IMAGE_FORMS`; None leaves images as bytes.
        trust_code: allow formats that can run code when they are read (pickle, ``pth``, PostScript).
        handlers: own decoders by extension, such as ``{"tok": read_tokens}``; they come before the built-in ones. They
            must be importable functions if workers are started by spawn.
        av_decode: as in Energon, ``AVDecoder``, ``torch`` or ``pyav``; a data set with audio or video is refused then,
            since its parts cannot be decoded yet. None: they stay bytes.
        video_decode_audio: as in Energon; of no effect without ``av_decode``.
        guess_content: as in Energon; a data set with parts of unknown extensions is refused then, since what they are
            is not guessed.

    Raises:
        UsageError: ``image_decode`` or ``av_decode`` is unknown.

    Example:
        >>> SampleDecoder().decode("json", b'{"text": ["a"]}')
        {'text': ['a']}
        >>> SampleDecoder(image_decode="torchrgb8").decode("png", png_bytes).shape
        torch.Size([3, 28, 28])
    """

    image_decode: str | None = "torchrgb"
    trust_code: bool = False
    handlers: Mapping[str, Decode] = field(default_factory=dict, hash=False)
    av_decode: str | None = None
    video_decode_audio: bool = False
    guess_content: bool = False

    def __post_init__(self) -> None:
        for name, forms in (("image_decode", tuple(IMAGE_FORMS)), ("av_decode", _AV_FORMS)):
            form = getattr(self, name)
            if form is not None and form not in forms:
                close = nearest(form, forms)
                hint = f"did you mean {close!r}? " if close else ""
                raise UsageError(f"{name} {form!r} is unknown", fix=f"{hint}Known: {', '.join(forms)}, or None")

    def check_parts(self, part_names: Iterable[str], where: str) -> None:
        """See that these parts can be decoded in the way that was asked for.

        Args:
            part_names: of a data set.
            where: it is, for messages.

        Raises:
            UsageError: one cannot.
        """
        for name in sorted(part_names):
            extension = name.removesuffix(".gz").rpartition(".")[2]
            if extension in self.handlers:
                continue
            is_av = extension.lower() in _AV_EXTENSIONS
            if self.av_decode is not None and is_av:
                raise UsageError(
                    f"part {name!r} cannot be decoded with av_decode={self.av_decode!r}: there is no decoder of audio "
                    "and video yet",
                    where=where,
                    fix="give av_decode=None, with which it stays bytes, and decode it in encode_sample; or your own "
                    f"decoder, SampleDecoder(handlers={{{extension!r}: ...}})",
                )
            if self.guess_content and not is_av and _decoder_for(extension, "pil", False) is None:
                raise UsageError(
                    f"guess_content=True is not supported, and part {name!r} has an extension that says nothing",
                    where=where,
                    fix="leave guess_content out, with which it stays bytes; or give SampleDecoder(handlers="
                    f"{{{extension!r}: ...}})",
                )

    def decode(self, part_name: str, data: bytes) -> Any:
        """Decode one part.

        Args:
            part_name: everything after the key, such as ``"seg.png"``; the last extension counts.
            data: its bytes.

        Raises:
            DecodeError: the bytes are not what the extension says, or reading them could run code.
            FatalSampleError: a package is missing.
            MemoryError, FatalStorageError: memory or file descriptors ran out, which is not the sample's fault.
        """
        extension = part_name.rpartition(".")[2]
        decode = self.handlers.get(extension) if self.handlers else None
        try:
            if decode is not None:
                return decode(data)
            if extension == "gz":
                return self.decode(part_name[:-3] if part_name.endswith(".gz") else "", gzip.decompress(data))
            decode = _decoder_for(extension, self.image_decode, self.trust_code)
            return data if decode is None else decode(data)
        except DecodeError as error:
            if error.what.startswith("part "):
                raise
            raise DecodeError(f"part {part_name!r} {error.what}", fix=error.fix) from error.__cause__
        except FatalSampleError:
            raise
        except ImportError as error:  # not this sample's fault, and all others would fail as well
            raise FatalSampleError(
                f"part {part_name!r} needs a package that is not installed: {error}",
                fix="pip install 'energon-lite[image]' for images; else the package that is named",
            ) from error
        except Exception as error:  # decoders raise anything; what matters is which part of which sample it was
            if isinstance(error, OSError) and error.errno in SHORTAGES:
                raise out_of(error, f"part {part_name!r}") from error
            if isinstance(error, MemoryError) and not _asks_too_much(error, len(data)):
                raise  # no property of the sample: it ends the run
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
        return _decoder_for(extension, self.image_decode, self.trust_code)


def _asks_too_much(error: MemoryError, size: int) -> bool:
    """Whether numpy was to make an array that so many bytes cannot hold, however packed: then a header is damaged."""
    shape, dtype = getattr(error, "shape", ()), getattr(error, "dtype", None)
    return dtype is not None and math.prod(shape) * dtype.itemsize > _MOST_PACKED * size


@lru_cache(maxsize=4096)
def _decoder_for(extension: str, image_decode: str | None, trust_code: bool) -> Decode | None:
    """The function for an extension; None leaves the bytes as they are."""
    lower = extension.lower()
    if lower in IMAGE_EXTENSIONS or lower in _POSTSCRIPT:
        if image_decode is None:
            return None
        if lower in _POSTSCRIPT and not trust_code:
            return partial(_refuse, "is PostScript, which is a program; it is not run")
        return partial(_decode_image, *IMAGE_FORMS[image_decode])
    if extension in _PICKLES:
        if not trust_code:
            return partial(_refuse, "is a pickle, which can run code; it is not read")
        return _decode_torch if extension == "pth" else _decode_pickle
    return _BY_EXTENSION.get(extension)


def _refuse(reason: str, data: bytes) -> Any:
    raise DecodeError(
        reason,
        fix="store npy, msgpack or json instead; or leave the part out of field_map or part_filter; or, if you trust "
        "whoever made the data, use SampleDecoder(trust_code=True)",
    )


def _decode_image(container: str, dtype: str, mode: str, data: bytes) -> Any:
    import numpy as np

    pixels: Any = None
    if mode == "RGB" and container != "pil" and data.startswith(_JPEG):
        pixels = _decode_jpeg(data)
    if pixels is None:
        image = _decode_with_pillow(mode, data)
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


def _decode_with_pillow(mode: str, data: bytes) -> Any:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data)) as opened:
            opened.load()
            return opened.convert(mode)
    except UnidentifiedImageError:  # its own text names an object in memory, nothing else
        raise ValueError("these bytes are no image that Pillow knows") from None


def _decode_jpeg(data: bytes) -> Any:
    """``[height, width, 3]`` uint8 by simplejpeg; None: it is not installed, or this image is left to Pillow.

    Both use libjpeg-turbo with its accurate settings, and give the same pixels for what simplejpeg gets here: colours
    as luma and chroma, or grey. So whether it is installed changes the time, and nothing else.
    """
    try:
        import simplejpeg
    except ImportError:
        return None
    try:
        if simplejpeg.decode_jpeg_header(data)[2] not in ("YCbCr", "Gray"):
            return None
        return simplejpeg.decode_jpeg(data, "RGB")
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
    from numpy.lib.format import read_array

    return read_array(io.BytesIO(data), allow_pickle=False)


def _decode_arrays(data: bytes) -> dict[str, Any]:
    import numpy as np

    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        return dict(arrays)


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
    "npz": _decode_arrays,
}
