"""Opening a file with PyAV, and what goes wrong with it, in our words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from energon_lite.errors import DecodeError, EnergonLiteError, FatalSampleError

if TYPE_CHECKING:
    import av.container

__all__ = ["INSTALL", "has_pyav", "open_container", "opened"]

INSTALL = "pip install 'energon-lite[av]'"


def has_pyav() -> bool:
    """Whether PyAV is installed; it is not imported."""
    return find_spec("av") is not None


def open_container(stream: Any) -> av.container.InputContainer:
    """Open a file or a stream, from its beginning, with one thread: FFmpeg's own survive no fork, and workers are many.

    Raises:
        FatalSampleError: PyAV is not installed.
        av.error.FFmpegError: it is no audio or video.
    """
    try:
        import av
    except ImportError as error:
        raise FatalSampleError(f"audio and video need PyAV, which cannot be imported: {error}", fix=INSTALL) from error
    if hasattr(stream, "seek"):
        stream.seek(0)
    container = av.open(stream, "r")
    for one in container.streams:
        if one.codec_context is not None:
            one.codec_context.thread_type = "NONE"
            one.codec_context.thread_count = 1
    return container


@contextmanager
def opened(stream: Any) -> Iterator[av.container.InputContainer]:
    """:func:`open_container` for the time of a block, whose errors become ours.

    Raises:
        DecodeError: the file is damaged, or no audio or video.
    """
    try:
        with open_container(stream) as container:
            yield container
    except (EnergonLiteError, MemoryError):
        raise
    except Exception as error:  # FFmpeg's errors are of many classes; damaged files bring out others as well
        if isinstance(error, OSError) and not type(error).__module__.startswith("av"):
            raise  # the storage failed, not the file
        raise DecodeError(
            f"the audio or video cannot be decoded: {type(error).__name__}: {error}",
            fix="repair or remove the file: it is damaged or cut off, or of a kind that FFmpeg does not know",
        ) from error
