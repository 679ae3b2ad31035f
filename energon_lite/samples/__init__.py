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

from energon_lite.imports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
