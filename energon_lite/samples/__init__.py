"""Sample, Batch and the modalities.

The names and fields are those of Megatron-Energon, so that task encoders written for it work unchanged. Every sample
has its origin (``__key__``, ``__sources__``), the key for making it again (``__restore_key__``) and the labels that the
YAML gives its data set (``__subflavors__``). Every batch has the same for all of its samples.

All of these classes are made by :func:`edataclass`: fields are given by keyword, and instances have slots.

Example:
    >>> @edataclass
    ... class ResizedSample(Sample):
    ...     image: torch.Tensor
    >>> small = ResizedSample.derive_from(sample, image=resize(sample.image))
"""

from energon_lite.samples.modalities import (
    SAMPLE_TYPES,
    CaptioningSample,
    ChatSample,
    ImageClassificationSample,
    ImageSample,
    InterleavedSample,
    MultiChoiceVQASample,
    OCRSample,
    SimilarityInterleavedSample,
    TextSample,
    VidQASample,
    VQAOCRSample,
    VQASample,
)
from energon_lite.samples.sample import (
    BASE_FIELDS,
    Batch,
    CrudeSample,
    RestoreKey,
    Sample,
    SourceInfo,
    add_source_info,
    base_fields_of,
    edataclass,
)

__all__ = [
    "BASE_FIELDS",
    "SAMPLE_TYPES",
    "Batch",
    "CaptioningSample",
    "ChatSample",
    "CrudeSample",
    "ImageClassificationSample",
    "ImageSample",
    "InterleavedSample",
    "MultiChoiceVQASample",
    "OCRSample",
    "RestoreKey",
    "Sample",
    "SimilarityInterleavedSample",
    "SourceInfo",
    "TextSample",
    "VQAOCRSample",
    "VQASample",
    "VidQASample",
    "add_source_info",
    "base_fields_of",
    "edataclass",
]
