"""What is known about pictures, sounds and videos without reading them; as Energon keeps it, as JSON in a database."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, ClassVar

from energon_lite.errors import DataIndexError
from energon_lite.samples import edataclass

__all__ = ["AVMetadata", "ImageMetadata", "MediaMetadataBase", "read_media_metadata"]


@edataclass
class MediaMetadataBase:
    """What all kinds have in common."""

    #: Of the kind, as it is stored.
    metadata_type: ClassVar[str] = ""

    def to_dict(self) -> dict[str, Any]:
        """The fields that are known."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in fields.items() if value is not None}

    @classmethod
    def from_dict(cls, payload: dict[str, Any]) -> Any:
        """Made of its fields; those that nobody knows here are left out."""
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in payload.items() if name in names})


@edataclass
class AVMetadata(MediaMetadataBase):
    """About a video, a sound, or both: durations in seconds, sizes in pixels."""

    metadata_type: ClassVar[str] = "av"

    video_duration: float | None = None
    video_num_frames: int | None = None
    video_fps: float | None = None
    video_width: int | None = None
    video_height: int | None = None
    audio_duration: float | None = None
    audio_channels: int | None = None
    audio_sample_rate: int | None = None
    audio_num_samples: int | None = None


@edataclass
class ImageMetadata(MediaMetadataBase):
    """About a picture: its size in pixels; format and mode as Pillow calls them."""

    metadata_type: ClassVar[str] = "image"

    width: int
    height: int
    format: str
    mode: str


_KINDS: dict[str, type[MediaMetadataBase]] = {kind.metadata_type: kind for kind in (AVMetadata, ImageMetadata)}


def read_media_metadata(kind: str, text: str, where: str) -> MediaMetadataBase:
    """What a row of the database says.

    Raises:
        DataIndexError: it is none that is known here.
    """
    try:
        made: MediaMetadataBase = _KINDS[kind].from_dict(json.loads(text) if text else {})
        return made
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DataIndexError(
            f"media metadata of kind {kind!r} cannot be read: {type(error).__name__}: {error}",
            where=where,
            fix="prepare the media metadata again",
        ) from error
