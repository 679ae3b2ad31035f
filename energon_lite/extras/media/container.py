"""Opening of audio and video files with PyAV, and translation of its errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from energon_lite.errors import DecodeError, EnergonLiteError, FatalSampleError

if TYPE_CHECKING:
    import av.container

__all__ = ["INSTALL", "has_pyav", "open_container", "opened"]

#: Advice for a missing PyAV.
INSTALL = "pip install 'energon-lite[av]'"


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
    if hasattr(stream, "seek"):
        stream.seek(0)
    container = av.open(stream, "r")
    for media_stream in container.streams:
        if media_stream.codec_context is not None:
            media_stream.codec_context.thread_type = "NONE"
            media_stream.codec_context.thread_count = 1
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
        raise DecodeError(
            f"the audio or video cannot be decoded: {type(error).__name__}: {error}",
            fix="repair or remove the file: it is damaged or cut off, or of a kind that FFmpeg does not know",
        ) from error
