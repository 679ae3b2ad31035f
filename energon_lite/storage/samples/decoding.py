"""Decoding of parts by the extension of their name.

The table is that of WebDataset's autodecode as Energon 7.4 uses it, so that a sample looks the same in both, with these
differences. Formats whose reading can run code (pickles, and PostScript, for which Pillow starts Ghostscript) are
refused unless the caller gives ``trust_code=True``. Formats that Energon gives to an image decoder that cannot read
them (HDF5, MPEG) stay bytes. Pillow recognises formats by the bytes and not by the name, so for each extension it gets
the formats that it may try: PostScript named ``.png`` is not an image. The size of unpacked bytes is limited.

==================================  ===============================================================================
extension                           becomes
==================================  ===============================================================================
png jpg jpeg webp bmp gif tif ...   the form that ``image_decode`` names, see :data:`IMAGE_FORMS`, of the size that
                                    ``image_size`` gives; JPEG by simplejpeg if that is installed, else by Pillow: the
                                    pixels are the same
mp4 avi mov webm mkv flv            the form that ``av_decode`` names: an ``AVDecoder``, which decodes clips on request;
flac mp3 wav                        bytes, if the extra ``media`` is absent
txt text transcript                 str (UTF-8)
json jsn                            the JSON value
cls cls2 index inx id               int
npy, npz                            numpy array, dict of numpy arrays (no object arrays)
mp msg msgpack                      the msgpack value (Energon leaves ``msgpack`` as bytes)
ten tb                              list of numpy arrays (WebDataset's tensor format)
<any>.gz                            unpacked, then decoded as <any>
pth pkl pickle pyd                  refused, see above
extensions of guests                what their :class:`~energon_lite.storage.samples.part_decoder.PartDecoder` makes
anything else                       bytes, unchanged
==================================  ===============================================================================
"""

from __future__ import annotations

import io
import json
import math
import pickle
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import msgpack
import numpy as np

from energon_lite.entry_points import Decoder, decoders
from energon_lite.errors import DecodeError, FatalSampleError, UsageError, did_you_mean
from energon_lite.storage.files.retries import SHORTAGES, out_of
from energon_lite.storage.read.ranges import PartRange, StreamedParts
from energon_lite.storage.samples.content import HEAD_BYTES, guess_extension
from energon_lite.storage.samples.image_decoding import (
    FORMATS,
    IMAGE_EXTENSIONS,
    IMAGE_FORMS,
    PROGRAMS,
    check_size,
    decode_image,
)
from energon_lite.storage.samples.image_size import ImageTarget
from energon_lite.storage.samples.part_decoder import DecoderSettings, PartDecoder, decoder_entry, made_decoder
from energon_lite.trust import trusts

Decode = Callable[[bytes], Any]

_NUMPY = b"\x93NUMPY"
#: The header of a ``.npy`` file (version 1) of plain numbers in C order.
_NPY = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '(?P<dtype>[<|>][biufc]\d+)', 'fortran_order': False, "
    rb"'shape': \((?P<shape>[\d, ]*)\), \} *\n",
    re.DOTALL,
)
#: Bytes that one byte of deflated data can expand to at most, approximately.
_MOST_PACKED = 1040
#: Default form of audio and video.
_AV_DECODE = "AVDecoder"
_PICKLES = frozenset(["pth", "pkl", "pickle", "pyd"])


