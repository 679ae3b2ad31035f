"""Batches of token sequences: padded to the longest, or packed into one row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from energon_lite.batching.sequences import TokenSequence
from energon_lite.errors import UsageError
from energon_lite.samples import Batch, edataclass

__all__ = ["PackedBatch", "PaddedBatch", "pack_sequences", "pad_sequences"]


@edataclass
class _SequenceBatch(Batch):
    """Fields of both kinds of sequence batches.

    Args:
        tokens: int64 ``[rows, length]``.
        labels: int64 ``[rows, length]``, the target at each position.
        loss_mask: float32 ``[rows, length]``, the weight of each label; 0 at padding.
        position_ids: int64 ``[rows, length]``, from 0 in each sample.
        num_tokens: number of tokens, without padding.
        num_loss_tokens: the sum of ``loss_mask``. The loss of a step is the sum over its tokens, divided by the sum of
            this number over all micro-batches of all ranks: then each token has equal weight, whatever its batch.
        sample_ids: the restore key of each sample.
        media: the samples' media by name: one tensor ``[items, ...]``, or a list of tensors if their shapes differ.
        media_samples: by name, int64 ``[items]``: index in the batch of the sample that an item belongs to.
        global_loss_tokens: the sum of ``num_loss_tokens`` over the whole step; set by
            :func:`~energon_lite.batching.loss_tokens.count_loss_tokens`, None before.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    num_tokens: int
    num_loss_tokens: float
    sample_ids: tuple[Any, ...]
    media: dict[str, torch.Tensor | list[torch.Tensor]]
    media_samples: dict[str, torch.Tensor]
    global_loss_tokens: float | None = None


@edataclass
class PaddedBatch(_SequenceBatch):
    """Batch of samples as rows, padded at their ends, with additional fields:

    Args:
        attention_mask: bool ``[rows, length]``, False at padding.
    """

    attention_mask: torch.Tensor


@edataclass
class PackedBatch(_SequenceBatch):
    """Batch of samples concatenated in a single row, ``rows = 1``, with additional fields:

    Args:
        cu_seqlens: int32 ``[segments + 1]``, the boundaries of the samples, for attention of variable lengths.
            Padding at the end of the row is a segment of its own, so the last entry is the length of the row.
        max_seqlen: length of the longest segment.
        segment_ids: int32 ``[1, length]``, the number of the sample at each position; -1 for padding at the end.
    """

    cu_seqlens: torch.Tensor
    max_seqlen: int
    segment_ids: torch.Tensor


def pad_sequences(samples: Sequence[TokenSequence], *, pad: int, multiple: int = 1) -> PaddedBatch:
    """Pad samples to the longest of them, one row for each.

    Args:
        samples: any number; an empty list makes a batch without rows.
        pad: the token to pad with.
        multiple: pad to the next multiple of this number, for kernels that require it, and for fewer distinct shapes.

    Example:
        >>> pad_sequences([a, b], pad=0).tokens  # a of two tokens, b of three
        tensor([[5, 6, 0],
                [7, 8, 9]])
    """
    lengths = [len(sample.tokens) for sample in samples]
    width = _round_up(max(lengths, default=0), multiple)
    shape = (len(samples), width)
    rows = {name: row.view(shape) for name, row in _filled(samples, [width] * len(samples), pad).items()}
    positions = torch.arange(width).expand(shape).contiguous()
    return PaddedBatch.from_samples(
        samples,
        position_ids=positions,
        attention_mask=positions < torch.tensor(lengths, dtype=torch.int64)[:, None],
        **rows,
        **_common(samples, rows["loss_mask"]),
    )


