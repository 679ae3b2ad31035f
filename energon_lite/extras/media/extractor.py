"""Selection of the files that are media, and extraction of their metadata."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any, BinaryIO

from energon_lite.errors import DecodeError, UsageError
from energon_lite.extras.media.av_decoder import AVDecoder
from energon_lite.extras.media.metadata import ImageMetadata, MediaMetadataBase
from energon_lite.storage.samples.content import HEAD_BYTES, guess_extension, media_kind
from energon_lite.storage.samples.image_decoding import read_image_header

__all__ = ["MediaFilterConfig", "MediaFilterStrategy"]


class MediaFilterStrategy(str, Enum):
    """Criterion by which a file counts as a medium."""

    EXTENSION = "EXTENSION"
    HEADER = "HEADER"
    GLOB = "GLOB"


@dataclass(frozen=True)
class MediaFilterConfig:
    """A filter of files that are media. Make one with :meth:`parse`.

    Args:
        strategy: select by extension, by the first bytes, or by patterns of names.
        patterns: patterns of names, for ``GLOB``.
    """

    strategy: MediaFilterStrategy
    patterns: list[str] = field(default_factory=list, hash=False)

    @classmethod
    def parse(cls, glob: str | None, header: bool, extension: bool) -> MediaFilterConfig:
        """Make the filter from three options, exactly one of which has to be given.

        Args:
            glob: select by patterns such as ``"*.jpg,clips/*"``, separated by commas.
            header: select by the first bytes.
            extension: select by the extension.

        Raises:
            UsageError: none or several are given.
        """
        if sum(map(bool, (glob, header, extension))) != 1:
            raise UsageError(
                "exactly one of the ways to find media must be given: by glob, by header or by extension",
                fix="several patterns can be given in one, with commas: '*.jpg,*.mp4'",
            )
        if glob:
            return cls(MediaFilterStrategy.GLOB, [pattern.strip() for pattern in glob.split(",") if pattern.strip()])
        return cls(MediaFilterStrategy.HEADER if header else MediaFilterStrategy.EXTENSION)

    def should_consider_all(self) -> bool:
        """Return True if names do not matter, so that every file has to be opened."""
        return self.strategy is MediaFilterStrategy.HEADER

    def should_consider_media(self, name: str) -> bool:
        """Return True if a file of this name may be a medium. Upper and lower case are equal; a pattern may match the
        whole path, or the name without folders."""
        if self.strategy is MediaFilterStrategy.HEADER:
            return True
        if self.strategy is MediaFilterStrategy.EXTENSION:
            return media_kind(_extension(name)) is not None
        lower = name.lower()
        names = (lower, lower.rpartition("/")[2])
        return any(fnmatchcase(candidate, pattern.lower()) for candidate in names for pattern in self.patterns)

    def extract_metadata(self, source: Any, filename: str | None = None) -> MediaMetadataBase | None:
        """Return the metadata of a file; None: it is no medium, or a damaged one.

        Args:
            source: bytes, an open file, or an object with ``open("rb")`` and ``name``, such as a path.
            filename: name of the file, if the source is not a path.
        """
        try:
            return self.read_metadata(source, filename)
        except DecodeError:
            return None

    def read_metadata(self, source: Any, filename: str | None = None) -> MediaMetadataBase | None:
        """Return the metadata of a file; None: it is no medium.

        Raises:
            DecodeError: the medium is damaged.
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
    return ImageMetadata(**read_image_header(stream)._asdict())


_READ: dict[str, Callable[[BinaryIO], MediaMetadataBase]] = {"av": _of_av, "image": _of_image}
