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

import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from energon_lite.entry_points import Decoder, decoders
from energon_lite.errors import DecodeError, FatalSampleError, UsageError, did_you_mean
from energon_lite.storage.files.retries import SHORTAGES, out_of
from energon_lite.storage.read.ranges import PartRange, StreamedParts
from energon_lite.storage.samples.image_decoding import (
    FORMATS,
    IMAGE_EXTENSIONS,
    IMAGE_FORMS,
    check_size,
    decode_image,
)
from energon_lite.storage.samples.image_size import ImageTarget
from energon_lite.storage.samples.part_decoder import (
    HEAD_BYTES,
    Decode,
    DecoderSettings,
    PartDecoder,
    decoder_entry,
    decoder_for,
    guess_extension,
    made_decoder,
    refuse,
)
from energon_lite.trust import trusts

#: Bytes that one byte of deflated data can expand to at most, approximately.
_MOST_PACKED = 1040
#: Default form of audio and video.
_AV_DECODE = "AVDecoder"


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
        if self.image_decode is not None:
            _check_image_form(self.image_decode, ", or None")
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
        extensions = {name: name.rpartition(".")[2] for name in part_names}
        guests = {name: self._guest(ending) for name, ending in extensions.items() if ending not in self.handlers}
        names = frozenset(name for name, guest in guests.items() if guest is not None and guest.streams)
        return StreamedParts(names, self.stream_above) if names else None

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
        return isinstance(function, partial) and function.func is refuse

    def _built_in(self, extension: str) -> Decode | None:
        found = self._found(extension)
        if isinstance(found, Decoder):
            guest = self._made(found)
            return None if guest is None else partial(guest, extension)
        return found

    def _guest(self, extension: str) -> PartDecoder | None:
        """Return the decoder of a guest for an extension; None: no guest decodes it, or the parts stay bytes."""
        found = self._found(extension)
        return self._made(found) if isinstance(found, Decoder) else None

    def _found(self, extension: str) -> Decode | Decoder | None:
        trust, most = trusts(self.trust_code), self.max_unpacked_bytes
        return decoder_for(extension, self.image_decode, self.image_size, trust, most)

    def _made(self, entry: Decoder) -> PartDecoder | None:
        trust, most = trusts(self.trust_code), self.max_unpacked_bytes
        return made_decoder(entry.target, DecoderSettings(self.av_decode, self.video_decode_audio, trust, most))


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
    _check_image_form(image_decode)
    decode = partial(decode_image, *IMAGE_FORMS[image_decode], FORMATS["jpg"], max_unpacked_bytes, size, rng=rng)
    return SampleDecoder(handlers={"image": decode}).decode("image", data)


def _check_image_form(name: str, also: str = "") -> None:
    if name not in IMAGE_FORMS:
        fix = did_you_mean(name, IMAGE_FORMS, f"give one of {', '.join(IMAGE_FORMS)}{also}", always=True)
        raise UsageError(f"image_decode {name!r} is unknown", fix=fix)


def _size(data: bytes | PartRange) -> int:
    return data.size if isinstance(data, PartRange) else len(data)


def _asks_too_much(error: MemoryError, size: int) -> bool:
    """Return True if numpy failed to allocate an array that ``size`` bytes cannot hold, even packed: the header is
    damaged."""
    shape, dtype = getattr(error, "shape", ()), getattr(error, "dtype", None)
    return dtype is not None and math.prod(shape) * dtype.itemsize > _MOST_PACKED * size


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