def pack_sequences(
    samples: Sequence[TokenSequence], *, pad: int, multiple: int = 1, sample_multiple: int = 1
) -> PackedBatch:
    """Concatenate samples into one row.

    No sample may attend to another: use ``cu_seqlens`` with attention of variable lengths, ``position_ids`` with models
    that derive the boundaries from them, or ``segment_ids`` with :mod:`energon_lite.batching.masks`.

    Args:
        samples: any number; an empty list makes a batch of one row of length 0.
        pad: the token to pad with.
        multiple: pad the whole row to the next multiple of this number; give the capacity to get a single shape.
        sample_multiple: pad each sample to the next multiple of this number, as context parallelism requires; equal to
            the ``multiple`` of the :class:`~energon_lite.batching.capacity.Capacity` of the plan. This padding is at
            the end of the sample's own segment, where no token attends to it.

    Example:
        >>> batch = pack_sequences([a, b], pad=0)  # a of two tokens, b of three
        >>> batch.tokens, batch.cu_seqlens, batch.position_ids
        (tensor([[5, 6, 7, 8, 9]]), tensor([0, 2, 5], dtype=torch.int32), tensor([[0, 1, 0, 1, 2]]))
    """
    lengths = [_round_up(len(sample.tokens), sample_multiple) for sample in samples]
    rest = _round_up(sum(lengths), multiple) - sum(lengths)
    sizes = [*lengths, rest] if rest else lengths
    numbers = [*range(len(lengths)), -1] if rest else [*range(len(lengths))]
    row = {name: values[None] for name, values in _filled(samples, lengths, pad, rest).items()}
    return PackedBatch.from_samples(
        samples,
        position_ids=torch.cat([torch.arange(size) for size in [0, *sizes]])[None],
        cu_seqlens=torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        max_seqlen=max(sizes, default=0),
        segment_ids=torch.repeat_interleave(
            torch.tensor(numbers, dtype=torch.int32), torch.tensor(sizes, dtype=torch.int64)
        )[None],
        **row,
        **_common(samples, row["loss_mask"]),
    )


def _round_up(length: int, multiple: int) -> int:
    if multiple < 1:
        raise UsageError(f"padding to a multiple of {multiple}", fix="give at least 1")
    return -(-length // multiple) * multiple


def _mask_of(sample: TokenSequence) -> torch.Tensor:
    if sample.labels.shape != sample.tokens.shape or (
        sample.loss_mask is not None and sample.loss_mask.shape != sample.tokens.shape
    ):
        mask = None if sample.loss_mask is None else list(sample.loss_mask.shape)
        raise UsageError(
            f"tokens {list(sample.tokens.shape)}, labels {list(sample.labels.shape)} and loss mask {mask} differ",
            where=sample.__key__,
            fix="give all of them one entry for each position",
        )
    return torch.ones(len(sample.tokens)) if sample.loss_mask is None else sample.loss_mask.to(torch.float32)


def _filled(samples: Sequence[TokenSequence], lengths: list[int], pad: int, rest: int = 0) -> dict[str, torch.Tensor]:
    """Tokens, labels and loss mask of all samples, concatenated, each filled up to its length, ``[total]`` each."""
    own = np.array([len(sample.tokens) for sample in samples], dtype=np.int64)
    added = np.array(lengths, dtype=np.int64) - own
    place = torch.from_numpy(np.arange(own.sum()) + np.repeat(np.cumsum(added) - added, own))
    total = sum(lengths) + rest

    def row(values: Iterable[torch.Tensor], fill: float, dtype: torch.dtype) -> torch.Tensor:
        filled = torch.full((total,), fill, dtype=dtype)
        return filled.scatter_(0, place, torch.cat([filled[:0], *values]).to(dtype))

    return {
        "loss_mask": row(map(_mask_of, samples), 0.0, torch.float32),
        "tokens": row((sample.tokens for sample in samples), pad, torch.int64),
        "labels": row((sample.labels for sample in samples), pad, torch.int64),
    }


def _common(samples: Sequence[TokenSequence], loss_mask: torch.Tensor) -> dict[str, Any]:
    """Fields that are equal for padded and packed batches."""
    media = [sample.media or {} for sample in samples]
    items: dict[str, torch.Tensor | list[torch.Tensor]] = {}
    owners: dict[str, torch.Tensor] = {}
    for name in sorted({name for mine in media for name in mine}):
        named = [(row, mine[name]) for row, mine in enumerate(media) if name in mine]
        flat = [item for _, tensor in named for item in tensor]
        alike = len({item.shape for item in flat}) == 1
        items[name] = torch.stack(flat) if alike else flat
        owners[name] = torch.tensor([row for row, tensor in named for _ in tensor], dtype=torch.int64)
    return {
        "num_tokens": sum(len(sample.tokens) for sample in samples),
        "num_loss_tokens": float(loss_mask.sum(dtype=torch.float64)),
        "sample_ids": tuple(sample.__restore_key__ for sample in samples),
        "media": items,
        "media_samples": owners,
    }
