"""Task encoder for data sets made by ``energon-lite tokenize``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from energon_lite import (
    Cooker,
    CrudeSample,
    Sample,
    SkipSample,
    TaskEncoder,
    basic_sample_keys,
    cooker,
    edataclass,
    pack_sequences,
    pad_sequences,
    stateless,
)
from energon_lite.batching import PackedBatch, PaddedBatch, TokenSequence, next_token_pairs
from energon_lite.trainer.tokenizing.shards import MASK_PART, TOKENS_PART

__all__ = ["TokenizedSample", "TokenizedTaskEncoder"]


@edataclass
class TokenizedSample(Sample):
    """Stored tokens and loss mask of a sample.

    Args:
        tokens: int32 ``[length]``.
        mask: uint8 ``[length]``, 1 for the tokens in the loss; None: all of them.
    """

    tokens: torch.Tensor
    mask: torch.Tensor | None = None


def tokenized_sample(sample: CrudeSample) -> TokenizedSample:
    """Make the sample of stored tokens, and of their mask if there is one."""
    mask = sample.get(MASK_PART)
    return TokenizedSample(
        **basic_sample_keys(sample),
        tokens=torch.as_tensor(sample[TOKENS_PART]),
        mask=None if mask is None else torch.as_tensor(mask),
    )


@cooker
@stateless(restore_seeds=False)
def _cook(sample: CrudeSample) -> TokenizedSample:
    return tokenized_sample(sample)


class TokenizedTaskEncoder(TaskEncoder):
    """Encoder for next-token prediction on the output of ``energon-lite tokenize``.

    A sample of n tokens becomes a row of n - 1 positions: each token but the last, with the next one as label. Batches
    are planned by these positions, one fewer per sample than a column of stored tokens counts.

    Args:
        packed: True to pack samples into one row (:class:`~energon_lite.batching.PackedBatch`); False to pad them to
            the longest (:class:`~energon_lite.batching.PaddedBatch`).
        pad: the padding token.
        multiple: pad rows to the next multiple of this length.

    Example:
        >>> dataset = get_train_dataset("data/chats", batch_size=None, batching=BestFit(Capacity(8192)),
        ...                             task_encoder=TokenizedTaskEncoder(), worker_config=config)
    """

    cookers: ClassVar[Sequence[Cooker]] = [Cooker(_cook)]
    #: Number of positions by which a row is shorter than the length in a column made of a stored part.
    row_shorter_by: ClassVar[Mapping[str, int]] = {TOKENS_PART: 1}

    def __init__(self, *, packed: bool = True, pad: int = 0, multiple: int = 1):
        super().__init__()
        self.packed = packed
        self.pad = pad
        self.multiple = multiple

    @stateless(restore_seeds=False)
    def encode_sample(self, sample: TokenizedSample) -> TokenSequence:
        """Make tokens, labels and loss mask.

        Raises:
            SkipSample: the sample has fewer than two tokens, so there is nothing to predict.
        """
        if len(sample.tokens) < 2:
            raise SkipSample("it has fewer than two tokens, so nothing can be predicted")
        tokens, labels, loss_mask = next_token_pairs(sample.tokens.to(torch.int64), sample.mask)
        return TokenSequence.derive_from(sample, tokens=tokens, labels=labels, loss_mask=loss_mask)

    @stateless(restore_seeds=False)
    def batch(self, samples: list[TokenSequence]) -> PackedBatch | PaddedBatch:
        """Make one packed row, or one padded row for each sample. No samples make an empty batch."""
        make = pack_sequences if self.packed else pad_sequences
        return make(samples, pad=self.pad, multiple=self.multiple)

    @stateless(restore_seeds=False)
    def empty_batch(self, like: Any, rows: int) -> PackedBatch | PaddedBatch:
        """Make a batch for a rank without samples."""
        return self.batch([])
