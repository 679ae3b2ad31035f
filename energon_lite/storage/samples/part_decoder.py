"""Decoders of parts by extension: those of the core, and the door for those that guests name in their table
``DECODERS``.

:class:`~energon_lite.storage.SampleDecoder` calls them; those of guests for extensions that the core does not decode.
Extensions that are guessed from a part's first bytes are those of the package ``filetype``, as in Energon.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import re
from abc import abstractmethod
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, BinaryIO, NamedTuple, Protocol, runtime_checkable

import msgpack
import numpy as np

from energon_lite.entry_points import Decoder, decoders, load
from energon_lite.errors import DecodeError, UsageError, listed
from energon_lite.storage.read.ranges import RangeStream
from energon_lite.storage.samples.image_decoding import FORMATS, IMAGE_FORMS, PROGRAMS, check_size, decode_image
from energon_lite.storage.samples.image_size import ImageTarget

#: Bytes that :func:`guess_extension` examines.
HEAD_BYTES = 262

#: Offset of the magic bytes, the bytes, and the extension.
_MAGIC: tuple[tuple[int, bytes, str], ...] = (
    (0, b"\xff\xd8\xff", "jpg"),
    (0, b"\x89PNG", "png"),
    (0, b"GIF", "gif"),
    (8, b"WEBP", "webp"),
    (0, b"II*\0", "tif"),
    (0, b"MM\0*", "tif"),
    (0, b"\0\0\1\0", "ico"),
    (0, b"\0\0\0\x0cjP  \r\n\x87\n", "jpx"),
    (0, b"FLV\1", "flv"),
    (0, b"fLaC", "flac"),
    (0, b"OggS", "ogg"),
    (0, b"ID3", "mp3"),
    (0, b"\xff\xfb", "mp3"),
    (0, b"\xff\xf3", "mp3"),
    (0, b"\xff\xf2", "mp3"),
    (0, b"\xff\xf1", "aac"),
    (0, b"\xff\xf9", "aac"),
)
#: Extension of a RIFF file by its form type.
_RIFF = {b"AVI ": "avi", b"WAVE": "wav"}
#: Major brands of ISO files other than ``mp4``.
_BRANDS = {b"qt  ": "mov", b"M4V ": "m4v", b"M4A ": "m4a"}
_MP4_BRANDS = (b"mp4", b"iso", b"avc1", b"dash", b"mmp4", b"MSNV", b"F4V ", b"ndx", b"3gp", b"NDS")
#: Sizes of a bitmap's header, in bytes; they are checked because many texts begin with the letters BM.
_BITMAP_HEADERS = frozenset([12, 16, 40, 52, 56, 64, 108, 124])

_IMAGES = frozenset("bmp gif ico j2k jp2 jpx jpeg jpg png tif tiff webp".split())  # noqa: SIM905
_AV = frozenset("aac avi flac flv m4a m4v mkv mov mp3 mp4 ogg wav webm".split())  # noqa: SIM905


def guess_extension(head: bytes) -> str | None:
    """Guess the extension of an image, audio or video file; None: the type is unknown.

    Args:
        head: the first :data:`HEAD_BYTES` bytes, or more.

    Example:
        >>> guess_extension(b"RIFF" + bytes(4) + b"WAVEfmt ")
        'wav'
    """
    head = bytes(head[:HEAD_BYTES])
    for place, magic, extension in _MAGIC:
        if head.startswith(magic, place):
            return extension
    if head.startswith(b"RIFF"):
        return _RIFF.get(head[8:12])
    if head[4:8] == b"ftyp":
        brand = head[8:12]
        return _BRANDS.get(brand) or ("mp4" if brand.startswith(_MP4_BRANDS) else None)
    if head.startswith(b"\x1aE\xdf\xa3"):
        return "webm" if b"webm" in head else "mkv" if b"matroska" in head else None
    if head.startswith(b"BM") and int.from_bytes(head[14:18], "little") in _BITMAP_HEADERS:
        return "bmp"
    return None


def media_kind(extension: str | None) -> str | None:
    """Return ``"image"`` or ``"av"`` for an extension without dot, in upper or lower case; None: neither."""
    lower = (extension or "").lower()
    return "image" if lower in _IMAGES else "av" if lower in _AV else None


#: Decoder of the bytes of a part.
Decode = Callable[[bytes], Any]


class DecoderSettings(NamedTuple):
    """Settings of a :class:`~energon_lite.storage.SampleDecoder` that decoders of guests get."""

    av_decode: str | None
    video_decode_audio: bool
    trust_code: bool
    max_unpacked_bytes: int | None


class PartDecoder(Protocol):
    """Decoder of parts of some extensions. Each process makes one for each combination of settings; threads share it.

    Attributes:
        streams: :meth:`of_stream` decodes parts that are too large to be read with their sample. If False, all parts
            are read.
    """

    streams: bool = False

    @abstractmethod
    def __call__(self, part_name: str, data: bytes, /) -> object:
        """Decode a part. Any exception is a failure of the sample.

        Args:
            part_name: name of the part, or its extension alone.
            data: its bytes.
        """

    def of_stream(self, stream: RangeStream, /) -> object:
        """Decode a part that has not been read. The position of the stream can be anywhere."""
        raise NotImplementedError

    def check(self, part_name: str, where: str) -> None:
        """Check that such parts can be decoded on this machine, when the data set ``where`` is opened.

        Raises:
            UsageError: a package is missing.
        """
        return None


@runtime_checkable
class MediaFile(Protocol):
    """Value that decodes a part on request, such as :class:`energon_lite.extras.media.AVDecoder`.

    Attributes:
        stream: the file.
    """

    stream: BinaryIO

    def check(self) -> None:
        """Check that the file is complete, without decoding it.

        Raises:
            DecodeError: it is not.
        """


@lru_cache(maxsize=4096)
def decoder_entry(extension: str) -> Decoder | None:
    """Return the entry of the guest that decodes an extension, in upper or lower case; None: no guest does.

    Raises:
        UsageError: several guests do.
    """
    lower = extension.lower()
    found = [entry for entry in decoders().values() if not {lower, f".{lower}"}.isdisjoint(entry.extensions)]
    if len(found) > 1:
        raise UsageError(
            f"parts {lower!r} have several decoders: {listed([entry.target for entry in found])}",
            fix=f"uninstall one of their packages, or choose by SampleDecoder(handlers={{{lower!r}: ...}})",
        )
    return found[0] if found else None


@lru_cache(maxsize=256)
def made_decoder(target: str, settings: DecoderSettings) -> PartDecoder | None:
    """Return the decoder that a guest makes for these settings; None: the parts stay bytes.

    Raises:
        UsageError: the guest refuses the settings.
    """
    make: Callable[[DecoderSettings], PartDecoder | None] = load(target)
    return make(settings)


# -- decoders of the core --------------------------------------------------------------------------------------------

_NUMPY = b"\x93NUMPY"
#: The header of a ``.npy`` file (version 1) of plain numbers in C order.
_NPY = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '(?P<dtype>[<|>][biufc]\d+)', 'fortran_order': False, "
    rb"'shape': \((?P<shape>[\d, ]*)\), \} *\n",
    re.DOTALL,
)
_PICKLES = frozenset(["pth", "pkl", "pickle", "pyd"])


@lru_cache(maxsize=4096)
def decoder_for(
    extension: str, image_decode: str | None, image_size: ImageTarget | None, trust_code: bool, most: int | None
) -> Decode | Decoder | None:
    """Return the function that decodes an extension, or the entry of a guest that does; None: the bytes stay."""
    lower = extension.lower()
    if lower in FORMATS or lower in PROGRAMS:
        if image_decode is None:
            return None
        if lower in PROGRAMS and not trust_code:
            what = "is PostScript, which is a program" if lower != "iim" else "is IPTC, which can hold PostScript"
            return partial(refuse, f"{what}; it is not run")
        formats = FORMATS.get(lower) or PROGRAMS[lower]
        return partial(decode_image, *IMAGE_FORMS[image_decode], formats, most, image_size)
    if extension in _PICKLES:
        if not trust_code:
            return partial(refuse, "is a pickle, which can run code; it is not read")
        return _decode_torch if extension == "pth" else pickle.loads
    if extension == "npz":
        return partial(_decode_arrays, most)
    return _BY_EXTENSION.get(extension) or decoder_entry(extension)


def refuse(reason: str, data: bytes) -> Any:
    """Refuse a part whose reading could run code.

    Raises:
        DecodeError: always.
    """
    raise DecodeError(
        reason,
        fix="store npy, msgpack or json instead; or leave the part out of field_map or part_filter; or, if you trust "
        "whoever made the data, use SampleDecoder(trust_code=True)",
    )


def _decode_array(data: bytes) -> Any:
    # numpy parses the header as Python source, which takes longer than the rest; most headers match this pattern.
    header = _NPY.match(data)
    if header is not None:
        shape = tuple(map(int, header["shape"].replace(b",", b" ").split()))
        dtype = np.dtype(header["dtype"].decode())
        if header.end() + math.prod(shape) * dtype.itemsize == len(data):
            return np.frombuffer(data, dtype, math.prod(shape), header.end()).reshape(shape).copy()
    from numpy.lib import format as npy

    stream = io.BytesIO(data)
    version = npy.read_magic(stream)
    # numpy allocates the array before it reads the data, so check that a damaged header does not ask for too much.
    read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read_header(stream)
    if not dtype.hasobject and math.prod(shape) * dtype.itemsize > len(data) - stream.tell():
        raise ValueError(f"an array {shape} of {dtype} is longer than its bytes")
    return npy.read_array(io.BytesIO(data), allow_pickle=False)


def _decode_arrays(most: int | None, data: bytes) -> dict[str, Any]:
    from zipfile import ZipFile

    with ZipFile(io.BytesIO(data)) as archive:
        check_size(sum(member.file_size for member in archive.infolist()), most)
        members = {name: archive.read(name) for name in archive.namelist()}
    return {
        name.removesuffix(".npy"): _decode_array(member) if member.startswith(_NUMPY) else member
        for name, member in members.items()
    }


def _decode_tenbin(data: bytes) -> Any:
    from webdataset import tenbin

    return tenbin.decode_buffer(data)


def _decode_torch(data: bytes) -> Any:
    import torch

    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


_BY_EXTENSION: dict[str, Decode] = {
    **dict.fromkeys(("txt", "text", "transcript"), partial(str, encoding="utf-8")),
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), int),
    **dict.fromkeys(("json", "jsn"), json.loads),
    **dict.fromkeys(("mp", "msg", "msgpack"), msgpack.unpackb),
    **dict.fromkeys(("ten", "tb"), _decode_tenbin),
    "npy": _decode_array,
}
