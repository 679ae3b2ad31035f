"""Decoder of an audio or video file, which decodes clips on request."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, overload

from energon_lite.errors import DecodeError, UsageError, check_choice, did_you_mean
from energon_lite.extras.media import DECODERS
from energon_lite.extras.media.clips import AudioReader, VideoReader, frame_ticks
from energon_lite.extras.media.container import INSTALL, AVData, has_pyav, missing_bytes, open_container, opened
from energon_lite.extras.media.metadata import AVMetadata, add_audio, add_video
from energon_lite.storage.samples.part_decoder import HEAD_BYTES, DecoderSettings, guess_extension

if TYPE_CHECKING:
    import av.container
    import torch

#: Forms that a part of audio or video can become.
_FORMS = ("AVDecoder", "torch", "pyav")

#: Start and end of clips, in seconds, or numbers of frames or samples.
Ranges = Sequence[tuple[float, float]]
#: The tensors of clips, and their start and end in seconds.
Clips = tuple[list["torch.Tensor"], list[tuple[float, float]]]
_ALL = ((0.0, math.inf),)


class AVDecoder:
    """A file of audio or video. It is opened and decoded only when a method is called, and is closed afterwards.

    It can be pickled, for example to leave worker processes: with the bytes, or, if it reads a file, with its place.

    Args:
        stream: an open, seekable binary file: ``io.BytesIO(data)``, ``open(path, "rb")``, or the result of
            :func:`energon_lite.storage.open_stream`, which fetches only the bytes that a clip needs.
        suppress_warnings: accepted as in Energon; there are no warnings here.
        allow_truncated: decode the existing part of a truncated file instead of raising an error.

    Raises:
        UsageError: the stream is a text file.

    Example:
        >>> decoder = AVDecoder(open("film.mp4", "rb"))
        >>> clips, times = decoder.get_video_clips([(0, 1), (10, 11)])
        >>> clips[0].shape  # [frames, channels, height, width]; at 30 frames per second, the end counts
        torch.Size([31, 3, 480, 640])
    """

    def __init__(self, stream: BinaryIO, suppress_warnings: bool = False, *, allow_truncated: bool = False) -> None:
        if isinstance(stream, io.TextIOBase) or "t" in getattr(stream, "mode", "rb"):
            raise UsageError("the stream is one of text", fix='open the file with "rb"')
        self.stream = stream
        self.suppress_warnings = suppress_warnings
        self.allow_truncated = allow_truncated
        self._is_whole = False

    def __repr__(self) -> str:
        return f"AVDecoder(stream={self.stream!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (_portable(self.stream), self.suppress_warnings, self.allow_truncated)

    @contextmanager
    def _open(self) -> Iterator[av.container.InputContainer]:
        if not self._is_whole and not self.allow_truncated:
            missing = missing_bytes(self.stream)
            if missing:
                raise DecodeError(
                    f"the file was cut off: {missing:,} bytes are missing at its end",
                    fix="get it whole, or leave it out; AVDecoder(stream, allow_truncated=True) decodes what there is",
                )
            self._is_whole = True
        with opened(self.stream) as container:
            yield container

    def check(self) -> None:
        """Check that the file is complete and has audio or video, without decoding.

        Raises:
            DecodeError: the file is incomplete, or has neither.
        """
        with self._open() as container:
            if not (container.streams.video or container.streams.audio):
                raise DecodeError("there is neither audio nor video in the file", fix="leave it out")

    # -- clips ------------------------------------------------------------------------------------------------------

    def get_video(self) -> AVData:
        """Decode all frames, without sound."""
        return self.get_clips(video_clip_ranges=_ALL)

    def get_audio(self) -> AVData:
        """Decode all of the sound."""
        return self.get_clips(audio_clip_ranges=_ALL)

    def get_video_with_audio(self) -> AVData:
        """Decode all frames, and all of the sound."""
        return self.get_clips(video_clip_ranges=_ALL, audio_clip_ranges=_ALL)

    def get_video_clips(
        self,
        video_clip_ranges: Ranges,
        video_unit: Literal["frames", "seconds"] = "seconds",
        video_out_frame_size: tuple[int, int] | None = None,
    ) -> Clips:
        """Decode clips of the video.

        Args:
            video_clip_ranges: start and end of each clip, both included: the last frame is the one that is shown at the
                end, so a range ``(t, t)`` is one frame. A range behind the end of the video gives no clip.
            video_unit: unit of these numbers: seconds, or numbers of frames from 0 on.
            video_out_frame_size: width and height that frames are resized to; None: they are not resized.

        Returns:
            ``[frames, channels, height, width]`` (uint8, RGB) for each clip; start of the first and end of the last
            frame of each, in seconds.

        Raises:
            DecodeError: the file is damaged or has no video.
            UsageError: a range ends before it starts.
        """
        import torch

        check_choice("video_unit", video_unit, ("frames", "seconds"))
        _check_ranges(video_clip_ranges)
        clips: list[torch.Tensor] = []
        times: list[tuple[float, float]] = []
        with self._open() as container:
            if not container.streams.video:
                raise DecodeError("there is no video in the file", fix="ask for its audio, or has_video_stream() first")
            ticks = frame_ticks(container) if video_unit == "frames" else None
            reader = VideoReader(container, self.stream)
            for start, stop in video_clip_ranges:
                if ticks is None:
                    first, last = reader.ticks(start), None if stop == math.inf else reader.ticks(stop)
                elif int(start) < len(ticks):
                    last = None if stop == math.inf else int(ticks[min(int(stop), len(ticks) - 1)])
                    first = int(ticks[int(start)])
                else:
                    continue
                clip = reader.read(first, last, video_out_frame_size)
                if clip is not None:
                    clips.append(torch.from_numpy(clip[0]).permute(0, 3, 1, 2))
                    times.append(clip[1])
        return clips, times

    def get_audio_clips(
        self, audio_clip_ranges: Ranges, audio_unit: Literal["samples", "seconds"] = "seconds"
    ) -> Clips:
        """Decode clips of the sound, cut at exact samples.

        Args:
            audio_clip_ranges: start and end of each clip. A range behind the end of the sound gives no clip.
            audio_unit: unit of these numbers.

        Returns:
            ``[channels, samples]`` for each clip, in the codec's type; start and end of each, in seconds.

        Raises:
            DecodeError: the file is damaged or has no audio.
            UsageError: a range ends before it starts.
        """
        import torch

        check_choice("audio_unit", audio_unit, ("samples", "seconds"))
        _check_ranges(audio_clip_ranges)
        clips: list[torch.Tensor] = []
        times: list[tuple[float, float]] = []
        reader, rate = None, 1
        with ExitStack() as file:
            for start, stop in audio_clip_ranges:
                if reader is None or not reader.reusable:
                    file.close()
                    container = file.enter_context(self._open())
                    if not container.streams.audio:
                        raise DecodeError("there is no audio in the file", fix="has_audio_stream() tells if there is")
                    rate = container.streams.audio[0].sample_rate if audio_unit == "samples" else 1
                    reader = AudioReader(container)
                clip = reader.read(start / rate, stop / rate)
                if clip is not None:
                    clips.append(torch.from_numpy(clip[0]))
                    times.append(clip[1])
        return clips, times

    def get_clips(
        self,
        video_clip_ranges: Ranges | None = None,
        audio_clip_ranges: Ranges | None = None,
        video_unit: Literal["frames", "seconds"] = "seconds",
        audio_unit: Literal["samples", "seconds"] = "seconds",
        video_out_frame_size: tuple[int, int] | None = None,
    ) -> AVData:
        """Decode clips of video and of sound; see :meth:`get_video_clips` and :meth:`get_audio_clips`.

        Example:
            >>> data = decoder.get_clips([(2, 4)], [(2, 4)])
            >>> data.video_clips[0].shape, data.audio_clips[0].shape
            (torch.Size([61, 3, 480, 640]), torch.Size([2, 96000]))
        """
        video: Clips = ([], [])
        audio: Clips = ([], [])
        if video_clip_ranges is not None:
            video = self.get_video_clips(video_clip_ranges, video_unit, video_out_frame_size)
        if audio_clip_ranges is not None:
            audio = self.get_audio_clips(audio_clip_ranges, audio_unit)
        return AVData(video_clips=video[0], video_timestamps=video[1], audio_clips=audio[0], audio_timestamps=audio[1])

    def get_frames(self, video_decode_audio: bool = False) -> AVData | None:
        """Decode the whole file: all frames, with the sound if ``video_decode_audio``; or the sound, if there are no
        frames; None: it has neither."""
        with self._open() as container:
            has_video, has_audio = bool(container.streams.video), bool(container.streams.audio)
        self.stream.seek(0)
        extension = guess_extension(self.stream.read(HEAD_BYTES))
        # The cover of an album is a video stream of one picture.
        if has_audio and extension in ("flac", "mp3", "wav", "m4a", "ogg", "aac"):
            return self.get_audio()
        if has_video:
            return self.get_video_with_audio() if video_decode_audio and has_audio else self.get_video()
        return self.get_audio() if has_audio else None

    # -- metadata ---------------------------------------------------------------------------------------------------

    def get_video_fps(self) -> float:
        """Frames per second on average."""
        rate = self.get_metadata(
            get_video_duration=False, get_video_frame_count=False, get_video_frame_size=False, get_audio=False
        ).video_fps
        if rate is None:
            raise DecodeError("there is no video in the file, or its rate is unknown", fix="ask for its audio")
        return rate

    def get_audio_samples_per_second(self) -> int:
        """Audio samples per second of each channel."""
        rate = self.get_metadata(get_video=False, get_audio_duration=False).audio_sample_rate
        if rate is None:
            raise DecodeError("there is no audio in the file", fix="has_audio_stream() says whether there is")
        return rate

    def has_audio_stream(self) -> bool:
        """Return True if the file has sound."""
        with self._open() as container:
            return bool(container.streams.audio)

    def has_video_stream(self) -> bool:
        """Return True if the file has video; a cover image counts."""
        with self._open() as container:
            return bool(container.streams.video)

    def get_audio_duration(self) -> float | None:
        """Seconds of sound; None: the file has no sound."""
        return self.get_metadata(get_video=False).audio_duration

    @overload
    def get_video_duration(self, get_frame_count: Literal[True]) -> tuple[float | None, int]: ...

    @overload
    def get_video_duration(self, get_frame_count: bool = False) -> tuple[float | None, int | None]: ...

    def get_video_duration(self, get_frame_count: bool = False) -> tuple[float | None, int | None]:
        """Seconds of video, and the number of frames if it is requested (this may take reading the whole file)."""
        metadata = self.get_metadata(
            get_video_frame_count=get_frame_count, get_video_frame_size=False, get_audio=False, get_audio_duration=False
        )
        return metadata.video_duration, metadata.video_num_frames

    def get_metadata(
        self,
        get_video: bool = True,
        get_video_duration: bool = True,
        get_video_frame_count: bool = True,
        get_video_frame_size: bool = True,
        get_audio: bool = True,
        get_audio_duration: bool = True,
        get_audio_num_samples: bool = False,
    ) -> AVMetadata:
        """Return the metadata of the file's streams.

        Args:
            get_video, get_audio: include the video, include the audio.
            get_video_duration, get_audio_duration: if the header lacks a duration, read all packets to find it.
            get_video_frame_count: read all packets to count frames; nothing is decoded.
            get_video_frame_size: decode the first frame.
            get_audio_num_samples: decode all of the sound.

        Raises:
            DecodeError: the file is damaged.
        """
        metadata = AVMetadata()
        with self._open() as container:
            if get_video and container.streams.video:
                add_video(metadata, container, get_video_duration, get_video_frame_count, get_video_frame_size)
            if get_audio and container.streams.audio:
                # After a seek the first samples are missing: all are counted only in a file that was just opened.
                with opened(self.stream) if get_audio_num_samples else nullcontext(container) as again:
                    add_audio(metadata, again, get_audio_duration, get_audio_num_samples)
        return metadata


class AVWebdatasetDecoder:
    """Decoder of the parts of samples whose name is that of audio or video.

    Args:
        video_decode_audio: decode the sound of a video as well; with ``av_decode="torch"``.
        av_decode: ``"AVDecoder"``, an :class:`AVDecoder`; ``"torch"``, the whole file decoded, as :class:`AVData`;
            ``"pyav"``, an open ``av.container.InputContainer``, which cannot leave its process.

    Example:
        >>> AVWebdatasetDecoder(video_decode_audio=False)("film.mp4", data).get_video_duration()
        (12.5, None)
    """

    def __init__(self, video_decode_audio: bool, av_decode: str = "AVDecoder") -> None:
        if av_decode not in _FORMS:
            fix = did_you_mean(av_decode, _FORMS, f"give one of {', '.join(_FORMS)}, or None", always=True)
            raise UsageError(f"av_decode {av_decode!r} is unknown", fix=fix)
        self.video_decode_audio = video_decode_audio
        self.av_decode = av_decode
        self.streams = av_decode == "AVDecoder"

    def read_av_data(self, data: bytes) -> AVDecoder:
        """Return a decoder of these bytes."""
        return AVDecoder(io.BytesIO(data))

    def __call__(self, key: str, data: bytes) -> Any:
        """Decode a part; None: its name is not that of audio or video.

        Args:
            key: name of the part, whose last extension counts.
            data: its bytes.
        """
        if key.lower().rpartition(".")[2] not in DECODERS["av"].extensions:
            return None
        return self.of_stream(io.BytesIO(data))

    def of_stream(self, stream: Any) -> Any:
        """Decode an open file into the chosen form."""
        if self.av_decode == "pyav":
            return open_container(stream)
        decoder = AVDecoder(stream)
        return decoder if self.av_decode == "AVDecoder" else decoder.get_frames(self.video_decode_audio)

    def check(self, part_name: str, where: str) -> None:
        """Check that PyAV is installed.

        Raises:
            UsageError: it is not.
        """
        if not has_pyav():
            raise UsageError(
                f"part {part_name!r} is audio or video, which needs PyAV; it is not installed",
                where=where,
                fix=f"{INSTALL}; or decoder = SampleDecoder(av_decode=None), with which it stays bytes",
            )


def part_decoder(settings: DecoderSettings) -> AVWebdatasetDecoder | None:
    """Return the decoder of audio and video for the settings; None: they stay bytes."""
    form = settings.av_decode
    return None if form is None else AVWebdatasetDecoder(settings.video_decode_audio, form)


def _check_ranges(ranges: Ranges) -> None:
    for start, stop in ranges:
        if not 0 <= start <= stop or start == math.inf:
            raise UsageError(f"the range ({start}, {stop}) of a clip is reversed", fix="give 0 <= start <= end")


def _portable(stream: Any) -> Any:
    """The origin from which another process can open the stream: bytes, a file's path, or the stream itself."""
    if isinstance(stream, io.BytesIO):
        return stream.getvalue()
    name = getattr(stream, "name", None)
    if isinstance(stream, (io.BufferedReader, io.FileIO)) and isinstance(name, (str, bytes)) and os.path.isfile(name):
        return os.path.abspath(os.fsdecode(name))
    if isinstance(stream, io.IOBase) and not hasattr(stream, "fetch_ahead"):
        stream.seek(0)
        return stream.read()
    return stream


def _again(origin: Any, suppress_warnings: bool, allow_truncated: bool) -> AVDecoder:
    stream = io.BytesIO(origin) if isinstance(origin, bytes) else origin
    if isinstance(origin, str):
        stream = io.BufferedReader(io.FileIO(origin))  # closed with the decoder
    return AVDecoder(stream, suppress_warnings, allow_truncated=allow_truncated)
