"""Placement of outsized samples: samples that cost most of a rank's share by themselves, and their companions.

If micro-batches are full, the rank of such a sample cannot hold fewer tokens than the others. So the companions of the
sample decide how far the rank exceeds the others. The cheapest companions for their tokens are best, but short
documents, which cost little attention, may have most of the loss tokens. So each other kind of cost has a *Lagrange
multiplier*, found by bisection, at which the rank has no more of that cost than its share: the solution of "minimize
one cost subject to no other cost above the share".
"""

from __future__ import annotations

import numpy as np

from energon_lite.batching.capacity import Ints
from energon_lite.extras.balance.rank_columns import UNIT, levels_of

__all__ = ["place_outsized"]

#: A sample is outsized if it costs this number of sixteenths of the mean load of a column.
_OUTSIZED = 12
#: Least number of micro-batches in such a column. For shorter columns swaps do equally well, and filling a micro-batch
#: with the cheapest samples would unbalance the micro-batches of a pipeline.
_TURNS = 3
#: Fill, in percent, that the other micro-batches can reach.
_FULL = 99
#: Columns of outsized samples are at most one in this number: with more, no short samples would be left for the others.
_PART = 8
#: Fixed multiplier of the cost that the outsized sample consists of.
_OWN_MULTIPLIER = 1024
#: First multiplier above 0 of every other cost.
_FIRST_MULTIPLIER = 64
#: Upper end of the bisection interval before one is known.
_UNBOUNDED = 1 << 20
#: Iterations of the bisection.
_ITERATIONS = 12
#: A column may exceed the mean of other costs by one part in this number.
_TOLERANCE = 64
#: Penalty factor on the excess of other costs above that.
_PENALTY = 4


def place_outsized(shares: Ints, sizes: Ints, limits: Ints, count: int, owner: Ints | None = None) -> Ints:
    """Place outsized samples, and the samples that fill their columns.

    Args:
        shares: :func:`~energon_lite.extras.balance.rank_columns.shares_of`, ``[rows, samples]``.
        sizes: sizes of the samples, ``[limits, samples]``; tokens first.
        limits: most that a micro-batch may hold, ``[limits]``.
        count: number of micro-batches.
        owner: equal for copies of one sample, ``[samples]``; None: there are no copies.

    Returns:
        Micro-batch of each sample, ``[samples]``, -1 for samples that may go anywhere.

    Example:
        24 micro-batches of 16 tokens, all full, and one document with more attention than two micro-batches on average:
        if there are eight ranks, the other two micro-batches of its rank are filled with the shortest samples.

        >>> from energon_lite.extras.balance.rank_columns import shares_of
        >>> lengths = np.array([8] * 30 + [4] * 22 + [16] + [1] * 40)
        >>> place = place_outsized(shares_of(lengths[None] ** 2, 24), lengths[None], np.array([16]), 24)
        >>> place[52:].tolist() == [0] + [8] * 16 + [16] * 16 + [-1] * 8
        True
    """
    place = np.full(shares.shape[1], -1, dtype=np.int64)
    owner = np.arange(len(place)) if owner is None else owner
    held = np.zeros((count, len(limits)), dtype=np.int64)
    others = np.ones(count, dtype=bool)
    largest = shares.max(axis=0)
    several = [count // width for width in levels_of(count) if count // width >= _TURNS]
    outsized = np.flatnonzero(largest * 16 >= _OUTSIZED * UNIT * min(several, default=count))
    for first, sample in enumerate(outsized[np.argsort(-largest[outsized], kind="stable")].tolist()):
        turns = max((size for size in several if int(largest[sample]) * 16 >= _OUTSIZED * UNIT * size), default=count)
        # Columns of different heights may overlap.
        if (first + 1) * turns * _PART > count or (held[first] + sizes[:, sample] > limits).any():
            break
        column = np.arange(first, count, count // turns)
        place[sample] = first
        held[first] += sizes[:, sample]
        others[column] = False
        free = np.flatnonzero(place < 0)
        # Tokens that the other micro-batches cannot hold; if there is free room, none, and the column may have less.
        needed = int(sizes[0, free].sum()) - int(others.sum()) * int(limits[0]) * _FULL // 100
        room = min(int((limits[0] - held[column, 0]).sum()), max(needed, 0))
        for number in free[_cheapest(shares[:, free], sizes[0, free], room, shares[:, sample], turns * UNIT)].tolist():
            fits = column[(held[column] + sizes[:, number] <= limits).all(axis=1)]
            if len(fits):
                copies = np.bincount(place[(place >= 0) & (owner == owner[number])], minlength=count)
                place[number] = fits[copies[fits].argmin()]
                held[place[number]] += sizes[:, number]
    return place


def _cheapest(shares: Ints, tokens: Ints, room: int, beside: Ints, mean: int) -> Ints:
    """Choose samples to fill the room, with least of the outsized sample's main cost, and no other cost above the mean.

    The constraint on other costs is kept as far as possible.

    Args:
        shares: costs of the available samples, ``[rows, samples]``.
        tokens: their tokens, ``[samples]``.
        room: tokens to fill.
        beside: costs of the outsized sample, ``[rows]``.
        mean: mean load of a column, equal for all rows.

    Returns:
        Indices of the chosen samples, ``[chosen]``.
    """
    row = int(beside.argmax())
    best, least = np.empty(0, dtype=np.int64), np.iinfo(np.int64).max
    multiplier = np.zeros(len(shares), dtype=np.int64)
    low, high = np.zeros_like(multiplier), np.full_like(multiplier, _UNBOUNDED)
    most = mean + mean // _TOLERANCE
    for _ in range(_ITERATIONS):
        multiplier[row] = _OWN_MULTIPLIER
        order = np.argsort(multiplier @ shares * 64 // np.maximum(tokens, 1), kind="stable")
        chosen = order[: int(np.searchsorted(np.cumsum(tokens[order]), room, side="right"))]
        loads = beside + shares[:, chosen].sum(axis=1)
        objective = int(loads[row]) + _PENALTY * int(np.maximum(np.delete(loads, row) - most, 0).sum())
        if objective < least:
            best, least = chosen, objective
        low, high = np.where(loads > most, multiplier, low), np.where(loads > most, high, multiplier)
        # Grow geometrically until an upper bound is known, then bisect.
        growing = np.minimum(2 * multiplier + _FIRST_MULTIPLIER, _PENALTY * _OWN_MULTIPLIER)
        multiplier = np.where(high == _UNBOUNDED, growing, (low + high) // 2)
    return best
