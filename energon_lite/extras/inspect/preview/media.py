"""Media of a sample for a browser.

A stored part is sent unchanged if its first bytes are those of an image, audio or video, never by a name: a document
named ``cat.jpg`` is not an image; neither is SVG, which can contain programs. A tensor is sent as PNG, WAV or WebM.
Nothing else is sent."""

from __future__ import annotations

import io
import struct
import wave
import zlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any

import numpy as np
import torch

from energon_lite import tensors
from energon_lite.storage.read.ranges import PartRange
from energon_lite.storage.samples.part_decoder import HEAD_BYTES, MediaFile, guess_extension

#: Content types that browsers show, by the extension that :func:`guess_extension` returns for the bytes.
BROWSER_TYPES = {
    "jpg": "image/jpeg",
    "png": "image/png",
    "gif": "image/gif",
    "webp": "image/webp",
    "bmp": "image/bmp",
    "flac": "audio/flac",
    "mp3": "audio/mpeg",
    "wav": "audio/wav",
    "aac": "audio/aac",
    "m4a": "audio/mp4",
    "ogg": "audio/ogg",
    "mp4": "video/mp4",
    "m4v": "video/mp4",
    "mov": "video/mp4",
    "webm": "video/webm",
}
#: The most pixels along a side of a sent image; larger images are thinned out.
_LARGEST_SIDE = 2048


def browser_type(head: bytes) -> str | None:
    """Return the content type of media by its first bytes; None if it is not sent to browsers.

    Example:
        >>> browser_type(b"\\x89PNG\\r\\n"), browser_type(b"<svg onload=...>")
        ('image/png', None)
    """
    content_type = BROWSER_TYPES.get(guess_extension(head) or "")
    # An Ogg file may be a video; its first page names the codec.
    return "video/ogg" if content_type == "audio/ogg" and b"theora" in head else content_type


def pixels_of(value: Any) -> np.ndarray[Any, Any] | None:
    """Return an image as uint8 ``[height, width, 1 or 3 or 4]``; None if the value is not an image.

    Args:
        value: an image of Pillow; a tensor ``[1, 3 or 4, height, width]``; or an array ``[height, width, 1, 3 or 4]``.
            Fractions range from 0 to 1; others are rescaled.
    """
    if hasattr(value, "getbands"):
        return np.asarray(value.convert("RGBA" if "A" in value.getbands() else "RGB"))
    if isinstance(value, torch.Tensor) and value.ndim == 3 and value.shape[0] in (1, 3, 4):
        value = value.detach().cpu().permute(1, 2, 0)
        value = value.float().numpy() if value.dtype.is_floating_point else value.numpy()
    elif not (isinstance(value, np.ndarray) and value.ndim == 3 and value.shape[2] in (1, 3, 4)):
        return None
    if not value.size or value.dtype.kind not in "uif" or min(value.shape[:2]) < 2:
        return None
    thin = -(-max(value.shape[:2]) // _LARGEST_SIDE)
    value = value[::thin, ::thin]
    if value.dtype.kind == "f":
        finite = np.nan_to_num(value.astype(np.float64))
        low, high = min(0.0, float(finite.min())), max(1.0, float(finite.max()))
        value = (finite - low) / (high - low) * 255
    return np.ascontiguousarray(value.clip(0, 255).astype(np.uint8))


def png_of(pixels: np.ndarray[Any, Any]) -> bytes:
    """Encode uint8 ``[height, width, 1 or 3 or 4]`` as PNG, without an image library."""
    height, width, channels = pixels.shape
    colour = {1: 0, 3: 2, 4: 6}[channels]
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, width * channels)], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 6)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )


def wav_of(sound: Any, rate: int) -> bytes:
    """Encode a tensor or an array ``[channels, samples]`` or ``[samples]`` as WAV, in 16-bit integers.

    Args:
        sound: fractions from -1 to 1, or 16-bit integers.
        rate: samples per second.
    """
    values = sound.detach().cpu().float().numpy() if isinstance(sound, torch.Tensor) else np.asarray(sound)
    kind = str(getattr(sound, "dtype", values.dtype))
    values = values.reshape(-1, values.shape[-1]).astype(np.float64)
    scale = 1.0 if "int16" in kind else 2.0**-16 if "int32" in kind else 32767.0
    values = np.nan_to_num(values * scale).clip(-32768, 32767).astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(values.shape[0])
        out.setsampwidth(2)
        out.setframerate(max(1, int(rate)))
        out.writeframes(np.ascontiguousarray(values.T).tobytes())
    return file.getvalue()


