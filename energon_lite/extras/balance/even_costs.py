"""Rebalancing of a step: samples are redistributed so that every kind of work is balanced, for any number of ranks.

Attention grows with the square of a document's length, the image encoder's work with the size of each image, the output
layer's with the tokens that the loss counts: micro-batches of equal numbers of tokens differ in all of them. Here the
samples of a step are redistributed over its micro-batches:

1. A sample that takes most of a rank's share by itself gets the cheapest companions (:func:`place_outsized`). All
   others are placed by descending cost, each into the micro-batch with room for it whose load, weighted by the sample's
   own kinds of cost, is lowest. The load is summed over all columns that a place belongs to
   (:mod:`~energon_lite.extras.balance.rank_columns`), so micro-batches and the sums of ranks are balanced at once, for
   every number of ranks.
2. Single samples are swapped between pairs of micro-batches, all pairs at once, while that improves the balance.
3. Sets of up to two samples are swapped (:func:`~energon_lite.batching.exchange.best_trade`), since between full
   micro-batches only sets with equal numbers of tokens can be swapped.

Kinds of work that are hard to balance get more weight. All arithmetic is on integers, and a function of the step alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from energon_lite.batching.capacity import Ints
from energon_lite.extras.balance.movable_samples import MovableSamples
from energon_lite.extras.balance.rank_columns import UNIT, RankColumns, levels_of, loads_of, shares_of

#: A sample is outsized if it costs this number of sixteenths of the mean load of a column.
_OUTSIZED = 12
#: Least number of micro-batches in such a column. For shorter columns swaps do equally well, and filling a micro-batch
#: with the cheapest samples would unbalance the micro-batches of a pipeline.
_TURNS = 3
#: Fill, in percent, that the other micro-batches can reach.
_OTHERS_FULL = 99
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
    """Place outsized samples: samples that cost most of a rank's share by themselves, and the samples beside them.

    If micro-batches are full, the rank of such a sample cannot hold fewer tokens than the others. So the companions of
    the sample decide how far the rank exceeds the others. The cheapest companions for their tokens are best, but short
    documents, which cost little attention, may have most of the loss tokens. So each other kind of cost has a *Lagrange
    multiplier*, found by bisection, at which the rank has no more of that cost than its share: the solution of
    "minimize one cost subject to no other cost above the share".

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
        needed = int(sizes[0, free].sum()) - int(others.sum()) * int(limits[0]) * _OTHERS_FULL // 100
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


#: Samples of a micro-batch that are placed one by one. Smaller ones are placed in the same number of bundles.
_SINGLE = 16
#: Largest number of micro-batches that are balanced together. A larger step is first divided into blocks.
_TOGETHER = 256
#: Rounds of swapping single samples.
_ROUNDS = 16
#: Least number of rounds of swapping sets, each over an eighth of the micro-batches.
_TRADES = 10
#: Samples of a micro-batch that are considered for sets, where there is room for many swaps.
_FEW = 10
#: The same, where micro-batches are nearly full and few swaps are possible.
_MANY = 16
#: Attempts to improve the worst columns of each level; a small step gets fewer.
_TRIES = 48
#: Fill, in percent, from which tokens need no row of costs, because the limit itself keeps them balanced.
_FULL = 97


