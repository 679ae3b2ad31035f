"""Best fit decreasing: packing of a whole chunk, longest samples first."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from energon_lite.batching.best_fit import checked_packing_capacity
from energon_lite.batching.capacity import Capacity, Ints, at_least_one, checked_lengths
from energon_lite.batching.histogram import pack_histogram
from energon_lite.batching.micro_batches import MicroBatches, PlanOrder, arrange, concatenate
from energon_lite.batching.oversize import Oversize, cut_to_fit
from energon_lite.order.hashing import HashDomain, hash_ints
from energon_lite.order.permutation import permute_array

__all__ = ["BestFitDecreasing"]

_DEAL_TAG = HashDomain.DEAL.value
#: Largest size, exclusive, that fits 16 bits: numpy sorts 16-bit integers by radix, several times as fast.
_SHORT = 1 << 16


@dataclass(frozen=True)
class BestFitDecreasing:
    """Best-fit-decreasing strategy: the fullest micro-batches of all strategies, mostly at 99.9 %.

    The sizes are packed as a histogram; then samples are assigned to the places of their size in a random order that
    depends on the seed. Long samples still share micro-batches with long ones more often than by chance, because they
    are placed while only long ones are there. If that bias matters, and ten or more samples fit into a micro-batch, use
    :class:`BestFit`.

    Args:
        capacity: what a micro-batch may hold; not ``padded_tokens``.
        chunk: largest number of samples that are packed together, which bounds the distance a sample moves in the
            stream; None: all that are planned together.
        oversize: treatment of a sample that does not fit alone.
        order: order of the micro-batches; ``random`` by default, because they are made from long samples to short ones.

    Example:
        >>> strategy = BestFitDecreasing(Capacity(10), order="none")
        >>> [sorted(part.tolist()) for part in strategy.plan(np.array([3, 6, 7, 4, 2]), seed=0)]
        [[0, 2], [1, 3], [4]]
    """

    capacity: Capacity
    chunk: int | None = None
    oversize: Oversize = "error"
    order: PlanOrder = "random"

    def __post_init__(self) -> None:
        checked_packing_capacity(self.capacity, "bfd")
        at_least_one("give at least 1, or None", chunk=self.chunk)

    def plan(self, lengths: Ints, *, seed: int = 0, key_lengths: Ints | None = None) -> MicroBatches:
        """See :class:`energon_lite.batching.strategy.Strategy`."""
        lengths = checked_lengths(lengths)
        count = -(-len(lengths) // self.chunk) if self.chunk else 1
        # Parts of equal size: a short last one would pack worse.
        edges = [len(lengths) * part // max(count, 1) for part in range(max(count, 1) + 1)]
        parts = [self._pack(lengths[first:last], hash_ints(seed, first)) for first, last in pairwise(edges)]
        return concatenate(parts, edges[:-1])

    def _pack(self, lengths: Ints, seed: int) -> MicroBatches:
        pieces = cut_to_fit(lengths, self.capacity, self.oversize)
        sizes = self.capacity.sizes(pieces.length)
        shuffled = permute_array(np.arange(len(sizes), dtype=np.int64), len(sizes), hash_ints(seed, _DEAL_TAG))
        by_size = shuffled[_order(sizes[shuffled])]
        fitting = len(sizes) - int((sizes > self.capacity.limit).sum())
        places, offsets = pack_histogram(np.bincount(sizes[by_size[:fitting]]), self.capacity.limit)
        entries = np.empty(fitting, dtype=np.int64)
        entries[_order(places)] = by_size[:fitting]
        entries = np.concatenate([entries, by_size[fitting:]])
        offsets = np.concatenate([offsets, np.arange(fitting + 1, len(sizes) + 1)])
        return arrange(pieces, entries, offsets, self.capacity, len(sizes), order=self.order, seed=seed)


def _order(sizes: Ints) -> Ints:
    """Stable argsort of the sizes, ascending."""
    short = len(sizes) == 0 or int(sizes.max()) < _SHORT
    return np.argsort(sizes.astype(np.uint16) if short else sizes, kind="stable")
