"""Media for a browser: stored parts by their first bytes, and tensors as PNG and WAV.

Only a few kinds of images, audio and video are sent, recognized by their first bytes and never by a name. So a document
named ``cat.jpg`` is not an image; neither is SVG, which can contain programs.
"""

from __future__ import annotations

import io
import struct
import wave
import zlib
from typing import Any

import numpy as np
import torch

from energon_lite.storage.samples.content import guess_extension

__all__ = ["BROWSER_TYPES", "browser_type", "kind_of_type", "pixels_of", "png_of", "wav_of", "webm_of"]

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


def kind_of_type(content_type: str | None) -> str | None:
    """Return ``image``, ``audio`` or ``video``, the main type of a content type."""
    return None if content_type is None else content_type.partition("/")[0]


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
