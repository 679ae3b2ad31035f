"""Exchanging samples between the micro-batches of a step, until attention costs the same in all of them.

Packed micro-batches have equal numbers of tokens by construction, but attention grows with the square of a sample's
length: one sample of 4,096 tokens costs as much as sixteen of 1,024. So a few samples of the costliest micro-batch are
exchanged for as many tokens, in other lengths, of a cheaper one. The step keeps its samples and no micro-batch exceeds
the capacity, so the optimizer sees the same step.

The aim, and the limit to what a step already holds, are those of Skrull (arXiv 2505.19609).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from energon_lite.batching.capacity import Capacity, Ints
from energon_lite.batching.micro_batches import MicroBatches
from energon_lite.errors import UsageError

__all__ = ["exchange_samples"]

#: A micro-batch is good enough at this many thousandths above the mean cost.
_TOLERANCE = 20
#: Samples of a micro-batch that are considered; all sets of one and two of them are tried.
_CONSIDERED = 32


@dataclass
class _Bin:
    """The samples of one micro-batch while they are moved."""

    entries: Ints
    size: int
    cost: int


def exchange_samples(batches: MicroBatches, capacity: Capacity, *, step: int) -> MicroBatches:
    """Even out the attention cost of the micro-batches of each step.

    Args:
        batches: packed micro-batches, in the order of the steps.
        capacity: what a micro-batch may hold; the one they were planned with.
        step: micro-batches in a step; a last, shorter one is evened out as well.

    Returns:
        As many micro-batches, each step with the samples that it had.

    Raises:
        UsageError: the micro-batches are padded: their cost depends on the longest sample only, and an exchange adds
            padding.

    Example:
        >>> batches = ConcatSplit(8).plan(np.array([8, 4, 4, 2, 2, 2, 2]))
        >>> batches.attention().tolist(), exchange_samples(batches, Capacity(8), step=3).attention().tolist()
        ([64, 32, 16], [64, 24, 24])
    """
    if not batches.packed:
        raise UsageError(
            "samples can be exchanged between packed micro-batches only",
            fix="assign whole micro-batches",
        )
    sizes, costs = capacity.sizes(batches.length), batches.length * batches.length
    parts: list[Ints] = []
    for first in range(0, len(batches), step):
        edges = batches.offsets[first : first + step + 1].tolist()
        bins = []
        for start, stop in pairwise(edges):
            entries = np.arange(start, stop, dtype=np.int64)
            bins.append(_Bin(entries, int(sizes[start:stop].sum()), int(costs[start:stop].sum())))
        _even_out(bins, sizes, costs, capacity.limit)
        parts += [one.entries for one in bins]
    if not parts:
        return batches
    order = np.concatenate(parts)
    ends = np.minimum(np.arange(len(batches)) + step, len(batches))
    widest = int((batches.offsets[ends] - batches.offsets[:-1]).max())
    return batches.regrouped(order, [len(part) for part in parts], later=widest)


def _even_out(bins: list[_Bin], sizes: Ints, costs: Ints, limit: int) -> None:
    """Move samples from the costliest bin until it is near the mean, or no exchange makes it cheaper."""
    # A sample above the capacity stays alone.
    free = [one for one in bins if one.size <= limit]
    if len(free) < 2:
        return
    enough = sum(one.cost for one in free) * (1000 + _TOLERANCE) // (1000 * len(free))
    for _ in range(8 * len(free)):
        free.sort(key=lambda one: one.cost)
        heavy = free[-1]
        if heavy.cost <= enough:
            return
        if not any(_trade(heavy, light, sizes, costs, limit) for light in free[:-1]):
            return


def _trade(heavy: _Bin, light: _Bin, sizes: Ints, costs: Ints, limit: int) -> bool:
    """Make the exchange after which the costlier of the two is cheapest; False if there is none that helps."""
    mine, my_sizes, my_costs = _sets(heavy.entries, sizes, costs)
    yours, your_sizes, your_costs = _sets(light.entries, sizes, costs)
    order = np.argsort(your_sizes, kind="stable")
    ordered = your_sizes[order]
    # Both must stay within the capacity: your size is in [mine - room of light, mine + room of heavy].
    low = np.searchsorted(ordered, my_sizes - (limit - light.size), side="left")
    high = np.searchsorted(ordered, my_sizes + (limit - heavy.size), side="right")
    many = high - low
    first = np.repeat(np.arange(len(my_sizes)), many)
    second = order[np.arange(len(first)) - np.repeat(np.cumsum(many) - many, many) + np.repeat(low, many)]
    moved = my_costs[first] - your_costs[second]
    after = np.maximum(heavy.cost - moved, light.cost + moved)
    if not len(after):
        return False
    best = int(after.argmin())
    if int(after[best]) >= heavy.cost:
        return False
    give, take = (sets[sets >= 0] for sets in (mine[first[best]], yours[second[best]]))
    _move(heavy, give, light, take, int(my_sizes[first[best]] - your_sizes[second[best]]), int(moved[best]))
    return True


def _move(heavy: _Bin, give: Ints, light: _Bin, take: Ints, size: int, cost: int) -> None:
    given, taken = heavy.entries[give], light.entries[take]
    heavy.entries = np.concatenate([np.delete(heavy.entries, give), taken])
    light.entries = np.concatenate([np.delete(light.entries, take), given])
    heavy.size, light.size = heavy.size - size, light.size + size
    heavy.cost, light.cost = heavy.cost - cost, light.cost + cost


def _sets(entries: Ints, sizes: Ints, costs: Ints) -> tuple[Ints, Ints, Ints]:
    """Sets of up to two of the bin's samples, as places ``[sets, 2]`` with -1 for none; their sizes and costs."""
    places = np.arange(len(entries), dtype=np.int64)
    if len(places) > _CONSIDERED:
        # Some of every length: to try all would take long, and where there are so many, some are enough.
        by_size = np.argsort(sizes[entries], kind="stable")
        places = by_size[np.arange(_CONSIDERED) * (len(by_size) - 1) // (_CONSIDERED - 1)]
    chosen = _pairs(len(places))
    size, cost = (np.append(values[entries[places]], 0) for values in (sizes, costs))
    return np.append(places, -1)[chosen], size[chosen].sum(axis=1), cost[chosen].sum(axis=1)


@lru_cache(maxsize=_CONSIDERED)
def _pairs(count: int) -> Ints:
    """All sets of up to two of ``count`` things, ``[sets, 2]``; the number ``count`` stands for nothing."""
    first, second = np.triu_indices(count + 1, k=1)
    return np.append(np.stack([first, second], axis=1), [[count, count]], axis=0)
