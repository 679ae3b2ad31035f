"""Audio and video: a decoder that takes clips out of a file, and what a file says about itself without being decoded.

A part of a sample that is audio or video becomes an :class:`AVDecoder`, which decodes nothing until it is asked. Names,
arguments and results are those of ``megatron.energon.av`` and ``megatron.energon.media``; where results differ, and
why, is in ``docs/media.md``. PyAV does the decoding; it is imported when the first file is opened.
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
