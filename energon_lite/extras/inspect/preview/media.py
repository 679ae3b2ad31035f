"""Media of a sample for a browser.

A stored part is sent unchanged if its first bytes are those of an image, audio or video; a tensor is sent as PNG, WAV
or WebM. Nothing else is sent, and the name of a file does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch

from energon_lite.extras.inspect.preview.browser_bytes import browser_type, pixels_of, png_of, wav_of, webm_of
from energon_lite.extras.inspect.preview.shown_sample import fields_of, follow, part_bytes, part_size
from energon_lite.storage.samples.content import HEAD_BYTES
from energon_lite.storage.samples.part_decoder import MediaFile

__all__ = ["SOUND_RATE", "Media", "is_film", "is_sound", "made_media", "sound_rate", "stored_media", "stream_of"]

#: Samples per second of audio whose rate is not known.
SOUND_RATE = 16_000
_SOUND_NAMES = ("audio", "wave", "sound", "speech")
_RATE_NAMES = ("sample_rate", "sampling_rate", "sr", "rate", "audio_rate")
_STREAMS = Lock()
#: Frames per second of video whose rate is not known.
_FRAME_RATE = 8.0


@dataclass(frozen=True)
class Media:
    """Media of one kind, as bytes for a browser.

    Args:
        content_type: MIME type of the bytes.
        size: number of bytes.
        read: function of start and size that returns some of the bytes.
    """

    content_type: str
    size: int
    read: Callable[[int, int], bytes]

    @classmethod
    def of(cls, content_type: str, data: bytes) -> Media:
        """Make media from bytes in memory."""
        return cls(content_type, len(data), lambda start, size: data[start : start + size])


def stored_media(part: Any) -> Media | None:
    """Return the media of a stored part; None if it is not sent to browsers."""
    size = part_size(part)
    if not size:
        return None
    content_type = browser_type(part_bytes(part, 0, HEAD_BYTES))
    return None if content_type is None else Media(content_type, size, lambda start, n: part_bytes(part, start, n))


def stream_of(value: Any) -> Any | None:
    """Return the file of an unread audio or video decoder; None for other values."""
    return value.stream if isinstance(value, MediaFile) else None


def is_sound(name: str, value: Any) -> bool:
    """Return whether a tensor or array ``[channels, samples]`` or ``[samples]`` is audio, by name and shape."""
    shape = tuple(getattr(value, "shape", ()))
    named = any(word in name.lower() for word in _SOUND_NAMES)
    return named and len(shape) in (1, 2) and shape[-1] > 400 and (len(shape) == 1 or shape[0] <= 8)


def is_film(value: Any) -> bool:
    """Return whether a tensor is video frames, uint8 ``[frames, 3, height, width]``."""
    return (
        isinstance(value, torch.Tensor)
        and value.ndim == 4
        and value.dtype == torch.uint8
        and value.shape[1] == 3
        and len(value) > 1
        and min(value.shape[2:]) >= 2
    )


def sound_rate(fields: Mapping[str, Any]) -> int | None:
    """Return the rate of audio from the fields next to it; None if not given."""
    for name in _RATE_NAMES:
        rate = fields.get(name)
        if isinstance(rate, torch.Tensor) and rate.numel() == 1:
            rate = rate.item()
        if isinstance(rate, (int, float)) and not isinstance(rate, bool) and 100 <= rate <= 400_000:
            return int(rate)
    return None


def clip_rate(owner: Any, number: int, kind: str) -> float | None:
    """Return the frames or samples per second of a clip that a decoder has read from a file."""
    clips, times = getattr(owner, f"{kind}_clips", None), getattr(owner, f"{kind}_timestamps", None)
    if not clips or not times or number >= min(len(clips), len(times)):
        return None
    seconds = float(times[number][1]) - float(times[number][0])
    length = clips[number].shape[0 if kind == "video" else -1]
    return length / seconds if seconds > 0 else None


def made_media(value: Any, path: Sequence[str]) -> Media | None:
    """Return the media at a path in a sample or batch made by hooks; None if it is not sent to browsers.

    A last path step ``film`` or ``sound`` selects the format in which a tensor is sent.

    Raises:
        LookupError: the path does not exist.
    """
    wanted = path[-1] if path and path[-1] in ("film", "sound") else None
    path = path[:-1] if wanted else path
    item = follow(value, path)
    if (stream := stream_of(item)) is not None:
        return _of_stream(stream)
    if isinstance(item, (bytes, bytearray)):
        return stored_media(item)
    if wanted is None:
        pixels = pixels_of(item)
        return None if pixels is None else Media.of("image/png", png_of(pixels))
    owner = follow(value, path[:-2]) if len(path) > 1 else None
    number = int(path[-1]) if path and path[-1].isdecimal() else 0
    if wanted == "sound":
        beside = dict(_fields(follow(value, path[:-1]))) if path else {}
        rate = clip_rate(owner, number, "audio") or sound_rate(beside) or SOUND_RATE
        return Media.of("audio/wav", wav_of(item, round(rate)))
    film = webm_of(item, clip_rate(owner, number, "video") or _FRAME_RATE) if is_film(item) else None
    return None if film is None else Media.of("video/webm", film)


def _of_stream(stream: Any) -> Media | None:
    """Return the media of a decoder's file, of which only requested ranges are read."""

    def read(start: int, size: int) -> bytes:
        with _STREAMS:  # a browser requests several ranges at once
            stream.seek(start)
            return bytes(stream.read(size))

    with _STREAMS:
        size = stream.seek(0, 2)
    content_type = browser_type(read(0, HEAD_BYTES))
    return None if content_type is None else Media(content_type, size, read)


def _fields(value: Any) -> Mapping[str, Any]:

    return dict(fields_of(value)) if not isinstance(value, (list, tuple, torch.Tensor)) else {}
