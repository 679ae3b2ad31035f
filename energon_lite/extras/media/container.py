"""Files of audio and video: opening with PyAV, its errors, detection of truncated files, and the decoded data.

FFmpeg decodes the existing part of a truncated Matroska, WAV or MP3 file without an error. In training that would mean
clips that end early unnoticed; therefore the length in the header is checked when a file is opened."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, BinaryIO

from energon_lite.errors import DecodeError, EnergonLiteError, FatalSampleError

if TYPE_CHECKING:
    import av.container
    import torch


@dataclass(slots=True, kw_only=True)
class AVData:
    """Decoded clips of one file. Kinds of clips that were not requested are empty lists.

    Args:
        video_clips: ``[frames, channels, height, width]``, uint8, for each clip.
        video_timestamps: start of the first and end of the last frame of each clip, in seconds.
        audio_clips: ``[channels, samples]`` for each clip, in the codec's type: float32 for AAC, MP3 and Opus, int16
            for 16-bit WAV.
        audio_timestamps: start and end of each clip, in seconds.
    """

    video_clips: list[torch.Tensor] | None
    video_timestamps: list[tuple[float, float]] | None
    audio_clips: list[torch.Tensor] | None
    audio_timestamps: list[tuple[float, float]] | None


#: Advice for a missing PyAV.
INSTALL = "pip install 'energon-lite[av]'"
#: Bytes of a WAV in which FFmpeg looks for compressed sound. Its default, 1 MB, takes a tenth of a second.
_WAV_PROBE = "65536"
#: Threads of a decoder that has its own, such as dav1d, whatever FFmpeg does.
_THREADS = 1


def has_pyav() -> bool:
    """Return True if PyAV is installed; it is not imported."""
    return find_spec("av") is not None


def open_container(stream: Any) -> av.container.InputContainer:
    """Open a file or stream at its beginning, with one thread: FFmpeg's threads do not survive a fork, and there are
    many workers.

    Raises:
        FatalSampleError: PyAV is not installed.
        av.error.FFmpegError: the file is no audio or video.
    """
    try:
        import av
    except ImportError as error:
        raise FatalSampleError(f"audio and video need PyAV, which cannot be imported: {error}", fix=INSTALL) from error
    options = {}
    if hasattr(stream, "seek"):
        head = _at(stream, 0, 12)
        if head.startswith(b"RIFF") and head.endswith(b"WAVE"):
            options["probesize"] = _WAV_PROBE
        stream.seek(0)
    container = av.open(stream, "r", options=options)
    for media_stream in container.streams:
        if media_stream.codec_context is not None:
            media_stream.codec_context.thread_type = "NONE"
            media_stream.codec_context.thread_count = _THREADS
    return container


@contextmanager
def opened(stream: Any) -> Iterator[av.container.InputContainer]:
    """:func:`open_container` for a block; errors of FFmpeg become those of this library.

    Raises:
        DecodeError: the file is damaged, or is no audio or video.
    """
    try:
        with open_container(stream) as container:
            yield container
    except (EnergonLiteError, MemoryError):
        raise
    except Exception as error:  # FFmpeg's errors have many classes; damaged files cause others as well
        if isinstance(error, OSError) and not type(error).__module__.startswith("av"):
            raise  # the storage failed
        what = getattr(error, "strerror", None) or error  # without FFmpeg's number
        raise DecodeError(
            f"the audio or video cannot be decoded: {type(error).__name__}: {what}",
            fix="repair or remove the file: it is damaged or cut off, or of a kind that FFmpeg does not know",
        ) from error


#: Most top-level boxes of an ISO file that are checked.
_MOST_BOXES = 64
#: Most bytes of the first frame of an MP3 that are searched for the table of contents.
_XING_WITHIN = 200


def missing_bytes(stream: BinaryIO) -> int:
    """Return the number of bytes that are missing at the end according to the headers; 0: none, or it is unknown. The
    position of the stream changes."""
    size = stream.seek(0, os.SEEK_END)
    head = _at(stream, 0, 64)
    if head[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
        end = _end_of_boxes(stream, size)
    elif head.startswith(b"\x1aE\xdf\xa3"):
        end = _end_of_segment(head)
    elif head.startswith(b"RIFF"):
        stated = int.from_bytes(head[4:8], "little")
        end = 0 if stated in (0, 0xFFFFFFFF, 0x7FFFFFFF) else 8 + stated
    elif head.startswith((b"ID3", b"\xff\xfb", b"\xff\xf3", b"\xff\xf2")):
        end = _end_of_mp3(stream, head)
    else:
        end = 0
    return max(0, end - size)


def _at(stream: BinaryIO, offset: int, size: int) -> bytes:
    stream.seek(offset)
    return stream.read(size)


def _end_of_boxes(stream: BinaryIO, size: int) -> int:
    """End of the last top-level box of an ISO file, in bytes; 0: it has other contents."""
    end = 0
    for _ in range(_MOST_BOXES):
        header = _at(stream, end, 16)
        if len(header) < 8:
            return end + 8 if header else end
        length = int.from_bytes(header[:4], "big")
        if length == 0:  # up to the end of the file
            return size
        if length == 1:
            length = int.from_bytes(header[8:16], "big")
        if length < 8:
            return 0  # no box: the length of the file is unknown
        end += length
        if end >= size:
            return end
    return end


def _end_of_segment(head: bytes) -> int:
    """End of the segment of a Matroska file, in bytes; 0: it is unknown."""
    length, place = _vint(head, 4)
    place += length
    if head[place : place + 4] != b"\x18S\x80g":
        return 0
    first = head[place + 4 : place + 5]
    if not first:
        return 0
    length, begin = _vint(head, place + 4)
    unknown = length == (1 << 7 * (begin - place - 4)) - 1
    return 0 if unknown else begin + length


def _vint(data: bytes, place: int) -> tuple[int, int]:
    """A number in Matroska's encoding of variable size, and the offset of its end."""
    first = data[place] if place < len(data) else 0
    size = 9 - first.bit_length() if first else 8
    number = int.from_bytes(data[place : place + size], "big") & ((1 << 7 * size) - 1)
    return number, place + size


def _end_of_mp3(stream: BinaryIO, head: bytes) -> int:
    """End of the frames of an MP3 that has a table of contents (Xing, Info), in bytes; 0: it has none."""
    start = 0
    if head.startswith(b"ID3"):
        size = 0
        for byte in head[6:10]:
            size = size << 7 | byte & 0x7F
        start = 10 + size
    frame = _at(stream, start, _XING_WITHIN)
    for name in (b"Xing", b"Info"):
        place = frame.find(name)
        if place >= 0:
            flags = int.from_bytes(frame[place + 4 : place + 8], "big")
            field = place + 8 + 4 * (flags & 1)
            return start + int.from_bytes(frame[field : field + 4], "big") if flags & 2 else 0
    return 0
