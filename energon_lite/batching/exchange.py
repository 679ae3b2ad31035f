"""Swaps of samples between the micro-batches of a step, until all have the same attention cost.

Packed micro-batches have equal numbers of tokens by construction, but attention grows with the square of a sample's
length: one sample of 4,096 tokens costs as much as sixteen of 1,024. So a few samples of the costliest micro-batch are
swapped for the same number of tokens, in other lengths, of a cheaper one. The step keeps its samples and no micro-batch
exceeds the capacity, so the optimizer sees the same step.

The objective, and the restriction to the samples of a step, are from Skrull (arXiv 2505.19609).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from energon_lite.batching.capacity import Capacity, Ints
from energon_lite.batching.micro_batches import MicroBatches
from energon_lite.errors import UsageError

#: Accepted excess of a micro-batch's cost over the mean, in thousandths.
_TOLERANCE = 20
#: Samples of a micro-batch that are considered; all sets of one and two of them are tried.
_CONSIDERED = 32


@dataclass
class _Bin:
    """Samples of one micro-batch, during the swaps."""

    entries: Ints
    size: int
    cost: int


def exchange_samples(batches: MicroBatches, capacity: Capacity, *, step: int) -> MicroBatches:
    """Balance the attention cost over the micro-batches of each step.

    Args:
        batches: packed micro-batches, in the order of the steps.
        capacity: the capacity with which the micro-batches were planned.
        step: micro-batches in a step; a last, shorter one is balanced as well.

    Returns:
        The same number of micro-batches; each step keeps its samples.

    Raises:
        UsageError: the micro-batches are padded. Their cost depends on the longest sample only, and a swap adds
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
        parts += [micro_batch.entries for micro_batch in bins]
    if not parts:
        return batches
    order = np.concatenate(parts)
    ends = np.minimum(np.arange(len(batches)) + step, len(batches))
    widest = int((batches.offsets[ends] - batches.offsets[:-1]).max())
    return batches.regrouped(order, [len(part) for part in parts], later=widest)


def _even_out(bins: list[_Bin], sizes: Ints, costs: Ints, limit: int) -> None:
    """Swap samples of the costliest bin until it is near the mean, or no swap makes it cheaper."""
    # A sample above the capacity stays alone.
    free = [micro_batch for micro_batch in bins if micro_batch.size <= limit]
    if len(free) < 2:
        return
    enough = sum(micro_batch.cost for micro_batch in free) * (1000 + _TOLERANCE) // (1000 * len(free))
    for _ in range(8 * len(free)):
        free.sort(key=lambda micro_batch: micro_batch.cost)
        heavy = free[-1]
        if heavy.cost <= enough:
            return
        if not any(_trade(heavy, light, sizes, costs, limit) for light in free[:-1]):
            return


def _trade(heavy: _Bin, light: _Bin, sizes: Ints, costs: Ints, limit: int) -> bool:
    """Apply the swap that minimizes the larger cost of the two bins; False if no swap helps."""
    sets = []
    for entries in (heavy.entries, light.entries):
        places = spread(sizes[entries], _CONSIDERED)
        sets.append(Sets.of(places, sizes[None, entries[places]], costs[None, entries[places]]))
    mine, yours = sets
    room = np.array([limit - heavy.size]), np.array([limit - light.size])
    trade = best_trade(
        mine, yours, room, lambda moved: np.maximum(heavy.cost - moved[0], light.cost + moved[0]) - heavy.cost
    )
    if trade is None:
        return False
    give, take = trade.samples(mine, yours)
    given, taken = heavy.entries[give], light.entries[take]
    size = int(mine.sizes[0, trade.give] - yours.sizes[0, trade.take])
    cost = int(mine.costs[0, trade.give] - yours.costs[0, trade.take])
    for micro_batch, gone, come, sign in ((heavy, give, taken, -1), (light, take, given, 1)):
        micro_batch.entries = np.concatenate([np.delete(micro_batch.entries, gone), come])
        micro_batch.size += sign * size
        micro_batch.cost += sign * cost
    return True


