"""Sample, Batch and the modalities.

The names and fields are those of Megatron-Energon, so that task encoders written for it work unchanged. Every sample
carries where it came from (``__key__``, ``__sources__``), how to make it again (``__restore_key__``) and the labels its
data set was given in the YAML (``__subflavors__``). Every batch carries the same for all of its samples.

All of these classes are made by :func:`edataclass`: fields are given by keyword, and instances have slots.

Example:
    >>> @edataclass
    ... class ResizedSample(Sample):
    ...     image: torch.Tensor
    >>> small = ResizedSample.derive_from(sample, image=resize(sample.image))
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, is_dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from typing_extensions import Self, dataclass_transform

from energon_lite.errors import UsageError
from energon_lite.tensors import map_tensors, pad_stack

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

#: Plain and comparable: ``("sample", leaf, index, epoch, attempt)`` or ``("batch", pass_number, number)``.
RestoreKey = tuple[Any, ...]


@dataclass_transform(kw_only_default=True)
def edataclass(cls: type[T]) -> type[T]:
    """A dataclass whose fields are keyword-only and whose instances have slots."""
    return dataclass(kw_only=True, slots=True)(cls)


# Not frozen: that would make each twice as slow to make, and there is one for every sample.
@dataclass(slots=True, kw_only=True, unsafe_hash=True)
class SourceInfo:
    """Where a sample's bytes were read.

    Args:
        dataset_path: the prepared folder.
        index: position of the sample in the data set, counted over all of its shards.
        shard_name: the tar file, relative to the folder.
        file_names: the members of the tar that were read.
    """

    dataset_path: str
    index: int | str
    shard_name: str
    file_names: tuple[str, ...]


class _Record:
    """What Sample and Batch have in common: copying fields, and moving to pinned memory."""

    __slots__ = ()

    @classmethod
    def extend(cls, source: Any, **fields: Any) -> Self:
        """Copy ``source``, an instance of a base class of this one, and add ``fields``.

        Raises:
            UsageError: ``source`` is not an instance of a base class.
        """
        if not is_dataclass(cls) or not issubclass(cls, type(source)):
            raise UsageError(
                f"{cls.__name__} does not extend {type(source).__name__}",
                fix=f"derive {cls.__name__} from {type(source).__name__} with @edataclass, or use derive_from",
            )
        kept = {f.name: getattr(source, f.name) for f in dataclasses.fields(source) if f.init}
        return cls(**(kept | fields))

    @property
    def __tags__(self) -> Any:
        """``__subflavors__``, by Energon 8's name."""
        return getattr(self, "__subflavors__")  # noqa: B009  # as below

    @__tags__.setter
    def __tags__(self, tags: Any) -> None:
        setattr(self, "__subflavors__", tags)  # noqa: B010  # a slot of the classes derived from this one

    def pin_memory(self) -> Self:
        """A copy whose tensors, nested ones too, are in page-locked memory."""
        return map_tensors(lambda tensor: tensor.pin_memory(), self)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        """A copy whose tensors, nested ones too, are on ``device``."""
        return map_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking), self)


@edataclass
class Sample(_Record):
    """One element of a data set; base of all modalities.

    Args:
        __key__: the sample's name in its data set (the tar members' common name).
        __restore_key__: plain nested tuple from which the loader makes this very sample again.
        __subflavors__: labels from the YAML, the outer document winning.
        __sources__: where the bytes came from.
    """

    __key__: str
    __restore_key__: RestoreKey
    __subflavors__: dict[str, Any] | None = None
    __sources__: tuple[SourceInfo, ...] | None = None

    @classmethod
    def derive_from(cls, base_sample: Sample, **fields: Any) -> Self:
        """A new sample of this class with the base fields (key, restore key, ...) of ``base_sample``."""
        base = {name: getattr(base_sample, name) for name in BASE_FIELDS}
        return cls(**(base | fields))

    @classmethod
    def from_joined(cls, *samples: Sample | None) -> Self:
        """One sample out of several: base fields of the first, other fields from all, later ones winning."""
        present = [sample for sample in samples if sample is not None]
        if not samples or samples[0] is None:
            raise UsageError("the first of the joined samples must be there", fix="use nonmatch: skip or error")
        merged = {
            f.name: getattr(s, f.name) for s in present for f in dataclasses.fields(s) if f.name not in BASE_FIELDS
        }
        base = {name: getattr(present[0], name) for name in BASE_FIELDS}
        base["__sources__"] = tuple(source for s in present for source in s.__sources__ or ())
        return cls(**(base | merged))


#: The fields that every Sample and every Batch has.
BASE_FIELDS: tuple[str, ...] = tuple(f.name for f in dataclasses.fields(Sample))


