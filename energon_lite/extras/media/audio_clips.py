"""Reader of clips of sound, cut at exact samples."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from energon_lite.errors import DecodeError

if TYPE_CHECKING:
    import av

__all__ = ["AudioReader"]

#: Seconds that are decoded before the start: a lossy codec needs the packets before the first wanted one.
_WARM_UP = 0.25
#: Codecs that do not need that.
_EXACT = ("pcm", "flac", "alac", "wavpack")
#: Seconds to seek further back if the first decoded frame comes too late; quadrupled each time.
_BACK = 2.0
#: Seconds by which the end of a file may differ from its header.
_TOLERANCE = 0.1


class AudioReader:
    """Reader of clips of the first audio stream of a container that was just opened.

    Args:
        container: from :func:`~energon_lite.extras.media.container.open_container`.
    """

    def __init__(self, container: av.container.InputContainer):
        from av.stream import Discard

        self._container = container
        self._stream = container.streams.audio[0]
        self._fresh = True
        #: Matroska files index the video only; a seek in the audio stream would start at the beginning of the file.
        videos = container.streams.video
        self._seek_by: Any = videos[0] if videos and "matroska" in container.format.name else self._stream
        if self._seek_by is self._stream:
            for video in videos:
                video.discard = Discard.all
        first = self._stream.start_time
        self._begin = 0.0 if first is None else float(first * self._stream.time_base)

    def read(self, start: float, stop: float) -> tuple[NDArray[Any], tuple[float, float]] | None:
        """Read a clip as ``[channels, samples]``, with its start and end in seconds; None: the sound ends before it.

        Args:
            start, stop: in seconds; ``stop`` may be infinite.

        Raises:
            DecodeError: the file ends earlier than its header states, and earlier than the clip.
        """
        pieces: list[NDArray[Any]] = []
        rate = 0
        have = 0
        wanted = math.inf
        first = end = start
        latest = -math.inf
        for frame in self._from(start):
            time, rate = float(frame.pts * frame.time_base), frame.sample_rate
            latest = time + frame.samples / rate
            stated = float((frame.pts + (frame.duration or 0)) * frame.time_base)
            skip = max(0, int((start - time) * rate + 0.5))
            if skip >= frame.samples and not (time <= start < latest):
                continue
            if not pieces:
                first = max(start, time)
                wanted = max(0, int((stop - first) * rate + 0.5)) if math.isfinite(stop) else math.inf
            piece = _array(frame)[:, skip:] if not pieces else _array(frame)
            end = stated if frame.duration else latest
            pieces.append(piece if have + piece.shape[1] <= wanted else piece[:, : int(wanted) - have])
            have += pieces[-1].shape[1]
            if have >= wanted:
                end = stop
                break
        else:
            self._check_end(latest, stop)
        if not pieces:
            return None
        return np.concatenate(pieces, axis=1), (first, end)

    def _from(self, start: float) -> Iterator[av.AudioFrame]:
        """Iterate over frames from ``start``, or slightly earlier, on."""
        name, back = self._stream.codec_context.name, 0.0
        early = start if name.startswith(_EXACT) else start - _WARM_UP
        while True:
            at_begin = early - back <= self._begin
            frames = self._frames(None if at_begin and self._fresh else max(self._begin, early - back))
            self._fresh = False
            frame = next(frames, None)
            if at_begin or frame is None or float(frame.pts * frame.time_base) <= max(early, self._begin):
                break
            back = 4 * back or _BACK
        if frame is not None:
            yield frame
            yield from frames

    def _frames(self, seconds: float | None) -> Iterator[av.AudioFrame]:
        if seconds is not None:
            from av.error import FFmpegError

            try:
                self._container.seek(math.floor(seconds / self._seek_by.time_base), stream=self._seek_by)
            except FFmpegError:  # some formats cannot seek: decode everything from the beginning
                self._container.seek(0)
        for frame in self._container.decode(self._stream):
            if frame.pts is not None and frame.samples:
                yield frame

    def _check_end(self, latest: float, stop: float) -> None:
        """Check a clip that ended with the file: if the format states exact lengths, the file has to be complete."""
        stream = self._stream
        if stream.duration is None or not stream.codec_context.name.startswith("flac"):
            return
        promised = float(stream.duration * stream.time_base)
        if latest < min(stop, promised) - _TOLERANCE:
            raise DecodeError(
                f"the audio ends at {max(latest, 0.0):.2f} s, its header says {promised:.2f} s: it is cut off",
                fix="repair or remove the file",
            )


def _array(frame: av.AudioFrame) -> NDArray[Any]:
    """The samples of a frame as ``[channels, samples]``; packed formats interleave the channels."""
    array: NDArray[Any] = frame.to_ndarray()
    if not frame.format.is_planar:
        array = array.reshape(frame.samples, frame.layout.nb_channels).T
    return array
