"""The task encoder for data sets that were made by ``energon-lite tokenize``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from energon_lite.batching.sequence_batches import PackedBatch, PaddedBatch, pack_sequences, pad_sequences
from energon_lite.batching.sequences import TokenSequence, next_token_pairs
from energon_lite.errors import SkipSample
from energon_lite.hooks import Cooker, TaskEncoder, basic_sample_keys, cooker, stateless
from energon_lite.samples import CrudeSample, Sample, edataclass
from energon_lite.trainer.tokenizing.shards import MASK_PART, TOKENS_PART

__all__ = ["TokenizedSample", "TokenizedTaskEncoder"]


@edataclass
class TokenizedSample(Sample):
    """What is stored of a sample.

    Args:
        tokens: int32 ``[length]``.
        mask: uint8 ``[length]``, 1 for the tokens that are to be learned; None: all of them.
    """

    tokens: torch.Tensor
    mask: torch.Tensor | None = None


@cooker
@stateless(restore_seeds=False)
def _cook(sample: CrudeSample) -> TokenizedSample:
    mask = sample.get(MASK_PART)
    return TokenizedSample(
        **basic_sample_keys(sample),
        tokens=torch.as_tensor(sample[TOKENS_PART]),
        mask=None if mask is None else torch.as_tensor(mask),
    )


class TokenizedTaskEncoder(TaskEncoder):
    """Makes batches for next-token prediction of what ``energon-lite tokenize`` wrote.

    A sample of n tokens becomes a row of n - 1 positions: each but the last token, with the one after it as label.
    Batches are planned by these positions, one fewer than a column that counts stored tokens has of each sample.

    Args:
        packed: put samples one behind the other (:class:`~energon_lite.batching.PackedBatch`); False: pad them to the
        longest
            (:class:`~energon_lite.batching.PaddedBatch`).
        pad: the token to pad with.
        multiple: pad the row, or the rows, to the next multiple of this.

    Example:
        >>> dataset = get_train_dataset("data/chats", batch_size=None, batching=BestFit(Capacity(8192)),
        ...                             task_encoder=TokenizedTaskEncoder(), worker_config=config)
    """

    cookers: ClassVar[Sequence[Cooker]] = [Cooker(_cook)]
    #: By how many positions a row is shorter than a column of lengths says that was made of a stored part.
    row_shorter_by: ClassVar[Mapping[str, int]] = {TOKENS_PART: 1}

    def __init__(self, *, packed: bool = True, pad: int = 0, multiple: int = 1):
        super().__init__()
        self.packed, self.pad, self.multiple = packed, pad, multiple

    @stateless(restore_seeds=False)
    def encode_sample(self, sample: TokenizedSample) -> TokenSequence:
        """Tokens, labels and loss mask.

        Raises:
            SkipSample: fewer than two tokens: there is nothing to predict.
        """
        if len(sample.tokens) < 2:
            raise SkipSample("it has fewer than two tokens, so nothing can be predicted")
        tokens, labels, loss_mask = next_token_pairs(sample.tokens.to(torch.int64), sample.mask)
        return TokenSequence.derive_from(sample, tokens=tokens, labels=labels, loss_mask=loss_mask)

    @stateless(restore_seeds=False)
    def batch(self, samples: list[TokenSequence]) -> PackedBatch | PaddedBatch:
        """One row, or one for each sample. No samples make an empty batch."""
        make = pack_sequences if self.packed else pad_sequences
        return make(samples, pad=self.pad, multiple=self.multiple)

    @stateless(restore_seeds=False)
    def empty_batch(self, like: Any, rows: int) -> PackedBatch | PaddedBatch:
        """A batch for a rank that finds no samples left."""
        return self.batch([])
