"""Readers of clips of sound, cut at exact samples, and of clips of video, by the time at which frames are shown.

A frame is shown from its own time stamp until that of the next one; requested times are rounded to the nearest tick of
the stream's clock, so that ``1 / 30`` gives the frame that begins there. Frame rates are not used: so frames of streams
with a variable rate are found in the same way, and video and sound of the same time belong together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from energon_lite.errors import DecodeError

if TYPE_CHECKING:
    import av

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
        #: A clip can be decoded after another one: seeking does not change the samples.
        self.reusable = self._stream.codec_context.name.startswith("pcm")
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
        rate = have = 0
        wanted = math.inf
        first = end = start
        latest = -math.inf
        for frame in self._from(start):
            time, rate = _seconds(frame, frame.pts), frame.sample_rate
            latest = time + frame.samples / rate
            stated = _seconds(frame, frame.pts + (frame.duration or 0))
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
        back = 0.0
        early = start if self._stream.codec_context.name.startswith(_EXACT) else start - _WARM_UP
        while True:
            at_begin = early - back <= self._begin
            frames = self._frames(None if at_begin and self._fresh else max(self._begin, early - back))
            self._fresh = False
            frame = next(frames, None)
            if at_begin or frame is None or _seconds(frame, frame.pts) <= max(early, self._begin):
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


def _seconds(frame: av.AudioFrame, ticks: int) -> float:
    base = frame.time_base
    return ticks * base.numerator / base.denominator  # products of fractions take most of the time of small frames


def _array(frame: av.AudioFrame) -> NDArray[Any]:
    """The samples of a frame as ``[channels, samples]``; packed formats interleave the channels."""
    array: NDArray[Any] = frame.to_ndarray()
    if not frame.format.is_planar:
        array = array.reshape(frame.samples, frame.layout.nb_channels).T
    return array


#: Seconds that are decoded rather than skipped by a seek, if key frames are unknown.
_FORWARD = 2.0
#: Ticks by which a time may differ from its true value because of floating point.
_FLOAT_ERROR = 1e-4


class VideoReader:
    """Reader of clips of the first video stream of a container that was just opened. Clips that follow each other
    closely are decoded without a seek.

    Args:
        container: from :func:`~energon_lite.extras.media.container.open_container`.
        source: the file that the container reads; if it has a method ``fetch_ahead(start, stop)``, that is called with
            the bytes of each clip.
    """

    def __init__(self, container: av.container.InputContainer, source: Any = None):
        from av.video.reformatter import VideoReformatter

        self.container = container
        self.stream = container.streams.video[0]
        self.time_base = self.stream.time_base
        #: Duration of each frame in ticks, if the header says that it is the same for all; otherwise 0.
        self._constant = _constant_duration(container)
        self._varies = "mov" in container.format.name
        self._tell = getattr(source, "fetch_ahead", None)
        self._reformat = VideoReformatter().reformat
        self._frames: Iterator[av.VideoFrame] | None = None
        #: The frame after the current one, if it has been decoded; and the current one.
        self._next: av.VideoFrame | None = None
        self._current: av.VideoFrame | None = None

    def ticks(self, seconds: float) -> int:
        """The tick nearest to a time; the earlier of two: half a tick is the middle of a frame of one tick."""
        return math.ceil(seconds / float(self.time_base) - 0.5 - _FLOAT_ERROR)

    def read(
        self, start: int, stop: int | None, size: tuple[int, int] | None = None
    ) -> tuple[NDArray[np.uint8], tuple[float, float]] | None:
        """Read the frames that are shown from tick ``start`` to tick ``stop`` inclusive (None: to the end), at least
        one, as ``[frames, height, width, 3]``, with the start of the first and the end of the last in seconds; None:
        the video ends before ``start``.

        Args:
            size: width and height that frames are resized to; None: they are not resized.

        Raises:
            DecodeError: the frames have different sizes.
        """
        pictures = bytearray()  # it grows without being copied
        shape = first = last = None
        width, height = size or (None, None)
        for frame in self._shown(start, stop):
            picture = self._reformat(
                frame, width=width, height=height, format="rgb24", interpolation="BILINEAR", threads=1
            )
            pixels = np.ascontiguousarray(picture.to_ndarray())
            shape = shape or pixels.shape
            if pixels.shape != shape:
                raise DecodeError(
                    f"frames of a clip have different sizes, {shape[:2]} and {pixels.shape[:2]}",
                    fix="give video_out_frame_size=(width, height)",
                )
            pictures += pixels.data
            first, last = first or frame, frame
        if first is None or last is None or shape is None:
            return None
        # FFmpeg gives durations in the order of the file; variable ones may not belong to the frame shown then.
        after = self._after() if self._varies and stop is not None and last is self._current else None
        end = (last.pts + (last.duration or 0) if after is None else after) * last.time_base
        return np.frombuffer(pictures, np.uint8).reshape(-1, *shape), (float(first.pts * first.time_base), float(end))

    def _shown(self, start: int, stop: int | None) -> Iterator[av.VideoFrame]:
        self._go_to(start, stop)
        while self._current is not None:
            yield self._current
            if stop is not None:
                after = self._after()
                if after is None or after > stop:
                    return
            self._advance()

    def _go_to(self, start: int, stop: int | None) -> None:
        """Make the frame that is shown at ``start`` the current one; None: there is no such frame."""
        here = self._current
        if here is None or not self._is_near(here.pts, start):
            self._search(start, stop)
        while self._current is not None:
            after = self._after()
            if after is None:
                if _end(self._current) <= start:
                    self._current = None
                return
            if after > start:
                return
            self._advance()

    def _after(self) -> int | None:
        """The tick at which the frame after the current one is shown; None: there is none. That frame is decoded,
        unless all have the same duration."""
        assert self._current is not None
        if self._next is None:
            if self._constant:
                return int(self._current.pts + self._constant)
            self._next = next(self._frames, None) if self._frames is not None else None
        return None if self._next is None else int(self._next.pts)

    def _advance(self) -> None:
        if self._next is None and self._frames is not None:
            self._next = next(self._frames, None)
        self._current = self._next
        self._next = None

    def _is_near(self, here: int, start: int) -> bool:
        """Return True if decoding should continue from frame ``here`` instead of seeking to ``start``."""
        if here > start:
            return False
        key = _key_frame(self.stream, start)
        if key is not None:
            return bool(key.timestamp <= here)
        return bool((start - here) * self.time_base <= _FORWARD)

    def _search(self, start: int, stop: int | None) -> None:
        back, begin = 0, self.stream.start_time or 0
        unused = self._frames is None
        while True:
            target = start - back
            if self._tell is not None or not (unused and target <= begin):
                self.container.seek(max(target, begin), stream=self.stream)
            if self._tell is not None:
                self._tell_range(max(target, begin), stop)
            unused = False
            self._frames = self._decoded()
            self._next = None
            self._current = next(self._frames, None)
            if target <= begin or (self._current is not None and self._current.pts <= start):
                return
            back = 4 * back or max(1, self.ticks(_BACK))

    def _decoded(self) -> Iterator[av.VideoFrame]:
        after = None
        for frame in self.container.decode(self.stream):
            if frame.pts is None:
                frame.pts = after
            if frame.pts is not None:
                after = frame.pts + (frame.duration or 0)
                yield frame

    def _tell_range(self, start: int, stop: int | None) -> None:
        """Announce the bytes of the groups of pictures of a clip to the source, if the file's index has them."""
        assert self._tell is not None
        entries = self.stream.index_entries
        first = _key_frame(self.stream, start)
        if first is None or stop is None:
            return
        low, high = first.pos, None
        number = entries.search_timestamp(stop, backward=False)
        if number >= 0 and entries[number].timestamp <= stop:
            number = entries.search_timestamp(stop + 1, backward=False)
        if number >= 0:
            high = entries[number].pos
        elif len(entries):
            last = entries[len(entries) - 1]
            high = last.pos + last.size if last.size else None
        if high is None or high > low:
            self._tell(low, high)


