"""Samples that cost most of a rank's share by themselves, and what is put beside them.

Where micro-batches are full, such a sample's rank cannot simply have less: it has as many tokens as all others. What is
put beside the sample decides how far that rank is above the rest. The least is what costs least for its tokens, but
short documents, which cost little attention, may have most of the loss. So other costs have a *price*, found by
bisection, at which the rank has no more of them than its share (Lagrange multipliers of "as little of one cost as
possible, of no other more than the share").
"""

from __future__ import annotations

import numpy as np

from energon_lite.batching.capacity import Ints
from energon_lite.batching.rank_columns import UNIT, levels_of

__all__ = ["place_outsized"]

#: A sample is outsized from so many sixteenths of what a column of so many micro-batches has on average. For shorter
#: columns exchanges find as much, and to fill a micro-batch with what is cheapest makes those of a pipeline uneven.
_OUTSIZED, _TURNS = 12, 3
#: Other micro-batches can be filled so far, in hundredths.
_FULL = 99
#: Columns of outsized samples are this part of all at most: with more, nothing short would be left for the others.
_PART = 8
#: What the sample's own cost is worth; the first price of another one, and what none is; how often prices are set.
_WORTH, _FIRST, _DEAR, _SETTINGS = 1024, 64, 1 << 20, 12
#: A column may have more of other costs than the mean, by this part of it; what is above counts so many times as much.
_MORE, _TIMES = 64, 4


def place_outsized(shares: Ints, sizes: Ints, limits: Ints, count: int, owner: Ints | None = None) -> Ints:
    """Micro-batches of outsized samples, and of what fills the columns that they are in.

    Args:
        shares: :func:`~energon_lite.batching.rank_columns.shares_of`, ``[rows, samples]``.
        sizes: what samples take up, ``[limits, samples]``; tokens first.
        limits: what a micro-batch may hold, ``[limits]``.
        count: micro-batches.
        owner: equal where samples are copies of one, ``[samples]``; None: there are none.

    Returns:
        ``[samples]``, -1 for all that may go anywhere.

    Example:
        24 micro-batches of 16, all full, and a document with more attention than two of them should have: the other two
        of its rank, if there are eight ranks, are filled with what is shortest.

        >>> from energon_lite.batching.rank_columns import shares_of
        >>> lengths = np.array([8] * 30 + [4] * 22 + [16] + [1] * 40)
        >>> place = place_outsized(shares_of(lengths[None] ** 2, 24), lengths[None], np.array([16]), 24)
        >>> place[52:].tolist() == [0] + [8] * 16 + [16] * 16 + [-1] * 8
        True
    """
    place = np.full(shares.shape[1], -1, dtype=np.int64)
    owner = np.arange(len(place)) if owner is None else owner
    held, others = np.zeros((count, len(limits)), dtype=np.int64), np.ones(count, dtype=bool)
    largest = shares.max(axis=0)
    several = [count // width for width in levels_of(count) if count // width >= _TURNS]
    found = np.flatnonzero(largest * 16 >= _OUTSIZED * UNIT * min(several, default=count))
    for first, sample in enumerate(found[np.argsort(-largest[found], kind="stable")].tolist()):
        turns = max((one for one in several if int(largest[sample]) * 16 >= _OUTSIZED * UNIT * one), default=count)
        # Columns of other heights may have a place in common.
        if (first + 1) * turns * _PART > count or (held[first] + sizes[:, sample] > limits).any():
            break
        column = np.arange(first, count, count // turns)
        place[sample] = first
        held[first] += sizes[:, sample]
        others[column] = False
        free = np.flatnonzero(place < 0)
        # What the others do not hold; where there is room, that is nothing, and the column may have less.
        needed = int(sizes[0, free].sum()) - int(others.sum()) * int(limits[0]) * _FULL // 100
        room = min(int((limits[0] - held[column, 0]).sum()), max(needed, 0))
        for one in free[_cheapest(shares[:, free], sizes[0, free], room, shares[:, sample], turns * UNIT)].tolist():
            fits = column[(held[column] + sizes[:, one] <= limits).all(axis=1)]
            if len(fits):
                copies = np.bincount(place[(place >= 0) & (owner == owner[one])], minlength=count)
                place[one] = fits[copies[fits].argmin()]
                held[place[one]] += sizes[:, one]
    return place


def _cheapest(shares: Ints, tokens: Ints, room: int, beside: Ints, mean: int) -> Ints:
    """Samples to fill the room with, so that there is least of what the outsized one is made of, and of no other cost
    more than the mean, as far as possible.

    Args:
        shares, tokens: of the samples that can be had, ``[rows, samples]`` and ``[samples]``.
        room: tokens to fill.
        beside: shares of the outsized sample, ``[rows]``.
        mean: of what a column has of each cost.
    """
    row = int(beside.argmax())
    best, least = np.empty(0, dtype=np.int64), np.iinfo(np.int64).max
    price = np.zeros(len(shares), dtype=np.int64)
    low, high = np.zeros_like(price), np.full_like(price, _DEAR)
    most = mean + mean // _MORE
    for _ in range(_SETTINGS):
        price[row] = _WORTH
        order = np.argsort(price @ shares * 64 // np.maximum(tokens, 1), kind="stable")
        chosen = order[: int(np.searchsorted(np.cumsum(tokens[order]), room, side="right"))]
        loads = beside + shares[:, chosen].sum(axis=1)
        worth = int(loads[row]) + _TIMES * int(np.maximum(np.delete(loads, row) - most, 0).sum())
        if worth < least:
            best, least = chosen, worth
        low, high = np.where(loads > most, price, low), np.where(loads > most, high, price)
        # Upwards in large steps, until it is known how high is high enough.
        price = np.where(high == _DEAR, np.minimum(2 * price + _FIRST, _TIMES * _WORTH), (low + high) // 2)
    return best