@dataclass(frozen=True)
class SampleDecoder:
    """Decoder of the parts of samples.

    Args:
        image_decode: a key of :data:`IMAGE_FORMS`; None leaves images as bytes.
        trust_code: allow formats that can run code when they are read (pickle, ``pth``, PostScript). None: the setting
            of :mod:`energon_lite.trust`, by default False.
        handlers: own decoders by extension, such as ``{"tok": read_tokens}``; they precede the built-in ones. They
            must be importable functions if workers are started by spawn.
        av_decode: form of audio and video: ``"AVDecoder"``, an :class:`~energon_lite.extras.media.AVDecoder`;
            ``"torch"``, an :class:`~energon_lite.extras.media.AVData`, decoded as a whole; ``"pyav"``, an open
            container of PyAV, which cannot leave its process. None: they stay bytes.
        video_decode_audio: decode the sound of a video as well, with ``av_decode="torch"``.
        guess_content: examine the first bytes of each part: images, audio and video are decoded as such, whatever the
            name of the part.
        stream_above: audio and video of more bytes are not read with the sample, if they become an ``AVDecoder``: it
            reads the bytes of its clips from the shard on request. None: all are read.
        max_unpacked_bytes: limit of the unpacked size of a compressed part (``.gz``, ``.npz``) or of an image (one
            byte a channel); a sample that exceeds it is an error, before the memory is allocated. None: no limit. For
            images decoded by Pillow, ``PIL.Image.MAX_IMAGE_PIXELS`` applies as well.
        image_size: size of images, such as ``ImageSize(336)``: a JPEG is decoded at the fraction of its size that is
            needed, and images are resized once. A size in ``dataset.yaml`` precedes it. None: the stored size.

    Raises:
        UsageError: ``image_decode`` or ``av_decode`` is unknown, ``av_decode`` needs the extra ``media``, or
            ``image_size`` has no image or draws random numbers.

    Example:
        >>> SampleDecoder().decode("json", b'{"text": ["a"]}')
        {'text': ['a']}
        >>> SampleDecoder(image_decode="torchrgb8").decode("png", png_bytes).shape
        torch.Size([3, 28, 28])
        >>> SampleDecoder(image_decode="torchrgb8", image_size=ImageSize(336)).decode("jpg", jpeg_bytes).shape
        torch.Size([3, 336, 336])
    """

    image_decode: str | None = "torchrgb"
    trust_code: bool | None = None
    handlers: Mapping[str, Decode] = field(default_factory=dict, hash=False)
    av_decode: str | None = _AV_DECODE
    video_decode_audio: bool = False
    guess_content: bool = False
    max_unpacked_bytes: int | None = 1 << 30
    stream_above: int | None = 8 << 20
    image_size: ImageTarget | None = None

    def __post_init__(self) -> None:
        if self.max_unpacked_bytes is not None and self.max_unpacked_bytes < 1:
            raise UsageError(f"max_unpacked_bytes is {self.max_unpacked_bytes}", fix="give a number of bytes, or None")
        if self.image_decode is not None and self.image_decode not in IMAGE_FORMS:
            names = tuple(IMAGE_FORMS)
            fix = did_you_mean(self.image_decode, names, f"give one of {', '.join(names)}, or None", always=True)
            raise UsageError(f"image_decode {self.image_decode!r} is unknown", fix=fix)
        if self.image_size is not None and (self.image_decode is None or self.image_size.draws):
            name = type(self.image_size).__name__
            what = "images stay bytes" if self.image_decode is None else f"{name} draws random numbers"
            fix = "decode in a hook, which has them: decode_to_size(sample.image, size, self.rng); image_decode=None"
            raise UsageError(f"image_size is given, but {what}", fix=fix)
        if self.av_decode not in (None, _AV_DECODE):
            entry = decoders().get("av")
            if entry is None:
                raise UsageError(
                    f"av_decode {self.av_decode!r} needs the extra `media`, which is absent",
                    fix="install energon_lite with energon_lite/extras/media; or leave av_decode out: audio and video "
                    "then stay bytes",
                )
            self._made(entry)  # refuses forms that it does not know

    def check_parts(self, part_names: Iterable[str], where: str) -> None:
        """Check that these parts can be decoded with the given settings.

        Args:
            part_names: names of the parts of a data set.
            where: the data set, for messages.

        Raises:
            UsageError: a part cannot be decoded.
        """
        for name in sorted(part_names):
            extension = name.removesuffix(".gz").rpartition(".")[2]
            if extension not in self.handlers and (guest := self._guest(extension)) is not None:
                guest.check(name, where)

    def streamed(self, part_names: Iterable[str]) -> StreamedParts | None:
        """Return the parts that need not be read before they are decoded; None: all have to be."""
        own = type(self).decode is not SampleDecoder.decode
        if own or self.stream_above is None:
            return None
        names = {name for name in part_names if self._streams(name.rpartition(".")[2])}
        return StreamedParts(frozenset(names), self.stream_above) if names else None

    def _streams(self, extension: str) -> bool:
        guest = None if extension in self.handlers else self._guest(extension)
        return guest is not None and guest.streams

    def config(self) -> dict[str, Any]:
        """The settings that Energon has as well, by name."""
        names = ("image_decode", "av_decode", "video_decode_audio", "guess_content")
        return {name: getattr(self, name) for name in names}

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Decode the parts of a sample, a dict of parts, that are bytes."""
        is_part = {name: isinstance(data, bytes) and not name.startswith("_") for name, data in sample.items()}
        return {name: self.decode(name, data) if is_part[name] else data for name, data in sample.items()}

    def decode(self, part_name: str, data: bytes | PartRange) -> Any:
        """Decode one part.

        Args:
            part_name: everything after the key, such as ``"seg.png"``; the last extension counts.
            data: its bytes, or their place in the shard (for a part that :meth:`streamed` names).

        Raises:
            DecodeError: the bytes are not what the extension says, or reading them could run code.
            FatalSampleError: a package is missing.
            MemoryError, FatalStorageError: memory or file descriptors ran out, whatever the sample.
        """
        extension = part_name.rpartition(".")[2]
        decode = self.handlers.get(extension) if self.handlers else None
        try:
            if isinstance(data, PartRange):
                stream = data.open()
                kind = guess_extension(stream.read(HEAD_BYTES)) if self.guess_content else extension
                guest = None if kind is None else self._guest(kind)
                if guest is not None and guest.streams:
                    return guest.of_stream(stream)
                stream.seek(0)
                data = stream.read()
            if decode is not None:
                return decode(data)
            if extension == "gz":
                unpacked = _gunzip(data, self.max_unpacked_bytes)
                return self.decode(part_name[:-3] if part_name.endswith(".gz") else "", unpacked)
            guessed = guess_extension(data) if self.guess_content else None
            if guessed is not None and (guessed in IMAGE_EXTENSIONS or decoder_entry(guessed) is not None):
                extension = guessed
            decode = self._built_in(extension)
            return data if decode is None else decode(data)
        except DecodeError as error:
            if error.what.startswith("part "):
                raise
            raise DecodeError(f"part {part_name!r} {error.what}", fix=error.fix) from error.__cause__
        except FatalSampleError:
            raise
        except ImportError as error:  # not this sample's fault; all others would fail as well
            raise FatalSampleError(
                f"part {part_name!r} needs a package that is not installed: {error}",
                fix="pip install 'energon-lite[image]' for images; else the package that is named",
            ) from error
        except Exception as error:  # decoders raise exceptions of all kinds; the message names part and sample
            if isinstance(error, OSError) and error.errno in SHORTAGES:
                raise out_of(error, f"part {part_name!r}") from error
            if isinstance(error, MemoryError) and not _asks_too_much(error, _size(data)):
                raise  # not caused by the sample: it ends the run
            raise DecodeError(
                f"part {part_name!r} ({_size(data)} bytes) cannot be decoded: {type(error).__name__}: {error}",
                fix="repair or remove the sample, or exclude it in split.yaml",
            ) from error

    def function(self, part_name: str) -> Decode | None:
        """Return the function that decodes many parts of this name: :meth:`decode` without the look-up and without its
        error messages. None: they stay bytes."""
        extension = part_name.rpartition(".")[2]
        if extension == "gz" or extension in self.handlers or self.guess_content:
            return partial(self.decode, part_name)
        return self._built_in(extension)

    def refuses(self, part_name: str) -> bool:
        """Return True if parts of this name are refused whatever their contents: reading them could run code."""
        function = self.function(part_name)
        return isinstance(function, partial) and function.func is _refuse

    def _built_in(self, extension: str) -> Decode | None:
        found = _decoder_for(
            extension, self.image_decode, self.image_size, trusts(self.trust_code), self.max_unpacked_bytes
        )
        if isinstance(found, Decoder):
            guest = self._made(found)
            return None if guest is None else partial(guest, extension)
        return found

    def _guest(self, extension: str) -> PartDecoder | None:
        """Return the decoder of a guest for an extension; None: no guest decodes it, or the parts stay bytes."""
        found = _decoder_for(
            extension, self.image_decode, self.image_size, trusts(self.trust_code), self.max_unpacked_bytes
        )
        return self._made(found) if isinstance(found, Decoder) else None

    def _made(self, entry: Decoder) -> PartDecoder | None:
        trust, most = trusts(self.trust_code), self.max_unpacked_bytes
        return made_decoder(entry.target, DecoderSettings(self.av_decode, self.video_decode_audio, trust, most))


def _size(data: bytes | PartRange) -> int:
    return data.size if isinstance(data, PartRange) else len(data)


def _asks_too_much(error: MemoryError, size: int) -> bool:
    """Return True if numpy failed to allocate an array that ``size`` bytes cannot hold, even packed: the header is
    damaged."""
    shape, dtype = getattr(error, "shape", ()), getattr(error, "dtype", None)
    return dtype is not None and math.prod(shape) * dtype.itemsize > _MOST_PACKED * size


@lru_cache(maxsize=4096)
def _decoder_for(
    extension: str, image_decode: str | None, image_size: ImageTarget | None, trust_code: bool, most: int | None
) -> Decode | Decoder | None:
    """Return the function that decodes an extension, or the entry of a guest that does; None: the bytes stay."""
    lower = extension.lower()
    if lower in FORMATS or lower in PROGRAMS:
        if image_decode is None:
            return None
        if lower in PROGRAMS and not trust_code:
            what = "is PostScript, which is a program" if lower != "iim" else "is IPTC, which can hold PostScript"
            return partial(_refuse, f"{what}; it is not run")
        formats = FORMATS.get(lower) or PROGRAMS[lower]
        return partial(decode_image, *IMAGE_FORMS[image_decode], formats, most, image_size)
    if extension in _PICKLES:
        if not trust_code:
            return partial(_refuse, "is a pickle, which can run code; it is not read")
        return _decode_torch if extension == "pth" else pickle.loads
    if extension == "npz":
        return partial(_decode_arrays, most)
    return _BY_EXTENSION.get(extension) or decoder_entry(extension)


def _refuse(reason: str, data: bytes) -> Any:
    raise DecodeError(
        reason,
        fix="store npy, msgpack or json instead; or leave the part out of field_map or part_filter; or, if you trust "
        "whoever made the data, use SampleDecoder(trust_code=True)",
    )


def _gunzip(data: bytes, most: int | None) -> bytes:
    """Unpack a gzip file of any number of members; of one above the limit, at most one byte more than the limit."""
    pieces: list[bytes] = []
    size = 0
    while data:
        unpacker = zlib.decompressobj(wbits=31)
        pieces.append(unpacker.decompress(data, 0 if most is None else most - size + 1))
        size += len(pieces[-1])
        check_size(size, most)
        if not unpacker.eof:
            raise EOFError("the compressed data ends too early")
        data = unpacker.unused_data.lstrip(b"\0")
    return b"".join(pieces)


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