@edataclass
class Batch(_Record):
    """Several samples put together; base of the batches a task encoder makes.

    Args:
        __key__: the keys of its samples, in order.
        __restore_key__: ``("batch", pass_number, number)``; ``loader.restore_sample(key)`` makes this very batch again.
        __subflavors__: those of its samples, in order.
        __sources__: the sources of all of its samples.
    """

    __key__: list[str]
    __restore_key__: RestoreKey
    __subflavors__: list[dict[str, Any] | None] | None = None
    __sources__: tuple[SourceInfo, ...] | None = None

    @classmethod
    def derive_from(cls, base_batch: Batch, **fields: Any) -> Self:
        """A new batch of this class with the base fields of ``base_batch``."""
        base = {name: getattr(base_batch, name) for name in BASE_FIELDS}
        return cls(**(base | fields))

    @classmethod
    def from_samples(cls, samples: Sequence[Sample], **fields: Any) -> Self:
        """A batch of ``samples``: base fields are collected; each further field of the batch class that is not given
        in ``fields`` is collated from the samples' field of that name (tensors padded and stacked, the rest as lists).

        Example:
            >>> @edataclass
            ... class TextBatch(Batch):
            ...     tokens: torch.Tensor  # [rows, longest]
            >>> TextBatch.from_samples(samples)
        """
        names = [f.name for f in dataclasses.fields(cls) if f.name not in BASE_FIELDS]
        collated = {
            name: _stack([getattr(sample, name) for sample in samples])
            for name in names
            if name not in fields and samples and all(hasattr(sample, name) for sample in samples)
        }
        return cls(**(base_fields_of(samples) | collated | fields))


def _stack(values: list[Any]) -> Any:
    import torch

    return pad_stack(values) if isinstance(values[0], torch.Tensor) else values


def base_fields_of(samples: Iterable[Any]) -> dict[str, Any]:
    """The base fields of a batch of ``samples`` (instances of Sample, or dicts with the same entries)."""
    found = [
        sample if isinstance(sample, dict) else {name: getattr(sample, name, None) for name in BASE_FIELDS}
        for sample in samples
    ]
    return {
        "__key__": [base.get("__key__") for base in found],
        "__restore_key__": tuple(base.get("__restore_key__") for base in found),
        "__subflavors__": [base.get("__subflavors__") for base in found],
        "__sources__": tuple(source for base in found for source in base.get("__sources__") or ()),
    }


class CrudeSample(dict[str, Any]):
    """A sample as its parts came from the shard: ``{"jpg": ..., "json": ..., "__key__": ..., ...}``.

    What to make of it is up to a cooker (:func:`energon_lite.cooker`) or to ``encode_sample``. ``__tags__`` are its
    ``__subflavors__``.
    """

    def __missing__(self, key: str) -> Any:
        if key == "__tags__":
            return self["__subflavors__"]
        raise KeyError(key)


@edataclass
class CaptioningSample(Sample):
    """An image (``[channels, height, width]``) and a text that describes it."""

    image: torch.Tensor
    caption: str


@edataclass
class ImageSample(Sample):
    """An image alone."""

    image: torch.Tensor


@edataclass
class ImageClassificationSample(Sample):
    """An image and its class, as a number, a name, or both."""

    image: torch.Tensor
    label: int | None = None
    label_name: str | None = None


@edataclass
class InterleavedSample(Sample):
    """Images and texts in reading order."""

    sequence: list[torch.Tensor | str]


@edataclass
class SimilarityInterleavedSample(Sample):
    """Images and texts without order, and how well each image fits each text (``[images, texts]``)."""

    images: list[torch.Tensor]
    texts: list[str]
    audio: list[Any] | None = None
    video: list[Any] | None = None
    similarity_matrix: torch.Tensor | None = None
    matched_text_indices: list[int] | None = None


@edataclass
class VQASample(Sample):
    """An image, a question (``context``) and weighted answers."""

    image: torch.Tensor
    context: str
    answers: list[str] | None = None
    answer_weights: torch.Tensor | None = None


@edataclass
class MultiChoiceVQASample(Sample):
    """An image, a question, the choices and which of them is right."""

    image: torch.Tensor
    context: str
    choices: list[str] | None = None
    correct_choice_idx: int = 0


@edataclass
class VQAOCRSample(Sample):
    """A question about the text in an image."""

    image: torch.Tensor
    context: str
    text: str
    answers: list[str] | None = None
    answer_weights: torch.Tensor | None = None
    words_boxes: torch.Tensor | None = None
    words_text: list[str] | None = None


@edataclass
class OCRSample(Sample):
    """An image of text, with boxes (``[n, 4 or 8]``) and texts of blocks, lines, words and characters."""

    image: torch.Tensor
    text: str
    block_boxes: torch.Tensor | None = None
    block_classes: torch.Tensor | list[str] | None = None
    block_text: list[str] | None = None
    lines_boxes: torch.Tensor | None = None
    lines_text: list[str] | None = None
    words_boxes: torch.Tensor | None = None
    words_text: list[str] | None = None
    chars_boxes: torch.Tensor | None = None
    chars_text: list[str] | None = None


@edataclass
class VidQASample(Sample):
    """A video, a question and weighted answers."""

    video: Any
    context: str
    answers: list[str] | None = None
    answer_weights: torch.Tensor | None = None


@edataclass
class TextSample(Sample):
    """A text alone."""

    text: str


#: Every modality by its name, as ``sample_type`` in ``dataset.yaml`` gives it.
SAMPLE_TYPES: dict[str, type[Sample]] = {
    cls.__name__: cls
    for cls in (
        CaptioningSample,
        ImageClassificationSample,
        ImageSample,
        InterleavedSample,
        MultiChoiceVQASample,
        OCRSample,
        SimilarityInterleavedSample,
        TextSample,
        VQAOCRSample,
        VQASample,
        VidQASample,
    )
}
