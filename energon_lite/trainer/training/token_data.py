"""Rows by tokens: the task encoder of runs whose micro-batches are planned by ``data.batching``."""

from __future__ import annotations

import torch

from energon_lite import (
    CaptioningSample,
    ConcatSplit,
    PackedBatch,
    TextSample,
    TokenSequence,
    pack_sequences,
    pad_sequences,
    stateless,
    strategy_from_dict,
)
from energon_lite.trainer.training.config import DataConfig
from energon_lite.trainer.training.data import MultimodalBatch, MultimodalTaskEncoder, Tokenizer


class SequenceTaskEncoder(MultimodalTaskEncoder):
    """Makes a sequence of each sample, in which tokens keep the place of an image, and batches of any sizes of them.

    The length of a sample is that of its ``tokens``, images included. So this is the encoder to measure data with.

    Args:
        max_length: most tokens of a sample, the image's not counted.
        image_size: height and width that images are brought to, in pixels; 0 refuses images.
        patch_size: height and width of a patch, in pixels; each patch of an image is a token.
        training: take a random window of a text that is too long; otherwise, its start.
        tokenizer: None for the bytes of UTF-8.
        packed: put the samples of a batch one behind the other in one row; otherwise, each in a row of its own.

    Example:
        >>> rows = SequenceTaskEncoder(max_length=2048)  # in measured.py
        >>> # energon-lite measure data/text --task-encoder measured:rows
    """

    def __init__(
        self,
        *,
        max_length: int,
        image_size: int = 0,
        patch_size: int = 1,
        training: bool = True,
        packed: bool = True,
        tokenizer: Tokenizer | None = None,
    ):
        super().__init__(max_length=max_length, image_size=image_size, training=training, tokenizer=tokenizer)
        self.patch_size, self.packed = patch_size, packed

    @stateless(restore_seeds=False)
    def encode_sample(self, sample: CaptioningSample | TextSample) -> TokenSequence:  # type: ignore[override]
        """The sequence of a sample; no label counts where an image is.

        Raises:
            SkipSample: as the base class.
        """
        row = super().encode_sample(sample)
        if row.image is None:
            return TokenSequence.derive_from(sample, tokens=row.tokens, labels=row.labels)
        places = row.tokens.new_full(((self.image_size // self.patch_size) ** 2,), self.tokenizer.pad)
        return TokenSequence.derive_from(
            sample,
            tokens=torch.cat([places, row.tokens]),
            labels=torch.cat([places, row.labels]),
            loss_mask=torch.cat([torch.zeros(len(places)), torch.ones(len(row.tokens))]),
            media={"image": row.image[None]},
        )

    @stateless(restore_seeds=False)
    def batch(self, samples: list[TokenSequence]) -> MultimodalBatch:  # type: ignore[override]
        """One packed row, or padded rows. No samples make a batch of no rows."""
        pad, size = self.tokenizer.pad, self.image_size
        packed = self.packed and len(samples) > 0
        batch = pack_sequences(samples, pad=pad) if packed else pad_sequences(samples, pad=pad)
        image = batch.media.get("image", torch.zeros(0, 3, size, size))
        assert isinstance(image, torch.Tensor)  # all of one size
        owners = batch.media_samples.get("image", torch.zeros(0, dtype=torch.int64))
        documents = None
        rows, starts = owners, torch.zeros_like(owners)
        if isinstance(batch, PackedBatch):
            documents = batch.segment_ids.to(torch.int64)
            rows, starts = starts, batch.cu_seqlens.to(torch.int64)[owners]
        return MultimodalBatch.derive_from(
            batch,
            tokens=batch.tokens,
            labels=batch.labels,
            loss_mask=batch.loss_mask,
            image=image,
            image_rows=rows,
            image_starts=starts,
            documents=documents,
        )


def make_task_encoder(
    data: DataConfig, *, image_size: int, patch_size: int, training: bool = True, tokenizer: Tokenizer | None = None
) -> MultimodalTaskEncoder:
    """The task encoder that a run's data section asks for.

    Batches by tokens are packed where the capacity counts tokens without padding (``packed_tokens`` and ``cost``).
    """
    if data.batching is None:
        return MultimodalTaskEncoder(
            max_length=data.max_length, image_size=image_size, training=training, tokenizer=tokenizer
        )
    strategy = strategy_from_dict(data.batching, at="data.batching")
    capacity = getattr(strategy, "capacity", None)
    packed = isinstance(strategy, ConcatSplit) or (capacity is not None and capacity.unit != "padded_tokens")
    return SequenceTaskEncoder(
        max_length=data.max_length,
        image_size=image_size,
        patch_size=patch_size,
        training=training,
        packed=packed,
        tokenizer=tokenizer,
    )
