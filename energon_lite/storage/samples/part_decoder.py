"""Door for decoders of parts by extension, which guests name in their table ``DECODERS``.

:class:`~energon_lite.storage.SampleDecoder` calls them for extensions that it does not decode itself.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import cache, lru_cache
from typing import BinaryIO, NamedTuple, Protocol, runtime_checkable

from energon_lite.entry_points import Decoder, decoders, load
from energon_lite.storage.read.ranges import RangeStream


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


def decoder_entry(extension: str) -> Decoder | None:
    """Return the entry of the guest that decodes an extension, in upper or lower case; None: no guest does."""
    return _entries().get(extension.lower())


@cache
def _entries() -> dict[str, Decoder]:
    return {extension: entry for entry in decoders().values() for extension in entry.extensions}


@lru_cache(maxsize=256)
def made_decoder(target: str, settings: DecoderSettings) -> PartDecoder | None:
    """Return the decoder that a guest makes for these settings; None: the parts stay bytes.

    Raises:
        UsageError: the guest refuses the settings.
    """
    make: Callable[[DecoderSettings], PartDecoder | None] = load(target)
    return make(settings)