def _constant_duration(container: av.container.InputContainer) -> int:
    stream = container.streams.video[0]
    if "mov" not in container.format.name or not stream.frames or not stream.duration or not stream.average_rate:
        return 0
    ticks = 1 / (stream.average_rate * stream.time_base)
    return int(ticks) if ticks == int(ticks) and ticks * stream.frames == stream.duration else 0


def _end(frame: av.VideoFrame) -> int:
    return frame.pts + max(1, frame.duration or 0)


def _key_frame(stream: Any, tick: int) -> Any:
    """The index entry of the last key frame at or before ``tick``; None: the file has no index of them."""
    entries = stream.index_entries
    if len(entries) < 2:
        return None
    number = entries.search_timestamp(tick)
    return entries[number] if number >= 0 else None


def frame_ticks(container: av.container.InputContainer) -> NDArray[np.int64]:
    """Return the time stamps of all frames of the first video stream, in order, in ticks of its clock: ``[frames]``.

    They come from the index of the file if that has every frame, at equal distances (MP4 of a constant rate).
    Otherwise all packets of the file are read, but nothing is decoded.
    """
    stream = container.streams.video[0]
    if "mov" in container.format.name and stream.frames and len(stream.index_entries) == stream.frames:
        entries = list(stream.index_entries)
        ticks = np.array([entry.timestamp for entry in entries], dtype=np.int64)
        steps = np.diff(ticks)
        if not any(entry.is_discard for entry in entries) and (not len(steps) or (steps == steps[0]).all()):
            return ticks - ticks[0] + (stream.start_time or 0)
    times = [packet.pts for packet in container.demux(stream) if packet.pts is not None]
    container.seek(stream.start_time or 0, stream=stream)
    return np.array(sorted(times), dtype=np.int64)