def spread(sizes: Ints, considered: int, shift: int = 0) -> Ints:
    """Indices of a selection of samples, spread evenly over the lengths; trying all samples would take too long.

    Args:
        sizes: sizes of the samples, ``[samples]``.
        considered: size of the selection.
        shift: offset below ``considered``; different offsets select different samples.
    """
    places = np.arange(len(sizes), dtype=np.int64)
    if len(places) <= considered:
        return places
    by_size = np.argsort(sizes, kind="stable")
    return by_size[(places[:considered] * (len(by_size) - 1) + shift) // (considered - 1 if not shift else considered)]


@dataclass(frozen=True)
class Sets:
    """All sets of up to two samples out of a selection.

    Args:
        numbers: the samples of each set, ``[sets, 2]``, -1 for none.
        sizes: total sizes of each set, ``[limits, sets]``.
        costs: total costs of each set, ``[rows, sets]``.
    """

    numbers: Ints
    sizes: Ints
    costs: Ints

    @classmethod
    def of(cls, numbers: Ints, sizes: Ints, costs: Ints) -> Sets:
        """Build the sets of samples whose sizes are ``[limits, samples]`` and costs ``[rows, samples]``."""
        chosen = _pairs(len(numbers))
        sums = []
        for values in (sizes, costs):
            with_none = np.zeros((len(values), len(numbers) + 1), dtype=np.int64)
            with_none[:, :-1] = values
            sums.append(with_none[:, chosen[:, 0]] + with_none[:, chosen[:, 1]])
        return cls(np.append(numbers, -1)[chosen], *sums)


@dataclass(frozen=True)
class Trade:
    """Swap of one set for another.

    Args:
        give: index of the first micro-batch's set.
        take: index of the second micro-batch's set.
    """

    give: int
    take: int

    def samples(self, mine: Sets, yours: Sets) -> tuple[Ints, Ints]:
        """Samples that leave the first and the second micro-batch."""
        give, take = mine.numbers[self.give], yours.numbers[self.take]
        return give[give >= 0], take[take >= 0]


def best_trade(mine: Sets, yours: Sets, room: tuple[Ints, Ints], worth: Callable[[Ints], Ints]) -> Trade | None:
    """Find the swap of two sets with the best value; None if no swap has a value below 0.

    Args:
        mine, yours: the sets of two micro-batches.
        room: free capacity of each of them, ``[limits]`` both.
        worth: objective: costs ``[rows, swaps]`` that would move from mine to yours -> one number for each swap; lower
            is better, and below 0 is an improvement.
    """
    order = np.argsort(yours.sizes[0], kind="stable")
    ordered = yours.sizes[0][order]
    # Both must stay within the capacity: the size of your set is in [mine - room of yours, mine + room of mine].
    low = np.searchsorted(ordered, mine.sizes[0] - room[1][0], side="left")
    high = np.searchsorted(ordered, mine.sizes[0] + room[0][0], side="right")
    many = np.maximum(high - low, 0)
    first = np.repeat(np.arange(len(many)), many)
    second = order[np.arange(len(first)) - np.repeat(np.cumsum(many) - many, many) + np.repeat(low, many)]
    for limit in range(1, len(mine.sizes)):
        more = mine.sizes[limit][first] - yours.sizes[limit][second]
        fits = (more <= room[1][limit]) & (-more <= room[0][limit])
        first, second = first[fits], second[fits]
    if not len(first):
        return None
    values = worth(mine.costs[:, first] - yours.costs[:, second])
    best = int(values.argmin())
    return Trade(int(first[best]), int(second[best])) if int(values[best]) < 0 else None


@lru_cache(maxsize=_CONSIDERED)
def _pairs(count: int) -> Ints:
    """All sets of up to two of ``count`` elements, ``[sets, 2]``; the number ``count`` stands for no element."""
    first, second = np.triu_indices(count + 1, k=1)
    return np.append(np.stack([first, second], axis=1), [[count, count]], axis=0)
