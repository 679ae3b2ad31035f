"""Factories of one sample type each, deprecated in Energon: a dataset.yaml gives ``sample_type`` instead."""

from __future__ import annotations

import os
import warnings
from typing import Any

from energon_lite.extras.energon.factories.webdataset import DefaultDecoderWebdatasetFactory
from energon_lite.samples import SAMPLE_TYPES, Sample

__all__ = ["TYPED"]


class _Typed(DefaultDecoderWebdatasetFactory[Sample]):
    """Base class of factories for samples of ``__sample_type__``."""

    def __init__(self, path: str | os.PathLike[str], **kwargs: Any):
        warnings.warn(
            f"{type(self).__name__} is deprecated: use StandardWebdatasetFactory(sample_type="
            f"{self.__sample_type__.__name__}), in dataset.yaml `sample_type: {self.__sample_type__.__name__}`",
            DeprecationWarning,
            stacklevel=2,
        )
        super().__init__(path, **kwargs)


def _typed(sample_type: type[Sample]) -> type[_Typed]:
    name = sample_type.__name__.replace("Sample", "Webdataset")
    about = {"__sample_type__": sample_type, "__module__": __name__, "__doc__": f"Samples are {sample_type.__name__}."}
    return type(name, (_Typed,), about)


CaptioningWebdataset = _typed(SAMPLE_TYPES["CaptioningSample"])
ImageClassificationWebdataset = _typed(SAMPLE_TYPES["ImageClassificationSample"])
ImageWebdataset = _typed(SAMPLE_TYPES["ImageSample"])
InterleavedWebdataset = _typed(SAMPLE_TYPES["InterleavedSample"])
MultiChoiceVQAWebdataset = _typed(SAMPLE_TYPES["MultiChoiceVQASample"])
OCRWebdataset = _typed(SAMPLE_TYPES["OCRSample"])
SimilarityInterleavedWebdataset = _typed(SAMPLE_TYPES["SimilarityInterleavedSample"])
TextWebdataset = _typed(SAMPLE_TYPES["TextSample"])
VidQAWebdataset = _typed(SAMPLE_TYPES["VidQASample"])
VQAOCRWebdataset = _typed(SAMPLE_TYPES["VQAOCRSample"])
VQAWebdataset = _typed(SAMPLE_TYPES["VQASample"])

#: All typed factories, by name.
TYPED = {name: factory for name, factory in list(globals().items()) if name.endswith("Webdataset")}
