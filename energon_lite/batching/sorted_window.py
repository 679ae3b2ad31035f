"""Micro-batches of similar lengths: samples sorted as a whole, or in windows of the stream."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from energon_lite.batching.capacity import Capacity, Ints, at_least_one, checked_lengths
from energon_lite.batching.micro_batches import MicroBatches, PlanOrder, arrange
from energon_lite.batching.oversize import Oversize, cut_to_fit

__all__ = ["SortedWindow"]


@dataclass(frozen=True)
class SortedWindow:
    """Strategy that sorts the samples of a window by length and cuts them into micro-batches, longest first.

    Little padding is left: about ``3 * sigma / batches`` of the tokens, where ``sigma`` is the standard deviation of
    the log lengths. The drawback is bias: a micro-batch has one length, so steps differ from each other far more than
    random ones do, and a loss that is averaged over each micro-batch gives the tokens of short samples another weight.
    Divide by the tokens of the global step, or pack (:class:`BestFit`).

    With ``batches=None`` the whole chunk is one window: smart batching, DynamiCat's ``GPUMemoryRestricted`` planner.

    No samples move from one window to the next: the rest of a sorted window is always its shortest samples, and these
    would wait until the end of the epoch.

    Args:
        capacity: what a micro-batch may hold; the strategy is meant for ``padded_tokens``.
        batches: size of a window, in full micro-batches. Windows have equal numbers of tokens. None: one window.
        max_samples: largest number of samples in a micro-batch; None: as many as fit.
        oversize: treatment of a sample that does not fit alone.
        order: order of the micro-batches in a window.

    Example:
        >>> strategy = SortedWindow(Capacity(10, "padded_tokens"), batches=None, order="none")
        >>> [part.tolist() for part in strategy.plan(np.array([5, 3, 1, 5, 2, 1, 2, 1]), seed=0)]
        [[0, 3], [1, 4, 6], [2, 5, 7]]
    """

    capacity: Capacity
    batches: int | None = 300
    max_samples: int | None = None
    oversize: Oversize = "error"
    order: PlanOrder = "random"

    def __post_init__(self) -> None:
        at_least_one("give at least 1, or None", batches=self.batches, max_samples=self.max_samples)

    def plan(self, lengths: Ints, *, seed: int = 0, key_lengths: Ints | None = None) -> MicroBatches:
        """See :class:`energon_lite.batching.strategy.Strategy`."""
        pieces = cut_to_fit(checked_lengths(lengths), self.capacity, self.oversize)
        sizes = self.capacity.sizes(pieces.length)
        edges = self._windows(sizes)
        window = np.repeat(np.arange(len(edges) - 1), np.diff(edges))
        entries = np.lexsort((-sizes, window))
        most = self.max_samples or max(len(sizes), 1)
        offsets = _cut(sizes[entries], edges.tolist(), self.capacity, most)
        late = int(np.diff(edges).max(initial=0))
        groups = window[entries[offsets[:-1]]]
        return arrange(pieces, entries, offsets, self.capacity, late, order=self.order, seed=seed, groups=groups)

    def _windows(self, sizes: Ints) -> Ints:
        """Boundaries of the windows in the stream, ascending, the first 0 and the last ``len(sizes)``."""
        inner = []
        if self.batches is not None and len(sizes):
            total, window = int(sizes.sum()), self.batches * self.capacity.limit
            count = max(1, (total + window // 2) // window)
            ends = [total * part // count for part in range(1, count)]
            inner = np.searchsorted(np.cumsum(sizes), ends, side="right").tolist()
        return np.unique(np.array([0, *inner, len(sizes)], dtype=np.int64))


def _cut(sizes: Ints, edges: list[int], capacity: Capacity, most: int) -> list[int]:
    """Boundaries of micro-batches. Sizes descend inside each window, so the first of a micro-batch is its longest."""
    if capacity.adds_up:
        sums = np.cumsum(sizes)
        fitting = np.searchsorted(sums, sums - sizes + capacity.limit, side="right") - np.arange(len(sizes))
    else:
        fitting = capacity.limit // sizes
    rows = np.clip(fitting, 1, most).tolist()  # a sample above the limit has a micro-batch of its own
    offsets = [0]
    for end in edges[1:]:
        while (place := offsets[-1]) < end:
            offsets.append(min(place + rows[place], end))
    return offsets
