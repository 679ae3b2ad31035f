"""Audio, video and images: clips of a file, metadata that takes no decoding, and batches of encoded images.

A part of a sample that is audio or video becomes an :class:`AVDecoder`, which decodes only on request. Names, arguments
and results are those of ``megatron.energon.av`` and ``megatron.energon.media``; ``docs/media.md`` lists the results
that differ, with the reasons. PyAV does the decoding; it is imported when the first file is opened.
"""

from energon_lite.lazy_exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