def even_costs(
    costs: Ints, sizes: Ints, limits: Sequence[int], home: Ints, count: int, owner: Ints | None = None
) -> Ints:
    """Assign the samples of a step to micro-batches, such that all rows of costs are balanced.

    Args:
        costs: integers ``[rows, samples]``; each row is balanced separately, in any unit. Kinds of work that run in
            sequence without waiting for other ranks may be summed into one row.
        sizes: sizes of the samples, ``[limits, samples]``.
        limits: most that a micro-batch may hold, for each row of sizes. The first are tokens: they are balanced, too,
            unless micro-batches are full.
        home: the current micro-batch of each sample, within the limits, ``[samples]``; a sample that exceeds a limit by
            itself is alone, and stays so.
        count: micro-batches of the step.
        owner: equal for copies of one sample, which go into different micro-batches where possible, ``[samples]``;
            None: there are no copies.

    Returns:
        Number of the micro-batch of each sample, which is its place in the step, ``[samples]``.

    Example:
        >>> lengths = np.array([8, 8, 4, 4, 4, 4])
        >>> even_costs(lengths[None] ** 2, lengths[None], [16], np.array([0, 0, 1, 1, 1, 1]), 2).tolist()
        [0, 1, 0, 1, 0, 1]
    """
    bounds = np.asarray(limits, dtype=np.int64)
    if count < 2 or not len(home):
        return home
    if int(sizes[0].sum()) * 100 < _FULL * int(bounds[0]) * count:
        costs = np.concatenate([costs, sizes[:1]])
    costs = costs[costs.max(axis=1) > 0]
    if not len(costs):
        return home
    alone = (sizes > bounds[:, None]).any(axis=0)
    sizes = np.where(alone, bounds[:, None], sizes)  # then no other sample fits into its micro-batch
    shares = shares_of(costs, count)
    blocks = _blocks(count)
    of_homes = loads_of(shares, home, count)
    # A mean block is as large as a mean micro-batch, in these units.
    block_of = _arranged(of_homes * blocks // count, blocks)[home]
    place = np.empty(len(home), dtype=np.int64)
    for block in range(blocks):
        mine = np.flatnonzero(block_of == block)
        owners = None if owner is None else owner[mine]
        inside = _even_block(shares[:, mine], sizes[:, mine], bounds, count // blocks, owners)
        if inside is None:
            homes, own = np.unique(home[mine], return_inverse=True)
            inside = _arranged(of_homes[:, homes], count // blocks)[own]
        place[mine] = block + blocks * inside
    if np.bincount(place, minlength=count).min() == 0 < np.bincount(home, minlength=count).min():
        return arrange_costs(of_homes)[home]  # no micro-batch may become empty
    return place


def arrange_costs(costs: Ints) -> Ints:
    """Place of each micro-batch in the step, contents unchanged, such that the sums of ranks are balanced.

    Args:
        costs: costs of the micro-batches, ``[rows, micro-batches]``.

    Returns:
        int64 ``[micro-batches]``.

    Example:
        >>> arrange_costs(np.array([[8, 8, 2, 2]])).tolist()  # two ranks have places 0 and 2, and 1 and 3
        [0, 1, 2, 3]
    """
    count = costs.shape[1]
    costs = costs[costs.max(axis=1, initial=0) > 0]
    return _arranged(shares_of(costs, count), count) if len(costs) else np.arange(count)


def fit_limits(sizes: Ints, limits: Sequence[int], home: Ints, count: int) -> Ints:
    """Assign samples to micro-batches such that all limits are kept, with additional micro-batches if necessary.

    Args:
        sizes, limits: see :func:`even_costs`. The current assignment need only keep the first limit.
        home: the current micro-batch of each sample, ``[samples]``.
        count: micro-batches.
    """
    bounds = np.asarray(limits, dtype=np.int64)
    sizes = np.where((sizes > bounds[:, None]).any(axis=0), bounds[:, None], sizes)
    bins = MovableSamples(shares_of(sizes[1:], count), sizes, bounds, home, count)
    for turn in range(_ROUNDS):
        bins.exchange_singles(turn)
    if bins.mend():
        return bins.place()
    place = bins.place()
    held = [list(sizes_held) for sizes_held in bins.held.T.tolist()]
    taken = sizes.T.tolist()
    left = []
    for number in np.argsort(-sizes[1:].max(axis=0), kind="stable").tolist():
        here = int(place[number])
        if any(load > limit for load, limit in zip(held[here], limits, strict=True)):
            held[here] = [load - size for load, size in zip(held[here], taken[number], strict=True)]
            left.append(number)
    for number in left:
        for here, loads in enumerate(held):  # first fit
            after = [load + size for load, size in zip(loads, taken[number], strict=True)]
            if all(load <= limit for load, limit in zip(after, limits, strict=True)):
                held[here] = after
                break
        else:
            here = len(held)
            held.append(taken[number])
        place[number] = here
    return np.unique(place, return_inverse=True)[1]


def _arranged(shares: Ints, places: int) -> Ints:
    """Place of each micro-batch, ``[micro-batches]``, with the same number of micro-batches in each of ``places``."""
    ones = np.ones((1, shares.shape[1]), dtype=np.int64)
    limits = np.array([shares.shape[1] // places])
    bins = MovableSamples(shares, ones, limits, _deal(shares, ones, limits, places), places)
    for turn in range(_ROUNDS):
        bins.exchange_singles(turn)
    return bins.place()


def _blocks(count: int) -> int:
    """Number of columns into which a large step is divided first."""
    blocks = 1
    while count // blocks > _TOGETHER:
        step = next((prime for prime in (2, 3, 5, 7) if count // blocks % prime == 0), None)
        if step is None:
            break
        blocks *= step
    return blocks


def _even_block(shares: Ints, sizes: Ints, limits: Ints, count: int, owner: Ints | None) -> Ints | None:
    reserved = place_outsized(shares, sizes, limits, count, owner)
    bins = MovableSamples(shares, sizes, limits, _deal(shares, sizes, limits, count, reserved, owner), count, owner)
    for turn in range(_ROUNDS):
        bins.exchange_singles(turn)
    if not bins.mend():
        return None
    tight = int(sizes[0].sum()) * 100 >= (_FULL - 2) * int(limits[0]) * count
    for turn in range(max(_TRADES, 3 * len(levels_of(count)) // 2)):
        bins.trade(turn, pairs=max(1, count // 8), considered=_MANY if tight else _FEW)
    bins.finish(min(_TRIES, _TRIES // 3 + count // 8), reserved)
    return bins.place()


def _deal(
    shares: Ints, sizes: Ints, limits: Ints, count: int, reserved: Ints | None = None, owner: Ints | None = None
) -> Ints:
    """Initial assignment, ``[samples]``: greedy, by descending cost.

    Each sample goes to the micro-batch with room for it whose columns have the lowest weighted load; if none has room,
    to the one with the least relative overflow. Reserved samples keep their place. Copies go to different micro-batches
    while possible.
    """
    columns = RankColumns(shares, count)
    place = np.full(shares.shape[1], -1, dtype=np.int64) if reserved is None else reserved.copy()
    pull = columns.pulls(loads_of(shares, place, count)).T.copy()
    room = limits - loads_of(sizes, place, count).T
    order = np.argsort(-shares.max(axis=0), kind="stable")
    copies: dict[int, set[int]] = defaultdict(set)  # owner -> micro-batches of its copies
    for bundle in _bundles(order[place[order] < 0], count):
        cost, size = shares[:, bundle].sum(axis=1), sizes[:, bundle].sum(axis=1)
        fullness = pull @ cost
        fits = (room >= size).all(axis=1)
        owners = [] if owner is None else owner[bundle].tolist()
        apart = fits.copy()
        apart[[number for copied in owners for number in copies[copied]]] = False
        fits = apart if apart.any() else fits
        if fits.any():
            fullness[~fits] = np.iinfo(np.int64).max
            best = int(fullness.argmin())
        else:
            best = int(((size - room) * UNIT // np.maximum(limits, 1)).max(axis=1).argmin())
        place[bundle] = best
        for copied in owners:
            copies[copied].add(best)
            if len(copies[copied]) == count:
                copies[copied].clear()
        pull += columns.near_to(best) * cost
        room[best] -= size
    return place


def _bundles(order: Ints, count: int) -> list[Ints]:
    """Single samples, then bundles of small ones, such that the work is linear in the number of micro-batches."""
    single = min(len(order), _SINGLE * count)
    rest = order[single:]
    parts = min(len(rest), _SINGLE * count)
    # Each bundle has some of every size.
    return [*order[:single, None], *(rest[part::parts] for part in range(parts))]
