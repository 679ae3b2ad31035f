"""From samples to token rows: a byte tokenizer and the task encoder of the trainer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from energon_lite import (
    Batch,
    CaptioningSample,
    Sample,
    SampleDecoder,
    SkipSample,
    TaskEncoder,
    TextSample,
    edataclass,
    stateless,
)
from energon_lite.errors import ConfigError


class ByteTokenizer:
    """The bytes of UTF-8 as tokens 0..255, then begin, end and padding. Nothing to download, nothing unknown.

    Example:
        >>> ByteTokenizer().encode("Hi")
        [256, 72, 105, 257]
    """

    bos, eos, pad = 256, 257, 258
    vocab_size = 259

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, between begin and end."""
        return [self.bos, *text.encode("utf-8"), self.eos]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text up to the first end token; other special tokens are left out, broken UTF-8 is marked."""
        known = bytes(token for token in _before(self.eos, tokens) if token < 256)
        return known.decode("utf-8", errors="replace")


class Tokenizer(Protocol):
    """What the trainer needs of a tokenizer: the numbers of special tokens, and texts to tokens and back.

    ``bos`` and ``eos`` begin and end a text, if the tokenizer has such; rows are padded with ``pad``.
    """

    vocab_size: int
    pad: int

    @property
    def bos(self) -> int | None: ...

    @property
    def eos(self) -> int | None: ...

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, with those that begin and end it."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text up to the first end token, without other special ones."""
        ...


class FileTokenizer:
    """A tokenizer of Hugging Face, from a folder or file; nothing is downloaded.

    Args:
        path: a folder with ``tokenizer.json``, or that file.

    Attributes:
        pad: what rows are padded with: the end token. What it stands for is no matter, padding is not counted.

    Raises:
        UsageError: there is no tokenizer.
    """

    def __init__(self, path: str):
        from energon_lite.tokenizing.tokenizer import HuggingFaceTokenizer

        self._inner = HuggingFaceTokenizer(path)
        self.vocab_size = self._inner.vocab_size
        self.bos, self.eos = self._inner.begin, self._inner.end
        self.pad = self.eos or 0

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, with those that begin and end it, if the tokenizer has such."""
        begin, end = ([] if token is None else [token] for token in (self.bos, self.eos))
        return [*begin, *self._inner.encode([text])[0], *end]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text up to the first end token; other special tokens are left out."""
        return self._inner.decode(_before(self.eos, tokens))


def _before(end: int | None, tokens: Sequence[int]) -> list[int]:
    return list(itertools.takewhile(lambda token: token != end, tokens))


def make_tokenizer(path: str | None, vocab_size: int) -> Tokenizer:
    """The tokenizer of a run: that of a path, or the bytes of UTF-8.

    Raises:
        ConfigError: it has more tokens than the model.
        UsageError: there is none.
    """
    if path is None:
        return ByteTokenizer()
    tokenizer = FileTokenizer(path)
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model {vocab_size}",
            at="model.vocab_size",
            fix=f"set it to {tokenizer.vocab_size}, or use the model's own tokenizer",
        )
    return tokenizer


@edataclass
class TokenSample(Sample):
    """One row before padding.

    Args:
        tokens: int64 ``[length]``.
        labels: int64 ``[length]``, the token that follows each.
        image: ``[3, image_size, image_size]`` in [0, 1], or None for a row of text.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    image: torch.Tensor | None = None


@edataclass
class MultimodalBatch(Batch):
    """Rows of tokens, some of which have an image before them.

    Args:
        tokens: int64 ``[rows, length]``, padded at the end.
        labels: int64 ``[rows, length]``, the token that follows each.
        loss_mask: float32 ``[rows, length]``, 1 where a label counts, 0 at padding.
        image: float32 ``[images, 3, height, width]`` in [0, 1].
        image_rows: int64 ``[images]``, the row each image belongs to.
        image_starts: int64 ``[images]``, the position in its row at which an image begins, where tokens keep its place;
            None: it comes before the tokens of its row.
        documents: int64 ``[rows, length]``, which document of a packed row each token belongs to; None: one per row.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    image: torch.Tensor
    image_rows: torch.Tensor
    image_starts: torch.Tensor | None = None
    documents: torch.Tensor | None = None


