"""Clips at equal distances over a whole file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

import numpy as np

from energon_lite.errors import DecodeError, UsageError
from energon_lite.extras.media.av_decoder import AVDecoder
from energon_lite.extras.media.container import AVData

if TYPE_CHECKING:
    import torch


def get_clips_uniform(
    av_decoder: AVDecoder,
    clip_duration_seconds: float,
    num_clips: int,
    request_video: bool = False,
    request_audio: bool = False,
    video_out_frame_size: tuple[int, int] | None = None,
) -> AVData:
    """Decode clips of equal length at equal distances, the first at the beginning and the last at the end. If video and
    sound differ in length, the shorter one counts.

    Args:
        av_decoder: the file.
        clip_duration_seconds: length of each clip in seconds; 0: single frames.
        num_clips: number of clips.
        request_video, request_audio: decode the video, decode the sound.
        video_out_frame_size: width and height that frames are resized to; None: they are not resized.

    Raises:
        UsageError: neither was requested, or the file is shorter than a clip.
        DecodeError: the file is damaged, or lacks a requested stream.

    Example:
        >>> data = get_clips_uniform(decoder, clip_duration_seconds=2, num_clips=4, request_video=True)
        >>> [start for start, end in data.video_timestamps]
        [0.0, 16.0, 32.0, 48.0]
    """
    if not (request_video or request_audio):
        raise UsageError("neither video nor audio was asked for", fix="give request_video=True or request_audio=True")
    durations = [av_decoder.get_video_duration()[0]] if request_video else []
    durations += [av_decoder.get_audio_duration()] if request_audio else []
    known = [duration for duration in durations if duration is not None]
    if len(known) < len(durations):
        raise DecodeError("the file does not have the stream that was asked for", fix="see has_video_stream()")
    first, last = 0.0, min(known) - clip_duration_seconds
    if clip_duration_seconds == 0:
        half = 0.5 / av_decoder.get_video_fps()
        first, last = half, min(known) - half
    if last < 0:
        raise UsageError(
            f"the file has {min(known):g} s, a clip is to have {clip_duration_seconds:g} s", fix="ask for shorter clips"
        )
    clips = [(float(start), float(start + clip_duration_seconds)) for start in np.linspace(first, last, num_clips)]
    return av_decoder.get_clips(
        video_clip_ranges=clips if request_video else None,
        audio_clip_ranges=clips if request_audio else None,
        video_out_frame_size=video_out_frame_size,
    )


@overload
def get_single_frames_uniform(
    av_decoder: AVDecoder,
    num_frames: int,
    *,
    video_out_frame_size: tuple[int, int] | None = None,
    return_timestamps: Literal[False] = False,
) -> torch.Tensor: ...


@overload
def get_single_frames_uniform(
    av_decoder: AVDecoder,
    num_frames: int,
    *,
    video_out_frame_size: tuple[int, int] | None = None,
    return_timestamps: Literal[True],
) -> tuple[torch.Tensor, list[float]]: ...


def get_single_frames_uniform(
    av_decoder: AVDecoder,
    num_frames: int,
    *,
    video_out_frame_size: tuple[int, int] | None = None,
    return_timestamps: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, list[float]]:
    """Decode single frames at equal distances, as ``[frames, channels, height, width]``; with ``return_timestamps``
    also return the time of each in seconds.

    Raises:
        DecodeError: the file is damaged or has no video.

    Example:
        >>> get_single_frames_uniform(decoder, 16, video_out_frame_size=(224, 224)).shape
        torch.Size([16, 3, 224, 224])
    """
    import torch

    data = get_clips_uniform(av_decoder, 0, num_frames, request_video=True, video_out_frame_size=video_out_frame_size)
    if not data.video_clips:
        raise DecodeError("the video has no frames", fix="leave it out")
    frames = torch.cat(data.video_clips)
    return (frames, [start for start, _ in data.video_timestamps or ()]) if return_timestamps else frames