def webm_of(frames: torch.Tensor, rate: float) -> bytes | None:
    """Encode frames, uint8 ``[frames, 3, height, width]``, as WebM; None if PyAV is not installed."""
    try:
        import av
    except ImportError:
        return None
    file, thin = io.BytesIO(), -(-max(frames.shape[2:]) // 640)
    small = frames[:, :, ::thin, ::thin]
    height, width = (size // 2 * 2 for size in small.shape[2:])
    with av.open(file, "w", format="webm") as container:
        stream: Any = container.add_stream("libvpx", rate=max(1, round(rate)))
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.options = {"deadline": "realtime", "cpu-used": "8", "crf": "10", "b": "2M"}
        for frame in small[:, :, :height, :width].permute(0, 2, 3, 1):
            picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame.numpy()), format="rgb24")
            container.mux(stream.encode(picture))
        container.mux(stream.encode())
    return file.getvalue()


#: Fields that every sample has, and that say nothing about its contents.
HIDDEN = frozenset({"__restore_key__", "__sources__", "__shard__", "__key__", "__tags__"})
#: Samples per second of audio whose rate is not known.
SOUND_RATE = 16_000
_SOUND_NAMES = ("audio", "wave", "sound", "speech")
_RATE_NAMES = ("sample_rate", "sampling_rate", "sr", "rate", "audio_rate")
#: Largest number of values that is taken for something else than a sound.
_SHORTEST = 400
#: Most channels of a sound.
_CHANNELS = 8
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


def stored_media(value: Any) -> Media | None:
    """Return the media of a stored part, or of the file of an unread decoder; None if they are not sent to browsers."""
    if isinstance(value, MediaFile):
        stream = value.stream

        def read(start: int, size: int) -> bytes:
            with _STREAMS:  # a browser requests several ranges at once
                stream.seek(start)
                return bytes(stream.read(size))

        with _STREAMS:
            size = stream.seek(0, 2)
    else:
        size, read = part_size(value) or 0, partial(part_bytes, value)
    content_type = browser_type(read(0, HEAD_BYTES)) if size else None
    return None if content_type is None else Media(content_type, size, read)


def is_sound(name: str, value: Any) -> bool:
    """Return whether a tensor or array ``[channels, samples]`` or ``[samples]`` is audio, by name and shape."""
    shape = tuple(getattr(value, "shape", ()))
    named = any(word in name.lower() for word in _SOUND_NAMES)
    return named and len(shape) in (1, 2) and shape[-1] > _SHORTEST and (len(shape) == 1 or shape[0] <= _CHANNELS)


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
    if clips is None or times is None or number >= min(len(clips), len(times)):
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
    if isinstance(item, (MediaFile, bytes, bytearray)):
        return stored_media(item)
    if wanted is None:
        pixels = pixels_of(item)
        return None if pixels is None else Media.of("image/png", png_of(pixels))
    owner = follow(value, path[:-2]) if len(path) > 1 else None
    number = int(path[-1]) if path and path[-1].isdecimal() else 0
    if wanted == "sound":
        parent = follow(value, path[:-1]) if path else ()
        beside = {} if isinstance(parent, (list, tuple, torch.Tensor)) else dict(fields_of(parent))
        rate = clip_rate(owner, number, "audio") or sound_rate(beside) or SOUND_RATE
        return Media.of("audio/wav", wav_of(item, round(rate)))
    film = webm_of(item, clip_rate(owner, number, "video") or _FRAME_RATE) if is_film(item) else None
    return None if film is None else Media.of("video/webm", film)


def fields_of(value: Any, hidden: Container[str] = HIDDEN) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a sample or a batch that are not hidden, for any kind of object."""
    fields = value if isinstance(value, Mapping) else tensors.fields_of(value)
    pairs = {"value": value} if fields is None else fields
    return ((str(name), item) for name, item in pairs.items() if str(name) not in hidden)


def follow(value: Any, path: Sequence[str]) -> Any:
    """Return the value at a path of names and numbers inside a sample.

    Raises:
        LookupError: the path does not exist; names of methods do not count.
    """
    for step in path:
        if isinstance(value, (torch.Tensor, list, tuple)) and not hasattr(value, "_asdict"):
            if not step.isdecimal() or int(step) >= len(value):
                raise LookupError(step)
            value = value[int(step)]
            continue
        fields = dict(fields_of(value))
        value = fields[step]
    return value


def part_size(part: Any) -> int | None:
    """Return the number of bytes of a stored part; None if it is a value."""
    if isinstance(part, PartRange):
        return part.size
    return len(part) if isinstance(part, (bytes, bytearray, memoryview)) else None


def part_bytes(part: Any, start: int, size: int) -> bytes:
    """Return some bytes of a stored part."""
    if isinstance(part, PartRange):
        return bytes(part.read(start, max(0, min(size, part.size - start))))
    return bytes(part[start : start + size])
