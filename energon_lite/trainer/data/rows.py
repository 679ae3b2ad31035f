"""From the batches of any task encoder to the rows that the model takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F

from energon_lite import TaskEncoder, pad_sequences
from energon_lite.batching import PackedBatch, PaddedBatch
from energon_lite.errors import FatalSampleError
from energon_lite.hooks import AugmentTaskEncoder
from energon_lite.trainer.models.batch import MultimodalBatch, document_lengths, sizes_of_images
from energon_lite.trainer.models.config import ModelConfig


class RowsTaskEncoder(AugmentTaskEncoder[Any, Any, Any, Any]):
    """A task encoder, yours or the trainer's, whose batches become the rows that a model takes.

    Its ``batch`` (or ``encode_batch``) returns a :class:`MultimodalBatch`, or what :func:`pad_sequences` or
    :func:`pack_sequences` return. Images of sequences are ``media["image"]``, each at the position in its sequence
    that ``media["image_starts"]`` says, where tokens keep its place. Labels below 0, as -100, do not count. Batches
    for ranks that have no samples left are made here, so that ``empty_batch`` need not be written.

    Args:
        task_encoder: the other one.
        model: that the rows are for.
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
                "return a MultimodalBatch, or what pad_sequences or pack_sequences makes of TokenSequences",
            )
        return self._checked(made)

    def empty_batch(self, like: Any, rows: int) -> MultimodalBatch:
        return rows_of(pad_sequences([], pad=0), image_size=self.rows_model.image_size)

    def _checked(self, batch: MultimodalBatch) -> MultimodalBatch:
        """The batch, with labels that do not count made harmless."""
        shape = tuple(batch.tokens.shape)
        for name in ("tokens", "labels", "loss_mask", "documents"):
            one = getattr(batch, name)
            if one is not None and (len(shape) != 2 or tuple(one.shape) != shape):
                fix = "give tokens, labels and loss_mask (and documents) one entry for each position of [rows, length]"
                self._refuse(f"made {name} of shape {list(one.shape)} beside tokens {list(shape)}", fix)
        if bool((ignored := batch.labels < 0).any()):
            batch.loss_mask = batch.loss_mask.masked_fill(ignored, 0.0)
            batch.labels = batch.labels.masked_fill(ignored, 0)
        largest = max((int(one.max()) for one in (batch.tokens, batch.labels) if one.numel()), default=0)
        if largest >= self.rows_model.vocab_size or (shape[1] and shape[0] and int(batch.tokens.min()) < 0):
            fix = f"the model has {self.rows_model.vocab_size} tokens: is the tokenizer the model's?"
            self._refuse(f"made a token {min(int(batch.tokens.min()), 0) or largest}", fix)
        self._check_places(batch, *shape)
        if batch.documents is not None:
            batch.document_lengths = document_lengths(batch.documents)
        return batch

    def _check_places(self, batch: MultimodalBatch, rows: int, length: int) -> None:
        """Images end within their rows: behind them, a GPU would only say that it has failed."""
        sizes = sizes_of_images(batch.image, batch.image_sizes)
        places = zip(batch.image_rows.tolist(), batch.image_starts.tolist(), sizes, strict=True)
        for number, (row, start, size) in enumerate(places):
            end = start + self.rows_model.image_tokens(*size)
            if not (0 <= row < rows and 0 <= start < end <= length):
                what = (
                    f"made image {number} of {size[0]} x {size[1]} pixels take positions {start} to {end} of row {row}"
                )
                fix = f"in {rows} rows of {length}, begin where as many tokens keep its place, one for each patch"
                self._refuse(what, fix)

    def _refuse(self, what: str, fix: str) -> NoReturn:
        cls = type(self.task_encoder)
        raise FatalSampleError(f"{cls.__module__}.{cls.__qualname__} {what}", fix=fix)


def rows_of(batch: PaddedBatch | PackedBatch, *, image_size: int = 0) -> MultimodalBatch:
    """Padded or packed sequences as the model takes them.

    Rotary positions count from a row's first token. Only their differences matter, so a packed document need not begin
    at 0; but ``position_ids`` that do not count up by one within a sequence would be lost, and are refused.

    Args:
        batch: of sequences.
        image_size: of the images, if there are none.

    Raises:
        FatalSampleError: such ``position_ids``.
    """
    rows = batch.media_samples.get("image", torch.zeros(0, dtype=torch.int64))
    starts = batch.media.get("image_starts", torch.zeros_like(rows))
    image, sizes = stack_images(batch.media.get("image", ()), image_size)
    assert isinstance(starts, torch.Tensor)  # numbers
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
    """Images as one tensor, and their heights and widths if these differ, as :class:`MultimodalBatch` has them.

    Args:
        images: ``[3, height, width]`` each.
        size: of the images, if there are none.
    """
    if isinstance(images, torch.Tensor) or not len(images):
        return (images if isinstance(images, torch.Tensor) else torch.zeros(0, 3, size, size)), None
    sizes = [(image.shape[1], image.shape[2]) for image in images]
    height, width = (max(sides) for sides in zip(*sizes, strict=True))
    filled = [F.pad(image, (0, width - image.shape[2], 0, height - image.shape[1])) for image in images]
    return torch.stack(filled), sizes
