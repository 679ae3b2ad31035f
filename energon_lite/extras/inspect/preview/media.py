"""What a browser is sent of a sample: a stored part as it is, if it is a picture, a sound or a film by its first bytes;
a tensor as PNG, WAV or WebM. Nothing else, and nothing by the name of a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch

from energon_lite.extras.inspect.preview.browser_bytes import browser_type, pixels_of, png_of, wav_of, webm_of
from energon_lite.extras.inspect.preview.shown_sample import fields_of, follow, part_bytes, part_size
from energon_lite.extras.media.av_decoder import AVDecoder
from energon_lite.extras.media.content import HEAD_BYTES

__all__ = ["SOUND_RATE", "Media", "is_film", "is_sound", "made_media", "sound_rate", "stored_media", "stream_of"]

#: Sounds of which nobody says so are played with so many samples a second.
SOUND_RATE = 16_000
_SOUND_NAMES = ("audio", "wave", "sound", "speech")
_RATE_NAMES = ("sample_rate", "sampling_rate", "sr", "rate", "audio_rate")
_STREAMS = Lock()
#: Frames of a film without a rate of its own, a second.
_FRAME_RATE = 8.0


@dataclass(frozen=True)
class Media:
    """Bytes for a browser.

    Args:
        content_type: what they are.
        size: how many.
        read: some of them: from where, and how many.
    """

    content_type: str
    size: int
    read: Callable[[int, int], bytes]

    @classmethod
    def of(cls, content_type: str, data: bytes) -> Media:
        """Bytes that are there."""
        return cls(content_type, len(data), lambda start, size: data[start : start + size])


def stored_media(part: Any) -> Media | None:
    """A stored part; None: it is nothing that a browser is sent."""
    size = part_size(part)
    if not size:
        return None
    content_type = browser_type(part_bytes(part, 0, HEAD_BYTES))
    return None if content_type is None else Media(content_type, size, lambda start, n: part_bytes(part, start, n))


def stream_of(value: Any) -> Any | None:
    """The file of a decoder of audio and video that was not asked for clips; None: it is none."""
    return value.stream if isinstance(value, AVDecoder) else None


def is_sound(name: str, value: Any) -> bool:
    """Whether a tensor or an array ``[channels, samples]`` or ``[samples]`` is a sound, by its name and its shape."""
    shape = tuple(getattr(value, "shape", ()))
    named = any(word in name.lower() for word in _SOUND_NAMES)
    return named and len(shape) in (1, 2) and shape[-1] > 400 and (len(shape) == 1 or shape[0] <= 8)


def is_film(value: Any) -> bool:
    """Whether a tensor is frames, uint8 ``[frames, 3, height, width]``."""
    return (
        isinstance(value, torch.Tensor)
        and value.ndim == 4
        and value.dtype == torch.uint8
        and value.shape[1] == 3
        and len(value) > 1
        and min(value.shape[2:]) >= 2
    )


def sound_rate(fields: Mapping[str, Any]) -> int | None:
    """What the fields beside a sound say of its rate."""
    for name in _RATE_NAMES:
        found = fields.get(name)
        if isinstance(found, torch.Tensor) and found.numel() == 1:
            found = found.item()
        if isinstance(found, (int, float)) and not isinstance(found, bool) and 100 <= found <= 400_000:
            return int(found)
    return None


def clip_rate(owner: Any, number: int, kind: str) -> float | None:
    """Frames, or samples, a second of a clip that a decoder has taken out of a file."""
    clips, times = getattr(owner, f"{kind}_clips", None), getattr(owner, f"{kind}_timestamps", None)
    if not clips or not times or number >= min(len(clips), len(times)):
        return None
    seconds = float(times[number][1]) - float(times[number][0])
    length = clips[number].shape[0 if kind == "video" else -1]
    return length / seconds if seconds > 0 else None


def made_media(value: Any, path: Sequence[str]) -> Media | None:
    """What is at a path inside of a sample or a batch that hooks made; None: it is nothing that a browser is sent.

    A last step ``film`` or ``sound`` says what a tensor is to be sent as.

    Raises:
        LookupError: nothing is there.
    """
    wanted = path[-1] if path and path[-1] in ("film", "sound") else None
    path = path[:-1] if wanted else path
    found = follow(value, path)
    if (stream := stream_of(found)) is not None:
        return _of_stream(stream)
    if isinstance(found, (bytes, bytearray)):
        return stored_media(found)
    if wanted is None:
        pixels = pixels_of(found)
        return None if pixels is None else Media.of("image/png", png_of(pixels))
    owner = follow(value, path[:-2]) if len(path) > 1 else None
    number = int(path[-1]) if path and path[-1].isdecimal() else 0
    if wanted == "sound":
        beside = dict(_fields(follow(value, path[:-1]))) if path else {}
        rate = clip_rate(owner, number, "audio") or sound_rate(beside) or SOUND_RATE
        return Media.of("audio/wav", wav_of(found, round(rate)))
    film = webm_of(found, clip_rate(owner, number, "video") or _FRAME_RATE) if is_film(found) else None
    return None if film is None else Media.of("video/webm", film)


def _of_stream(stream: Any) -> Media | None:
    """A file that a decoder has, of which only what is asked for is read."""

    def read(start: int, size: int) -> bytes:
        with _STREAMS:  # a browser asks for several stretches at once
            stream.seek(start)
            return bytes(stream.read(size))

    with _STREAMS:
        size = stream.seek(0, 2)
    content_type = browser_type(read(0, HEAD_BYTES))
    return None if content_type is None else Media(content_type, size, read)


def _fields(value: Any) -> Mapping[str, Any]:

    return dict(fields_of(value)) if not isinstance(value, (list, tuple, torch.Tensor)) else {}
