"""Treatment and counts of samples that no micro-batch can hold."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Literal, get_args

import numpy as np

from energon_lite.batching.capacity import Capacity, Ints
from energon_lite.errors import UsageError, counted

__all__ = ["POLICIES", "Counts", "Oversize", "Pieces", "cut_to_fit"]

Oversize = Literal["error", "drop", "truncate", "split", "own_batch"]
POLICIES: tuple[Oversize, ...] = get_args(Oversize)
#: The choices, for messages. The name of the option is the same in Python, in YAML and on the command line.
_CHOICES = (
    'oversize="drop" (leave them out), "truncate" (keep their first tokens), "split" (cut them into pieces that '
    'fit, each of which is trained on) or "own_batch" (leave them whole, in a micro-batch above the capacity)'
)


@dataclass(frozen=True)
class Counts:
    """Numbers of samples that planning dropped, truncated or split. Every omission is counted here.

    Args:
        dropped_samples: samples that are in no micro-batch.
        dropped_tokens: tokens of these.
        truncated_samples: samples that lost their end.
        truncated_tokens: tokens that they lost.
        split_samples: samples that were cut into several pieces.
        own_batches: micro-batches above the capacity, of one sample each.
    """

    dropped_samples: int = 0
    dropped_tokens: int = 0
    truncated_samples: int = 0
    truncated_tokens: int = 0
    split_samples: int = 0
    own_batches: int = 0

    def words(self) -> list[str]:
        """List the counts above 0, in words.

        Example:
            >>> Counts(dropped_samples=1, dropped_tokens=1200, split_samples=3).words()
            ['1 sample dropped, with 1,200 tokens', '3 samples split']
        """
        pairs = (
            (self.dropped_samples, f"dropped, with {counted(self.dropped_tokens, 'token')}"),
            (self.truncated_samples, f"truncated, by {counted(self.truncated_tokens, 'token')}"),
            (self.split_samples, "split"),
            (self.own_batches, "in batches of their own, above the capacity"),
        )
        return [f"{counted(samples, 'sample')} {what}" for samples, what in pairs if samples]

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, count.name) + getattr(other, count.name) for count in fields(self)))


@dataclass(frozen=True)
class Pieces:
    """The samples after treatment of oversized ones, in stream order.

    Args:
        sample: index of the sample that each piece belongs to, ``[pieces]``.
        start: first token of the piece within the sample, ``[pieces]``.
        length: tokens of the piece, ``[pieces]``.
        counts: numbers of oversized samples, by their treatment.
    """

    sample: Ints
    start: Ints
    length: Ints
    counts: Counts = field(default_factory=Counts)

    @classmethod
    def of(cls, lengths: Ints) -> Pieces:
        """Build one piece for each sample, uncut."""
        return cls(np.arange(len(lengths), dtype=np.int64), np.zeros(len(lengths), dtype=np.int64), lengths)


def cut_to_fit(lengths: Ints, capacity: Capacity, policy: Oversize) -> Pieces:
    """Treat oversized samples, so that each piece fits into the capacity.

    Args:
        lengths: tokens of each sample, ``[samples]``.
        capacity: what a micro-batch may hold.
        policy: treatment of a longer sample: ``error``, ``drop`` it, ``truncate`` its end, ``split`` it into full
            pieces and a rest, or ``own_batch``: leave it whole, for a micro-batch of its own that exceeds the capacity.

    Raises:
        UsageError: a sample is too long and the policy is ``error``; or the policy is unknown.

    Example:
        >>> pieces = cut_to_fit(np.array([3, 25]), Capacity(10), "split")
        >>> pieces.sample.tolist(), pieces.start.tolist(), pieces.length.tolist()
        ([0, 1, 1, 1], [0, 0, 10, 20], [3, 10, 10, 5])
    """
    if policy not in POLICIES:
        raise UsageError(f"there is no rule {policy!r} for samples that are too long", fix=f"use one of {POLICIES}")
    whole = Pieces.of(lengths)
    too_long = capacity.sizes(lengths) > capacity.limit
    oversized = int(too_long.sum())
    if not oversized:
        return whole
    limit = capacity.largest_length()
    if policy == "error":
        first = int(np.argmax(too_long))
        raise UsageError(
            f"{oversized} of {len(lengths)} samples are longer than the {limit} tokens that fit into {capacity.limit} "
            f"{capacity.unit}; the first is sample {first} with {int(lengths[first])} tokens",
            fix=f"raise the capacity, or say in the strategy what to do with them: {_CHOICES}",
        )
    if policy == "own_batch":
        return replace(whole, counts=Counts(own_batches=oversized))
    if policy == "drop":
        kept = ~too_long
        counts = Counts(dropped_samples=oversized, dropped_tokens=int(lengths[too_long].sum()))
        return Pieces(whole.sample[kept], whole.start[kept], lengths[kept], counts)
    if policy == "truncate":
        counts = Counts(truncated_samples=oversized, truncated_tokens=int((lengths[too_long] - limit).sum()))
        return replace(whole, length=np.where(too_long, limit, lengths), counts=counts)
    return _split(lengths, too_long, limit)


def _split(lengths: Ints, too_long: np.ndarray, limit: int) -> Pieces:
    parts = np.where(too_long, -(-lengths // limit), 1)
    sample = np.repeat(np.arange(len(lengths), dtype=np.int64), parts)
    first = np.cumsum(parts) - parts
    start = (np.arange(len(sample), dtype=np.int64) - first[sample]) * limit
    # Pieces of whole samples are as long as the sample, even above `limit` in odd cost functions.
    length = np.where(too_long[sample], np.minimum(limit, lengths[sample] - start), lengths[sample])
    return Pieces(sample, start, length, Counts(split_samples=int(too_long.sum())))