class MultimodalTaskEncoder(TaskEncoder):
    """Makes rows of captioned images (the caption follows the image) and of plain text.

    Args:
        max_length: most tokens of a row, the image's not counted.
        image_size: height and width that images are brought to, in pixels; 0 refuses images.
        training: take a random window of a text that is too long; otherwise, its start.
        tokenizer: None for the bytes of UTF-8.
    """

    decoder = SampleDecoder(image_decode="torchrgb")

    def __init__(self, *, max_length: int, image_size: int, training: bool, tokenizer: Tokenizer | None = None):
        super().__init__()
        self.tokenizer: Tokenizer = ByteTokenizer() if tokenizer is None else tokenizer
        self.max_length, self.image_size, self.training = max_length, image_size, training

    @stateless(restore_seeds=False)
    def encode_sample(self, sample: CaptioningSample | TextSample) -> TokenSample:
        """One row of a sample.

        Raises:
            SkipSample: neither a captioned image nor a text, or an image for a model without images.
        """
        if isinstance(sample, CaptioningSample):
            if not self.image_size:
                raise SkipSample("an image for a model that takes none")
            # One token more than a row holds, because labels are the row moved by one.
            tokens = self.tokenizer.encode(sample.caption)[: self.max_length + 1]
            return self._row(sample, tokens, image=resize_image(sample.image, self.image_size))
        if isinstance(sample, TextSample):
            tokens = self.tokenizer.encode(sample.text)
            surplus = len(tokens) - (self.max_length + 1)
            # `rng` is the sample's own generator: the same window each time this sample is made.
            start = int(self.rng.integers(surplus + 1)) if self.training and surplus > 0 else 0
            return self._row(sample, tokens[start : start + self.max_length + 1])
        raise SkipSample(f"cannot make a row of a {type(sample).__name__}")

    @stateless(restore_seeds=False)
    def empty_batch(self, like: MultimodalBatch, rows: int) -> MultimodalBatch:
        """A batch of no rows, for a rank that has run out of samples before the others."""
        return self.batch([])

    @stateless(restore_seeds=False)
    def batch(self, samples: list[TokenSample]) -> MultimodalBatch:
        """Pad rows to the longest one. No samples make a batch of no rows."""
        rows, length = len(samples), max((len(sample.tokens) for sample in samples), default=0)
        tokens = torch.full((rows, length), self.tokenizer.pad, dtype=torch.int64)
        labels = torch.full((rows, length), self.tokenizer.pad, dtype=torch.int64)
        loss_mask = torch.zeros(rows, length, dtype=torch.float32)
        for row, sample in enumerate(samples):
            here = slice(0, len(sample.tokens))
            tokens[row, here], labels[row, here], loss_mask[row, here] = sample.tokens, sample.labels, 1.0
        images = {row: sample.image for row, sample in enumerate(samples) if sample.image is not None}
        size = self.image_size
        return MultimodalBatch.from_samples(
            samples,
            tokens=tokens,
            labels=labels,
            loss_mask=loss_mask,
            image=torch.stack(list(images.values())) if images else torch.zeros(0, 3, size, size),
            image_rows=torch.tensor(list(images), dtype=torch.int64),
        )

    def _row(self, sample: Sample, tokens: list[int], image: torch.Tensor | None = None) -> TokenSample:
        row = torch.tensor(tokens, dtype=torch.int64)
        return TokenSample.derive_from(sample, tokens=row[:-1], labels=row[1:], image=image)


def resize_image(image: torch.Tensor, size: int) -> torch.Tensor:
    """Bring an image ``[3, height, width]`` in [0, 1] to ``[3, size, size]``, whatever its proportions were."""
    if tuple(image.shape[-2:]) == (size, size):
        return image
    return F.interpolate(image[None], size=(size, size), mode="bilinear", antialias=True)[0].clamp(0.0, 1.0)
