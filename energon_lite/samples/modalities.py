"""Sample types, one for each modality, with the fields of Megatron-Energon."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TypeAlias

from energon_lite.samples.sample import Sample, edataclass

if TYPE_CHECKING:
    import torch

#: Audio or video in the form that :class:`~energon_lite.storage.SampleDecoder` gives it:
#: :class:`energon_lite.extras.media.AVDecoder` by default, or ``AVData``, a container of PyAV, or bytes.
Media: TypeAlias = object


@edataclass
class CaptioningSample(Sample):
    """An image (``[channels, height, width]``) and a text that describes it."""

    image: torch.Tensor
    caption: str


@edataclass
class ImageSample(Sample):
    """An image without annotations."""

    image: torch.Tensor


@edataclass
class ImageClassificationSample(Sample):
    """An image and its class, by number, by name, or both."""

    image: torch.Tensor
    label: int | None = None
    label_name: str | None = None


@edataclass
class InterleavedSample(Sample):
    """Images and texts in reading order."""

    sequence: list[torch.Tensor | str]


@edataclass
class SimilarityInterleavedSample(Sample):
    """Images and texts without order, and the similarity of each image to each text (``[images, texts]``)."""

    images: list[torch.Tensor]
    texts: list[str]
    audio: list[Media] | None = None
    video: list[Media] | None = None
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
    """An image, a question, the choices and the index of the correct one."""

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

    video: Media
    context: str
    answers: list[str] | None = None
    answer_weights: torch.Tensor | None = None


@edataclass
class TextSample(Sample):
    """A text without annotations."""

    text: str


@edataclass
class ChatSample(Sample):
    """A conversation about any number of images, clips, sounds and arrays.

    Args:
        messages: in order, as ``{"role": "user", "content": "What is in <image>?"}``. The data set defines how a text
            refers to an image or a clip.
        images: ``[channels, height, width]`` each, in the order of the references in the messages.
        videos, audios: files, from which clips are decoded later, or decoded clips.
        arrays: other values, such as precomputed tokens.
    """

    messages: list[dict[str, Any]]
    images: list[torch.Tensor] = dataclasses.field(default_factory=list)
    videos: list[Media] = dataclasses.field(default_factory=list)
    audios: list[Media] = dataclasses.field(default_factory=list)
    arrays: list[Any] = dataclasses.field(default_factory=list)


#: Every modality by its name, which is the ``sample_type`` in ``dataset.yaml``.
SAMPLE_TYPES: dict[str, type[Sample]] = {
    name: kind
    for name, kind in sorted(vars().items())
    if isinstance(kind, type) and issubclass(kind, Sample) and kind is not Sample
}
