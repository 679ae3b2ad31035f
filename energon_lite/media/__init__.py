"""Audio and video: a decoder of clips of a file, and metadata that takes no decoding.

A part of a sample that is audio or video becomes an :class:`AVDecoder`, which decodes only on request. Names, arguments
and results are those of ``megatron.energon.av`` and ``megatron.energon.media``; ``docs/media.md`` lists the results
that differ, with the reasons. PyAV does the decoding; it is imported when the first file is opened.
"""

from energon_lite.media.av_data import AVData
from energon_lite.media.av_decoder import AVDecoder, AVWebdatasetDecoder
from energon_lite.media.extractor import MediaFilterConfig, MediaFilterStrategy
from energon_lite.media.metadata import (
    AVMetadata,
    ImageMetadata,
    MediaMetadataBase,
    MediaMetadataType,
    deserialize_media_metadata,
    serialize_media_metadata,
)
from energon_lite.media.uniform_clips import get_clips_uniform, get_single_frames_uniform

__all__ = [
    "AVData",
    "AVDecoder",
    "AVMetadata",
    "AVWebdatasetDecoder",
    "ImageMetadata",
    "MediaFilterConfig",
    "MediaFilterStrategy",
    "MediaMetadataBase",
    "MediaMetadataType",
    "deserialize_media_metadata",
    "get_clips_uniform",
    "get_single_frames_uniform",
    "serialize_media_metadata",
]
