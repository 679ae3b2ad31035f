"""Audio, video and images: clips of a file, metadata that takes no decoding, and batches of encoded images.

A part of a sample that is audio or video becomes an :class:`AVDecoder`, which decodes only on request. Names, arguments
and results are those of ``megatron.energon.av`` and ``megatron.energon.media``; ``docs/media.md`` lists the results
that differ, with the reasons. PyAV does the decoding; it is imported when the first file is opened.
"""

from energon_lite.entry_points import Command, Decoder, PrepareStep
from energon_lite.imports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)

_GROUP = "Audio, video and files"

METADATASET_KEYS = {"aux": "energon_lite.extras.media.system_store:open_stores"}
COMMANDS = {
    "prepare-media": Command(
        "energon_lite.extras.media.prepare_media_command:command",
        "Store metadata of images, audio and video: sizes, durations, rates.",
        _GROUP,
    ),
    "mount": Command(
        "energon_lite.extras.media.mount_command:command",
        "Mount a data set as a read-only folder of files.",
        _GROUP,
    ),
}
DECODERS = {
    "av": Decoder(
        "energon_lite.extras.media.av_decoder:part_decoder",
        ("mp4", "avi", "mov", "webm", "mkv", "flac", "mp3", "wav", "flv"),
    ),
}
PREPARE_STEPS = {
    "prepare-media": PrepareStep(
        "energon_lite.extras.media.prepare_media_command:media_options",
        "energon_lite.extras.media.prepare_media_command:begin",
        "--media-metadata-by-...",
    ),
}
