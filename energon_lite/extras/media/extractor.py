"""Which files are media, and the metadata of one."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any, BinaryIO

from energon_lite.errors import DecodeError, FatalSampleError, UsageError
from energon_lite.extras.media.av_decoder import AVDecoder
from energon_lite.extras.media.content import HEAD_BYTES, guess_extension, media_kind
from energon_lite.extras.media.metadata import ImageMetadata, MediaMetadataBase

__all__ = ["MediaFilterConfig", "MediaFilterStrategy"]

#: Formats of which Pillow knows size and mode when it has read the header; of others they may change afterwards.
_KNOWN_BY_HEADER = frozenset(["JPEG", "PNG", "WEBP", "BMP", "GIF"])
#: What may be tried; never PostScript, for which Pillow starts a program.
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "ICO", "JPEG2000")


class MediaFilterStrategy(str, Enum):
    """By what a file is taken for a medium."""

    EXTENSION = "EXTENSION"
    HEADER = "HEADER"
    GLOB = "GLOB"


@dataclass(frozen=True)
class MediaFilterConfig:
    """Which files are media. Make one with :meth:`parse`.

    Args:
        strategy: by the extension, by the first bytes, or by patterns of names.
        patterns: for ``GLOB``.
    """

    strategy: MediaFilterStrategy
    patterns: list[str] = field(default_factory=list, hash=False)

    @classmethod
    def parse(cls, glob: str | None, header: bool, extension: bool) -> MediaFilterConfig:
        """The filter that three options mean, of which exactly one is given.

        Args:
            glob: patterns such as ``"*.jpg,clips/*"``, with commas between.
            header: by the first bytes.
            extension: by the extension.

        Raises:
            UsageError: none or several were given.
        """
        if sum(map(bool, (glob, header, extension))) != 1:
            raise UsageError(
                "exactly one of the ways to find media must be given: by glob, by header or by extension",
                fix="several patterns can be given in one, with commas: '*.jpg,*.mp4'",
            )
        if glob:
            return cls(MediaFilterStrategy.GLOB, [one.strip() for one in glob.split(",") if one.strip()])
        return cls(MediaFilterStrategy.HEADER if header else MediaFilterStrategy.EXTENSION)

    def should_consider_all(self) -> bool:
        """Whether a name says nothing."""
        return self.strategy is MediaFilterStrategy.HEADER

    def should_consider_media(self, name: str) -> bool:
        """Whether a file of this name may be a medium. Case does not matter; a pattern may mean the whole path or the
        name without folders."""
        if self.strategy is MediaFilterStrategy.HEADER:
            return True
        if self.strategy is MediaFilterStrategy.EXTENSION:
            return media_kind(_extension(name)) is not None
        lower = name.lower()
        names = (lower, lower.rpartition("/")[2])
        return any(fnmatchcase(one, pattern.lower()) for one in names for pattern in self.patterns)

    def extract_metadata(self, source: Any, filename: str | None = None) -> MediaMetadataBase | None:
        """The metadata of a file; None: it is no medium, or a damaged one.

        Args:
            source: bytes, an open file, or something with ``open("rb")`` and ``name``, such as a path.
            filename: its name, if it is not a path.
        """
        try:
            return self.read_metadata(source, filename)
        except DecodeError:
            return None

    def read_metadata(self, source: Any, filename: str | None = None) -> MediaMetadataBase | None:
        """The metadata of a file; None: it is no medium.

        Raises:
            DecodeError: it is a damaged one.
        """
        if isinstance(source, (bytes, bytearray)):
            return self._of_stream(io.BytesIO(source), _named(filename))
        if hasattr(source, "read") and hasattr(source, "seek"):
            return self._of_stream(source, _named(filename))
        with source.open("rb") as stream:
            return self._of_stream(stream, str(source.name))

    def _of_stream(self, stream: BinaryIO, name: str) -> MediaMetadataBase | None:
        if not self.should_consider_media(name):
            return None
        kind = media_kind(_extension(name))
        if self.strategy is not MediaFilterStrategy.EXTENSION:
            stream.seek(0)
            kind = media_kind(guess_extension(stream.read(HEAD_BYTES))) or kind
        return None if kind is None else _READ[kind](stream)


def _named(filename: str | None) -> str:
    if filename is None:
        raise UsageError("bytes and open files have no name", fix="give filename=")
    return filename


def _extension(name: str) -> str:
    return name.rpartition(".")[2]


def _of_av(stream: BinaryIO) -> MediaMetadataBase:
    return AVDecoder(stream).get_metadata(get_audio_num_samples=True)


def _of_image(stream: BinaryIO) -> MediaMetadataBase:
    try:
        from PIL import Image
    except ImportError as error:
        fix = "pip install 'energon-lite[image]'"
        raise FatalSampleError(f"the metadata of pictures needs Pillow: {error}", fix=fix) from error
    stream.seek(0)
    try:
        with Image.open(stream, formats=_FORMATS) as image:
            if image.format not in _KNOWN_BY_HEADER:
                image.load()
            return ImageMetadata(
                width=image.width, height=image.height, format=image.format or "UNKNOWN", mode=image.mode or "UNKNOWN"
            )
    except Exception as error:  # decoders raise anything
        raise DecodeError(
            f"the picture cannot be read: {type(error).__name__}: {error}", fix="repair or remove it"
        ) from error


_READ: dict[str, Callable[[BinaryIO], MediaMetadataBase]] = {"av": _of_av, "image": _of_image}
