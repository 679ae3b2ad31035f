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
        entries, offsets = _fill(sizes, self.capacity.limit, self.max_samples or len(sizes), self.capacity.adds_up)
        # A sample in a micro-batch of its own waits until the one that is open is full.
        wait = int(np.diff(offsets).max()) if pieces.counts.own_batches else 0
        late = len(sizes) if self.order != "none" else wait
        return arrange(pieces, entries, offsets, self.capacity, late, order=self.order, seed=seed)


def _fill(sizes: list[int], limit: int, most: int, adds_up: bool) -> tuple[list[int], list[int]]:
    """Entries and boundaries of the micro-batches."""
    entries: list[int] = []
    # What the open micro-batch takes up: the sum of its sizes, or its rows times the longest of them.
    offsets, alone, held = [0], [], 0
    for number, size in enumerate(sizes):
        if size > limit:
            alone.append(number)
            continue
        rows = len(entries) - offsets[-1] + 1
        if adds_up:
            held += size
            is_full = held > limit
        else:
            if size > held:
                held = size
            is_full = held * rows > limit
        if is_full or rows > most:
            _close(entries, offsets, alone)
            held = size
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
