"""Metadata of the streams of an audio or video file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from energon_lite.extras.media.metadata import AVMetadata

if TYPE_CHECKING:
    import av

__all__ = ["add_audio", "add_video"]


def add_video(
    metadata: AVMetadata, container: av.container.InputContainer, duration: bool, count: bool, frame_size: bool
) -> None:
    """Fill in the metadata of the first video stream.

    Args:
        duration: read all packets if the header has no duration.
        count: read all packets to count the frames.
        frame_size: decode the first frame.
    """
    stream = container.streams.video[0]
    length, begin = stream.duration, 0
    if (duration and length is None) or count:
        packets = [packet for packet in container.demux(stream) if packet.pts is not None]
        metadata.video_num_frames = len(packets)
        if duration and length is None and packets:
            length = max(packet.pts + (packet.duration or 0) for packet in packets)
            begin = stream.start_time or 0
    if length is not None:
        metadata.video_duration = (length - begin) * float(stream.time_base)
    if stream.average_rate is not None:
        metadata.video_fps = float(stream.average_rate)
    elif metadata.video_num_frames and metadata.video_duration:
        metadata.video_fps = metadata.video_num_frames / metadata.video_duration
    if frame_size:
        container.seek(stream.start_time or 0, stream=stream)
        first: Any = next(iter(container.decode(stream)), stream)
        metadata.video_width = first.width
        metadata.video_height = first.height


def add_audio(metadata: AVMetadata, container: av.container.InputContainer, duration: bool, samples: bool) -> None:
    """Fill in the metadata of the first audio stream.

    Args:
        duration: read all packets if the header has no duration.
        samples: decode everything and count samples; the duration is then that of the decoded samples. The container
            has to be just opened.
    """
    stream = container.streams.audio[0]
    metadata.audio_sample_rate = stream.sample_rate
    metadata.audio_channels = stream.channels
    length, begin = stream.duration, 0
    if samples:
        metadata.audio_num_samples, end = 0, None
        for frame in container.decode(stream):
            metadata.audio_num_samples += frame.samples
            if frame.pts is not None:
                end = (frame.pts + (frame.duration or 0)) * frame.time_base
        if end is not None:
            length, begin = float(end / stream.time_base), stream.start_time or 0
    elif duration and length is None:
        container.seek(0)
        ends = [packet.pts + (packet.duration or 0) for packet in container.demux(stream) if packet.pts is not None]
        if ends:
            length, begin = max(ends), stream.start_time or 0
    if length is not None:
        metadata.audio_duration = float((length - begin) * float(stream.time_base))
