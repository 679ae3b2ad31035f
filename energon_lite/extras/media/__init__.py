"""Audio and video: a decoder that takes clips out of a file, and what a file says about itself without being decoded.

A part of a sample that is audio or video becomes an :class:`AVDecoder`, which decodes nothing until it is asked. Names,
arguments and results are those of ``megatron.energon.av`` and ``megatron.energon.media``; where results differ, and
why, is in ``docs/media.md``. PyAV does the decoding; it is imported when the first file is opened.
"""

from energon_lite.lazy_exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
