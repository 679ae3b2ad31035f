"""Conversion of the batches of any task encoder into the rows of the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F

from energon_lite import TaskEncoder, pad_sequences
from energon_lite.batching import PackedBatch, PaddedBatch
from energon_lite.errors import FatalSampleError
from energon_lite.hooks import AugmentTaskEncoder
from energon_lite.trainer.models.config import ModelConfig
from energon_lite.trainer.models.interface import MultimodalBatch, document_lengths, sizes_of_images


class RowsTaskEncoder(AugmentTaskEncoder[Any, Any, Any, Any]):
    """Wrapper of a task encoder, yours or the trainer's, that converts its batches into the rows of a model.

    The wrapped ``batch`` (or ``encode_batch``) returns a :class:`MultimodalBatch`, or a result of :func:`pad_sequences`
    or :func:`pack_sequences`. Images of sequences are ``media["image"]``, each at the position in its sequence given by
    ``media["image_starts"]``, where tokens hold its place. Labels below 0, such as -100, do not count. Batches for
    ranks without samples are made here, so ``empty_batch`` need not be implemented.
    Args:
        task_encoder: the wrapped task encoder.
        model: the model that the rows are for.
    """

    def __init__(self, task_encoder: TaskEncoder, model: ModelConfig):
        super().__init__(task_encoder)
        self.rows_model = model

    def encode_batch(self, batch: Any) -> MultimodalBatch:
        made: Any = super().encode_batch(batch)
        if isinstance(made, PaddedBatch | PackedBatch):
            made = rows_of(made, image_size=self.rows_model.image_size)
        if not isinstance(made, MultimodalBatch):
            self._refuse(
                f"returned a {type(made).__name__}, which has no rows of tokens",
                "return a MultimodalBatch, or what pad_sequences or pack_sequences makes of TokenSequences; or "
                "give the loss of your batches to the Trainer too",
            )
        return self._checked(made)

    def empty_batch(self, like: Any, rows: int) -> MultimodalBatch:
        return rows_of(pad_sequences([], pad=0), image_size=self.rows_model.image_size)

    def _checked(self, batch: MultimodalBatch) -> MultimodalBatch:
        """Check the batch; set labels that do not count to 0."""
        shape = tuple(batch.tokens.shape)
        for name in ("tokens", "labels", "loss_mask", "documents"):
            tensor = getattr(batch, name)
            if tensor is not None and (len(shape) != 2 or tuple(tensor.shape) != shape):
                fix = "give tokens, labels and loss_mask (and documents) one entry for each position of [rows, length]"
                self._refuse(f"made {name} of shape {list(tensor.shape)} for tokens of shape {list(shape)}", fix)
        if bool((ignored := batch.labels < 0).any()):
            batch.loss_mask = batch.loss_mask.masked_fill(ignored, 0.0)
            batch.labels = batch.labels.masked_fill(ignored, 0)
        largest = max((int(ids.max()) for ids in (batch.tokens, batch.labels) if ids.numel()), default=0)
        if largest >= self.rows_model.vocab_size or (batch.tokens.numel() and int(batch.tokens.min()) < 0):
            fix = f"the model has {self.rows_model.vocab_size} tokens: is the tokenizer the model's?"
            self._refuse(f"made a token {min(int(batch.tokens.min()), 0) or largest}", fix)
        self._check_places(batch, *shape)
        batch.counted = float(batch.loss_mask.sum(dtype=torch.float64))
        if batch.documents is not None:
            batch.document_lengths = document_lengths(batch.documents)
        return batch

    def _check_places(self, batch: MultimodalBatch, rows: int, length: int) -> None:
        """Check that images end within their rows; otherwise a GPU would fail without a clear message."""
        sizes = sizes_of_images(batch.image, batch.image_sizes)
        places = zip(batch.image_rows.tolist(), batch.image_starts.tolist(), sizes, strict=True)
        for number, (row, start, size) in enumerate(places):
            end = start + self.rows_model.image_tokens(*size)
            if not (0 <= row < rows and 0 <= start < end <= length):
                what = (
                    f"made image {number} of {size[0]} x {size[1]} pixels take positions {start} to {end} of row {row}"
                )
                fix = f"in {rows} rows of {length}, begin at the tokens that reserve its positions, one for each patch"
                self._refuse(what, fix)

    def _refuse(self, what: str, fix: str) -> NoReturn:
        cls = type(self.task_encoder)
        raise FatalSampleError(f"{cls.__module__}.{cls.__qualname__} {what}", fix=fix)


def rows_of(batch: PaddedBatch | PackedBatch, *, image_size: int = 0) -> MultimodalBatch:
    """Convert padded or packed sequences into the model's rows.

    Rotary positions count from a row's first token. Only their differences matter, so a packed document need not begin
    at 0; but ``position_ids`` that do not count up by one within a sequence cannot be represented, and are an error.

    Args:
        batch: the batch of sequences.
        image_size: size of images for a batch without images.

    Raises:
        FatalSampleError: the batch has such ``position_ids``.
    """
    rows = batch.media_samples.get("image", torch.zeros(0, dtype=torch.int64))
    starts = batch.media.get("image_starts", torch.zeros_like(rows))
    image, sizes = stack_images(batch.media.get("image", ()), image_size)
    assert isinstance(starts, torch.Tensor)  # positions are integers
    documents = None
    if isinstance(batch, PackedBatch):
        documents = batch.segment_ids.to(torch.int64)
        rows, starts = torch.zeros_like(rows), batch.cu_seqlens.to(torch.int64)[rows] + starts
        together = documents.diff(dim=1) == 0
    else:
        together = batch.attention_mask[:, 1:]
    if bool((batch.position_ids.diff(dim=1)[together] != 1).any()):
        what = "position_ids do not count up by one within a sequence, as the model's rotary positions do"
        raise FatalSampleError(what, fix="leave them as pad_sequences or pack_sequences makes them")
    return MultimodalBatch.derive_from(
        batch,
        tokens=batch.tokens,
        labels=batch.labels,
        loss_mask=batch.loss_mask,
        image=image,
        image_rows=rows,
        image_starts=starts,
        documents=documents,
        image_sizes=sizes,
    )


def stack_images(
    images: torch.Tensor | Sequence[torch.Tensor], size: int
) -> tuple[torch.Tensor, list[tuple[int, int]] | None]:
    """Stack images into one tensor, with heights and widths if these differ, as in :class:`MultimodalBatch`.

    Args:
        images: images ``[3, height, width]``.
        size: height and width of the result if there are no images.
    """
    if isinstance(images, torch.Tensor) or not len(images):
        return (images if isinstance(images, torch.Tensor) else torch.zeros(0, 3, size, size)), None
    sizes = [(image.shape[1], image.shape[2]) for image in images]
    height, width = (max(sides) for sides in zip(*sizes, strict=True))
    filled = [F.pad(image, (0, width - image.shape[2], 0, height - image.shape[1])) for image in images]
    return torch.stack(filled), sizes
