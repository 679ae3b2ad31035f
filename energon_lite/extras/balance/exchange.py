"""Exchanging samples between the micro-batches of a step, until attention costs the same in all of them.

Packed micro-batches have equal numbers of tokens by construction, but attention grows with the square of a sample's
length: one sample of 4,096 tokens costs as much as sixteen of 1,024. So a few samples of the costliest micro-batch are
exchanged for as many tokens, in other lengths, of a cheaper one. The step keeps its samples and no micro-batch exceeds
the capacity, so the optimizer sees the same step.

The aim, and the limit to what a step already holds, are those of Skrull (arXiv 2505.19609).
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

__all__ = ["Sets", "Trade", "best_trade", "exchange_samples", "spread"]

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
    mine, yours = (_sets(one.entries, sizes, costs) for one in (heavy, light))
    room = np.array([limit - heavy.size]), np.array([limit - light.size])
    found = best_trade(
        mine, yours, room, lambda moved: np.maximum(heavy.cost - moved[0], light.cost + moved[0]) - heavy.cost
    )
    if found is None:
        return False
    (give, take), size, moved = found.samples(mine, yours), found.size(mine, yours), found.moved(mine, yours)
    _move(heavy, give, light, take, int(size[0]), int(moved[0]))
    return True


def _move(heavy: _Bin, give: Ints, light: _Bin, take: Ints, size: int, cost: int) -> None:
    given, taken = heavy.entries[give], light.entries[take]
    heavy.entries = np.concatenate([np.delete(heavy.entries, give), taken])
    light.entries = np.concatenate([np.delete(light.entries, take), given])
    heavy.size, light.size = heavy.size - size, light.size + size
    heavy.cost, light.cost = heavy.cost - cost, light.cost + cost


def _sets(entries: Ints, sizes: Ints, costs: Ints) -> Sets:
    """Sets of up to two of the bin's samples, by their places in it."""
    places = spread(sizes[entries], _CONSIDERED)
    chosen = entries[places]
    return Sets.of(places, sizes[None, chosen], costs[None, chosen])


def spread(sizes: Ints, considered: int, shift: int = 0) -> Ints:
    """Places of some samples of every length: to try all would take long, and where there are so many, some are enough.

    Args:
        sizes: of the samples.
        considered: how many are wanted.
        shift: less than ``considered``; others have other ones.
    """
    places = np.arange(len(sizes), dtype=np.int64)
    if len(places) <= considered:
        return places
    by_size = np.argsort(sizes, kind="stable")
    return by_size[(places[:considered] * (len(by_size) - 1) + shift) // (considered - 1 if not shift else considered)]


@dataclass(frozen=True)
class Sets:
    """All sets of up to two of some samples.

    Args:
        numbers: of the samples, ``[sets, 2]``, -1 for none.
        sizes: what they take up together, ``[limits, sets]``.
        costs: of them, ``[rows, sets]``.
    """

    numbers: Ints
    sizes: Ints
    costs: Ints

    @classmethod
    def of(cls, numbers: Ints, sizes: Ints, costs: Ints) -> Sets:
        """Sets of samples, whose sizes are ``[limits, samples]`` and costs ``[rows, samples]``."""
        chosen = _pairs(len(numbers))
        made = []
        for values in (sizes, costs):
            with_none = np.zeros((len(values), len(numbers) + 1), dtype=np.int64)
            with_none[:, :-1] = values
            made.append(with_none[:, chosen[:, 0]] + with_none[:, chosen[:, 1]])
        return cls(np.append(numbers, -1)[chosen], *made)


@dataclass(frozen=True)
class Trade:
    """Which set goes for which."""

    give: int
    take: int

    def samples(self, mine: Sets, yours: Sets) -> tuple[Ints, Ints]:
        """The samples of both."""
        give, take = mine.numbers[self.give], yours.numbers[self.take]
        return give[give >= 0], take[take >= 0]

    def size(self, mine: Sets, yours: Sets) -> Ints:
        """How much less is held, for each limit."""
        less: Ints = mine.sizes[:, self.give] - yours.sizes[:, self.take]
        return less

    def moved(self, mine: Sets, yours: Sets) -> Ints:
        """How much of each cost goes."""
        less: Ints = mine.costs[:, self.give] - yours.costs[:, self.take]
        return less


def best_trade(mine: Sets, yours: Sets, room: tuple[Ints, Ints], worth: Callable[[Ints], Ints]) -> Trade | None:
    """The exchange of a set for another one that is worth most; None if none is worth anything.

    Args:
        mine, yours: the sets of two micro-batches.
        room: what each of them can take up beside what it holds, ``[limits]`` both.
        worth: costs ``[rows, exchanges]`` that would go from mine to yours -> a number for each, the smaller the
            better, below 0 where it helps.
    """
    order = np.argsort(yours.sizes[0], kind="stable")
    ordered = yours.sizes[0][order]
    # Both must stay within the capacity: your size is in [mine - room of yours, mine + room of mine].
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
    found = worth(mine.costs[:, first] - yours.costs[:, second])
    best = int(found.argmin())
    return Trade(int(first[best]), int(second[best])) if int(found[best]) < 0 else None


@lru_cache(maxsize=_CONSIDERED)
def _pairs(count: int) -> Ints:
    """All sets of up to two of ``count`` things, ``[sets, 2]``; the number ``count`` stands for nothing."""
    first, second = np.triu_indices(count + 1, k=1)
    return np.append(np.stack([first, second], axis=1), [[count, count]], axis=0)
