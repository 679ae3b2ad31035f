"""Token sequences of samples, their batches, padded to the longest or packed into one row, and masks of packed rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from energon_lite.errors import FatalSampleError, SampleError, SkipSample, UsageError
from energon_lite.samples import Batch, Sample, edataclass

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@edataclass
class TokenSequence(Sample):
    """Sample in the form of a sequence model.

    Images, audio and text form one sequence: ``tokens`` has a placeholder for every position that an image or a clip
    occupies in the model. So ``len(tokens)`` is the length of the sample in every respect, including the capacity of a
    batch. The contents of the placeholders are in ``media``.

    Args:
        tokens: int64 ``[length]``.
        labels: int64 ``[length]``, the target at each position.
        loss_mask: float32 ``[length]``, the weight of each label; None: 1 for all.
        media: tensors ``[items, ...]`` by name, for example ``{"image": [images, 3, height, width]}``; a list of items
            if their shapes differ.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor | None = None
    media: Mapping[str, torch.Tensor | Sequence[torch.Tensor]] | None = None


def next_token_pairs(
    tokens: torch.Tensor, targets: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, labels and loss mask for next-token prediction: ``[length + 1]`` -> three tensors of ``[length]``.

    Args:
        tokens: int64, at least one.
        targets: bool or float of the same length: the tokens to learn, for example those of the response. They count at
            the position where they are labels, one before their own.

    Example:
        >>> next_token_pairs(torch.tensor([5, 6, 7]), torch.tensor([0, 0, 1]))
        (tensor([5, 6]), tensor([6, 7]), tensor([0., 1.]))
    """
    if tokens.dim() != 1 or not len(tokens) or (targets is not None and targets.shape != tokens.shape):
        raise UsageError(
            f"tokens {list(tokens.shape)} and targets {None if targets is None else list(targets.shape)}",
            fix="give at least one token, and a target for each token or no targets",
        )
    mask = torch.ones(len(tokens) - 1) if targets is None else targets[1:].to(torch.float32)
    return tokens[:-1], tokens[1:], mask


def cut_sequence(sample: TokenSequence, start: int, length: int) -> TokenSequence:
    """Tokens ``start`` to ``start + length - 1`` of a sample, for a plan that truncates or splits samples.

    Raises:
        SampleError: the sample is too short, or has media, which a cut would separate from their text.
    """
    if start == 0 and length == len(sample.tokens):
        return sample
    if sample.media:
        raise SampleError(
            f"a sample of {len(sample.tokens)} tokens with {', '.join(sample.media)} cannot be cut",
            where=sample.__key__,
            fix="drop samples that are too long, or give them a batch of their own (oversize)",
        )
    if start + length > len(sample.tokens):
        raise SampleError(
            f"the plan wants tokens {start} to {start + length} of a sample that has {len(sample.tokens)}",
            where=sample.__key__,
            fix="measure the lengths again: they are not those of this task encoder",
        )
    part = slice(start, start + length)
    return TokenSequence.derive_from(
        sample,
        tokens=sample.tokens[part],
        labels=sample.labels[part],
        loss_mask=None if sample.loss_mask is None else sample.loss_mask[part],
    )


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
            :func:`~energon_lite.batching.sequence_batches.count_loss_tokens`, None before.
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
    that derive the boundaries from them, or ``segment_ids`` with :func:`segment_mask`.

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


def count_loss_tokens(
    micro_batches: Sequence[PackedBatch | PaddedBatch], group: ProcessGroup | None = None, *, device: str = "cpu"
) -> float:
    """Count the loss tokens of a step, and write the number into each of its micro-batches as ``global_loss_tokens``.

    A mean over each micro-batch, or over each rank, would give tokens in fuller batches less weight. With this number,
    the loss of a micro-batch is a sum divided by the same number everywhere; gradients are then summed over ranks, not
    averaged.

    Args:
        micro_batches: this rank's micro-batches of one step; may be empty.
        group: the data-parallel ranks, all of which must call this function; None: all ranks. Without
            ``torch.distributed``, this process alone.
        device: device of the sum: ``cuda`` for NCCL.

    Example:
        >>> count_loss_tokens(micro_batches)
        >>> for batch in micro_batches:
        ...     losses = F.cross_entropy(model(batch), batch.labels.flatten(), reduction="none")
        ...     ((losses * batch.loss_mask.flatten()).sum() / batch.global_loss_tokens).backward()
    """
    count = torch.tensor(sum(batch.num_loss_tokens for batch in micro_batches), dtype=torch.float64, device=device)
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(count, group=group)
    total = float(count.item())
    for batch in micro_batches:
        batch.global_loss_tokens = total
    return total


def segment_mask(segment_ids: torch.Tensor) -> torch.Tensor:
    """Causal mask for ``scaled_dot_product_attention``: ``[rows, length]`` -> bool ``[rows, 1, length, length]``.

    Its size is quadratic in the length; for long rows use ``cu_seqlens`` or :func:`flex_segment_mask`.

    Example:
        >>> segment_mask(torch.tensor([[0, 0, 1]]))[0, 0].int()
        tensor([[1, 0, 0],
                [1, 1, 0],
                [0, 0, 1]], dtype=torch.int32)
    """
    length = segment_ids.shape[-1]
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    return (same & torch.ones(length, length, dtype=torch.bool, device=segment_ids.device).tril())[:, None]


def flex_segment_mask(
    segment_ids: torch.Tensor,
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Mask function for ``torch.nn.attention.flex_attention.create_block_mask``, which skips whole blocks.

    Example:
        >>> length = batch.tokens.shape[1]
        >>> mask = create_block_mask(flex_segment_mask(batch.segment_ids), 1, None, length, length)
        >>> flex_attention(query, key, value, block_mask=mask)
    """

    def allowed(row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (segment_ids[row, query] == segment_ids[row, key]) & (query >= key)

    return allowed


def as_planned(sample: Any, start: int, length: int, is_cut: int) -> Any:
    """Return the piece of a sample that the plan asks for.

    Raises:
        SampleError: the sample is longer than planned, or cannot be cut.
        SkipSample: this piece begins after the end of a sample that is shorter than planned.
        FatalSampleError: the sample is not of a type that this library can cut.
    """
    if not isinstance(sample, TokenSequence):
        if is_cut:
            raise FatalSampleError(
                f"the plan cuts samples, and encode_sample returned a {type(sample).__name__}",
                fix="return a TokenSequence, or choose another `oversize` than truncate and split",
            )
        return sample
    if is_cut:
        there = len(sample.tokens) - start
        if not there:
            raise SkipSample(f"nothing is left of it from token {start} on: it is shorter than planned")
        # A cut sample, too, may be shorter than planned; then its last piece is shorter.
        return cut_sequence(sample, start, min(length, there) if there > 0 else length)
    if len(sample.tokens) > length:
        raise SampleError(
            f"the sample has {len(sample.tokens)} tokens, and its batch was planned for {length}",
            where=sample.__key__,
            fix="measure the lengths again: they are not those of this task encoder",
        )
    return sample
