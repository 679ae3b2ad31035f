"""Token sequence of one sample, before batching."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from energon_lite.errors import SampleError, UsageError
from energon_lite.samples import Sample, edataclass

__all__ = ["TokenSequence", "cut_sequence", "next_token_pairs"]


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
            fix="give at least one token, and as many targets, or none",
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
