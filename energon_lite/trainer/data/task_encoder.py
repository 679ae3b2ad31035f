"""From samples to rows of tokens: the task encoder of the trainer."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from energon_lite import (
    CaptioningSample,
    ConcatSplit,
    PackedBatch,
    SampleDecoder,
    SkipSample,
    TaskEncoder,
    TextSample,
    TokenSequence,
    pack_sequences,
    pad_sequences,
    stateless,
    strategy_from_dict,
)
from energon_lite.trainer.data.config import DataConfig
from energon_lite.trainer.data.tokenizer import ByteTokenizer, Tokenizer, make_tokenizer
from energon_lite.trainer.models.batch import MultimodalBatch
from energon_lite.trainer.models.config import ModelConfig


class MultimodalTaskEncoder(TaskEncoder):
    """Makes a sequence of each captioned image (the caption follows the image) and text, and batches of them.

    The length of a sample is that of its ``tokens``, those that keep an image's place included. So this is also the
    encoder to measure data with, for ``data.batching``.

    Args:
        max_length: most tokens of a sample, the image's not counted.
        image_size: height and width that images are brought to, in pixels; 0 refuses images.
        patch_size: height and width of a patch, in pixels; each patch of an image is a token.
        training: take a random window of a text that is too long; otherwise, its start.
        packed: put the samples of a batch one behind the other in one row; otherwise, each in a row of its own.
        tokenizer: None for the bytes of UTF-8.

    Example:
        >>> rows = MultimodalTaskEncoder(max_length=2048)  # in measured.py
        >>> # energon-lite measure data/text --task-encoder measured:rows
    """

    decoder = SampleDecoder(image_decode="torchrgb")

    def __init__(
        self,
        *,
        max_length: int,
        image_size: int = 0,
        patch_size: int = 1,
        training: bool = True,
        packed: bool = False,
        tokenizer: Tokenizer | None = None,
    ):
        super().__init__()
        self.tokenizer: Tokenizer = ByteTokenizer() if tokenizer is None else tokenizer
        self.max_length, self.image_size, self.patch_size = max_length, image_size, patch_size
        self.training, self.packed = training, packed

    @stateless(restore_seeds=False)
    def encode_sample(self, sample: CaptioningSample | TextSample) -> TokenSequence:
        """The sequence of a sample; no label counts where an image is.

        Raises:
            SkipSample: neither a captioned image nor a text, or an image for a model without images.
        """
        if isinstance(sample, CaptioningSample):
            if not self.image_size:
                raise SkipSample("an image for a model that takes none")
            # One token more than a row holds, because labels are the row moved by one.
            text = torch.tensor(self.tokenizer.encode(sample.caption)[: self.max_length + 1], dtype=torch.int64)
            places = text.new_full(((self.image_size // self.patch_size) ** 2,), self.tokenizer.pad)
            return TokenSequence.derive_from(
                sample,
                tokens=torch.cat([places, text[:-1]]),
                labels=torch.cat([places, text[1:]]),
                loss_mask=torch.cat([torch.zeros(len(places)), torch.ones(len(text[:-1]))]),
                media={"image": resize_image(sample.image, self.image_size)[None]},
            )
        if isinstance(sample, TextSample):
            tokens = self.tokenizer.encode(sample.text)
            surplus = len(tokens) - (self.max_length + 1)
            # `rng` is the sample's own generator: the same window each time this sample is made.
            start = int(self.rng.integers(surplus + 1)) if self.training and surplus > 0 else 0
            text = torch.tensor(tokens[start : start + self.max_length + 1], dtype=torch.int64)
            return TokenSequence.derive_from(sample, tokens=text[:-1], labels=text[1:])
        raise SkipSample(f"cannot make a row of a {type(sample).__name__}")

    @stateless(restore_seeds=False)
    def empty_batch(self, like: MultimodalBatch, rows: int) -> MultimodalBatch:
        """A batch of no rows, for a rank that has run out of samples before the others."""
        return self.batch([])

    @stateless(restore_seeds=False)
    def batch(self, samples: list[TokenSequence]) -> MultimodalBatch:
        """One packed row, or rows padded to the longest one. No samples make a batch of no rows."""
        make = pack_sequences if self.packed and samples else pad_sequences
        batch = make(samples, pad=self.tokenizer.pad)
        image = batch.media.get("image", torch.zeros(0, 3, self.image_size, self.image_size))
        assert isinstance(image, torch.Tensor)  # all of one size
        documents, rows = None, batch.media_samples.get("image", torch.zeros(0, dtype=torch.int64))
        starts = torch.zeros_like(rows)
        if isinstance(batch, PackedBatch):
            documents = batch.segment_ids.to(torch.int64)
            rows, starts = starts, batch.cu_seqlens.to(torch.int64)[rows]
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


def make_task_encoder(data: DataConfig, model: ModelConfig, *, training: bool = True) -> MultimodalTaskEncoder:
    """The task encoder that a run's data section asks for, for a model.

    Batches by tokens are packed where the capacity counts tokens without padding (``packed_tokens`` and ``cost``).

    Raises:
        ConfigError: the tokenizer has more tokens than the model.
        UsageError: there is no such tokenizer.
    """
    strategy = None if data.batching is None else strategy_from_dict(data.batching, at="data.batching")
    capacity = getattr(strategy, "capacity", None)
    packed = isinstance(strategy, ConcatSplit) or (capacity is not None and capacity.unit != "padded_tokens")
    return MultimodalTaskEncoder(
        max_length=data.max_length,
        image_size=model.image_size,
        patch_size=model.patch_size,
        training=training,
        packed=packed,
        tokenizer=make_tokenizer(data.tokenizer, model.vocab_size),
    )


def resize_image(image: torch.Tensor, size: int) -> torch.Tensor:
    """Bring an image ``[3, height, width]`` in [0, 1] to ``[3, size, size]``, whatever its proportions were."""
    if tuple(image.shape[-2:]) == (size, size):
        return image
    return F.interpolate(image[None], size=(size, size), mode="bilinear", antialias=True)[0].clamp(0.0, 1.0)
