"""Micro-batches filled in stream order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from energon_lite.batching.capacity import Capacity, Ints, at_least_one, checked_lengths
from energon_lite.batching.micro_batches import MicroBatches, PlanOrder, arrange
from energon_lite.batching.oversize import Oversize, cut_to_fit

__all__ = ["Greedy"]


@dataclass(frozen=True)
class Greedy:
    """Takes samples as they come, until the next one would not fit: a micro-batch is a run of the stream.

    The simplest strategy with a capacity, without any bias and without any wait. Its price with ``padded_tokens`` is
    padding: a micro-batch is as wide as its longest sample, whatever the others are.

    Args:
        capacity: what a micro-batch may hold.
        max_samples: most samples in a micro-batch; None: as many as fit.
        oversize: what to do with a sample that does not fit alone.
        order: order of the micro-batches.

    Example:
        >>> batches = Greedy(Capacity(10, "padded_tokens")).plan(np.array([5, 3, 1, 5, 2]), seed=0)
        >>> [part.tolist() for part in batches]
        [[0, 1], [2, 3], [4]]
    """

    capacity: Capacity
    max_samples: int | None = None
    oversize: Oversize = "error"
    order: PlanOrder = "none"

    def __post_init__(self) -> None:
        at_least_one(max_samples=self.max_samples)

    def plan(self, lengths: Ints, *, seed: int = 0, key_lengths: Ints | None = None) -> MicroBatches:
        """See :class:`energon_lite.batching.strategy.Strategy`."""
        pieces = cut_to_fit(checked_lengths(lengths), self.capacity, self.oversize)
        sizes = self.capacity.sizes(pieces.length).tolist()
        fill = _fill_sums if self.capacity.adds_up else _fill_rows
        entries, offsets = fill(sizes, self.capacity.limit, self.max_samples or len(sizes))
        # A sample in a micro-batch of its own waits until the one that is open is full.
        wait = int(np.diff(offsets).max()) if pieces.counts.own_batches else 0
        late = len(sizes) if self.order != "none" else wait
        return arrange(pieces, entries, offsets, self.capacity, late, order=self.order, seed=seed)


def _fill_sums(sizes: list[int], limit: int, most: int) -> tuple[list[int], list[int]]:
    entries: list[int] = []
    offsets, alone, total = [0], [], 0
    for number, size in enumerate(sizes):
        if size > limit:
            alone.append(number)
            continue
        total += size
        if total > limit or len(entries) - offsets[-1] >= most:
            _close(entries, offsets, alone)
            total = size
        entries.append(number)
    _close(entries, offsets, alone)
    return entries, offsets


def _fill_rows(sizes: list[int], limit: int, most: int) -> tuple[list[int], list[int]]:
    entries: list[int] = []
    offsets, alone, longest = [0], [], 0
    for number, size in enumerate(sizes):
        if size > limit:
            alone.append(number)
            continue
        if size > longest:
            longest = size
        rows = len(entries) - offsets[-1]
        if longest * (rows + 1) > limit or rows >= most:
            _close(entries, offsets, alone)
            longest = size
        entries.append(number)
    _close(entries, offsets, alone)
    return entries, offsets


def _close(entries: list[int], offsets: list[int], alone: list[int]) -> None:
    """End the open micro-batch, then emit those that came meanwhile and are alone in theirs."""
    if len(entries) > offsets[-1]:
        offsets.append(len(entries))
    for number in alone:
        entries.append(number)
        offsets.append(len(entries))
    alone.clear()
