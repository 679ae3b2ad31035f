"""Addresses of the samples of a step, known from the plan alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from energon_lite.loading.makers.batch_runner import Address, Leaf

__all__ = ["SampleAddress", "sample_addresses"]


@dataclass(frozen=True)
class SampleAddress:
    """A sample of a micro-batch, as planned.

    Args:
        rank: data-parallel rank that gets the sample.
        dataset: folder of its data set.
        shard: name of its shard.
        key: its ``__key__``.
        index: its number in the data set.
        epoch: epoch of the data set.
        restore_key: key for :meth:`~energon_lite.DataLoader.restore_sample`, which makes the sample again.
        start, length: the tokens of it that are used; None: all of them, or not planned by tokens.
    """

    rank: int
    dataset: str
    shard: str
    key: str
    index: int
    epoch: int
    restore_key: tuple[Any, ...]
    start: int | None = None
    length: int | None = None


def sample_addresses(rank: int, addresses: Sequence[Address], leaves: Sequence[Leaf]) -> list[SampleAddress]:
    """Return the addresses of a job, with the names of their data sets, shards and samples."""
    return [_named(rank, leaves[leaf], leaf, index, epoch, piece) for leaf, index, epoch, *piece in addresses]


def _named(rank: int, leaf: Leaf, number: int, index: int, epoch: int, piece: Sequence[int]) -> SampleAddress:
    source = leaf.source
    start, length = piece[:2] if piece and piece[2] else (None, None)
    return SampleAddress(
        rank,
        source.path,
        source.shard_names[source.locate(index)[0]],
        source.key(index),
        index,
        epoch,
        ("sample", number, index, epoch, 0),
        start,
        length,
    )
