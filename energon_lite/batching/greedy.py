"""Micro-batches that are filled in stream order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from energon_lite.batching.capacity import Capacity, Ints, at_least_one, checked_lengths
from energon_lite.batching.micro_batches import MicroBatches, PlanOrder, arrange
from energon_lite.batching.oversize import Oversize, cut_to_fit

__all__ = ["Greedy"]


@dataclass(frozen=True)
class Greedy:
    """Strategy that fills a micro-batch in stream order until the next sample does not fit.

    It is the simplest strategy with a capacity. It has no bias, and no sample waits. With ``padded_tokens`` it has
    padding: every row of a micro-batch is as wide as its longest sample.

    Args:
        capacity: what a micro-batch may hold.
        max_samples: largest number of samples in a micro-batch; None: as many as fit.
        oversize: treatment of a sample that does not fit alone.
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
    """Entries and boundaries of the micro-batches, in the order in which they are emitted."""
    entries: list[int] = []
    # ``held`` is the size of the open micro-batch: the sum of its sizes or, with padding, its largest size.
    offsets = [0]
    alone: list[int] = []
    held = 0
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
    """Emit the open micro-batch, then the oversized samples that arrived meanwhile, each in its own micro-batch."""
    if len(entries) > offsets[-1]:
        offsets.append(len(entries))
    for number in alone:
        entries.append(number)
        offsets.append(len(entries))
    alone.clear()
