"""Putting the samples of a step together anew, so that every kind of work is even, for any number of ranks.

Attention grows with the square of a document's length, the image encoder's work with that of each image, the output
layer's with the tokens that the loss counts: micro-batches of equal numbers of tokens differ in all of them. Here the
samples of a step are dealt to its micro-batches anew:

1. a sample that is most of a rank's share by itself gets company that costs least
   (:mod:`~energon_lite.extras.balance.outsized_samples`); of all others the costliest first, each to the micro-batch
   that has least of what it is made of and still holds it. "Has" is asked of all columns that a place is in
   (:mod:`~energon_lite.batching.rank_columns`), so micro-batches and the sums of ranks are evened out at once, without
   a word about how many ranks there are;
2. samples change places between pairs of micro-batches, all pairs at once, while that makes the whole more even;
3. sets of up to two samples are exchanged (:func:`~energon_lite.extras.balance.exchange.best_trade`), as between full
   micro-batches only what has as many tokens can be exchanged for something else.

What is costly to even out weighs more. Everything is integers, and a function of the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from energon_lite.batching.capacity import Ints
from energon_lite.batching.rank_columns import UNIT, RankColumns, levels_of, loads_of, shares_of
from energon_lite.extras.balance.movable_samples import MovableSamples
from energon_lite.extras.balance.outsized_samples import place_outsized

__all__ = ["arrange_costs", "even_costs", "fit_limits"]

#: Samples of a micro-batch that are dealt one by one; smaller ones in as many bundles, and as many again.
_SINGLE = 16
#: Micro-batches that are dealt to at once; those of a larger step are divided into so many columns first.
_TOGETHER = 256
#: Rounds of exchanging single samples; rounds of trades, of an eighth of the micro-batches each, at least.
_ROUNDS, _TRADES = 16, 10
#: Samples of a micro-batch that are considered in trades, where there is room for many exchanges, and where for few.
_FEW, _MANY = 10, 16
#: Tries to make the worst columns of each level better; fewer where there are few columns.
_TRIES = 48
#: A limit is a row of costs as well, unless micro-batches are so full (in hundredths) that it keeps them even.
_FULL = 97


def even_costs(
    costs: Ints, sizes: Ints, limits: Sequence[int], home: Ints, count: int, owner: Ints | None = None
) -> Ints:
    """The micro-batch for each sample of a step, so that all rows of costs are even.

    Args:
        costs: integers ``[rows, samples]``; each row is evened out by itself, whatever its unit. What runs one after
            the other without waiting for other ranks may be added up before.
        sizes: what samples take up, ``[limits, samples]``.
        limits: what a micro-batch may hold, for each row of sizes. The first are tokens: evened out, too, where they
            leave room.
        home: the micro-batch that each sample is in, within the limits, ``[samples]``; a sample that is above a limit
            by itself is alone, and stays so.
        count: micro-batches of the step.
        owner: equal where samples are copies of one, which go into different micro-batches, unless that fits nowhere,
            ``[samples]``; None: there are none.

    Returns:
        ``[samples]``: numbers of micro-batches, which are places of the step.

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
    sizes = np.where(alone, bounds[:, None], sizes)  # then nothing else fits beside it
    shares = shares_of(costs, count)
    blocks = _blocks(count)
    of_homes = loads_of(shares, home, count)
    # A mean block is as large as a mean micro-batch, in these units.
    block_of = _arranged(of_homes * blocks // count, blocks)[home]
    place = np.empty(len(home), dtype=np.int64)
    for block in range(blocks):
        mine = np.flatnonzero(block_of == block)
        owners = None if owner is None else owner[mine]
        found = _even_block(shares[:, mine], sizes[:, mine], bounds, count // blocks, owners)
        if found is None:
            homes, own = np.unique(home[mine], return_inverse=True)
            found = _arranged(of_homes[:, homes], count // blocks)[own]
        place[mine] = block + blocks * found
    if np.bincount(place, minlength=count).min() == 0 < np.bincount(home, minlength=count).min():
        return arrange_costs(of_homes)[home]  # no rank is to have nothing
    return place


def arrange_costs(costs: Ints) -> Ints:
    """A place of the step for each of its micro-batches, as they are, so that the sums of ranks are even.

    Args:
        costs: of the micro-batches, ``[rows, micro-batches]``.

    Returns:
        ``[micro-batches]``

    Example:
        >>> arrange_costs(np.array([[8, 8, 2, 2]])).tolist()  # two ranks have places 0 and 2, and 1 and 3
        [0, 1, 2, 3]
    """
    count = costs.shape[1]
    costs = costs[costs.max(axis=1, initial=0) > 0]
    return _arranged(shares_of(costs, count), count) if len(costs) else np.arange(count)


def fit_limits(sizes: Ints, limits: Sequence[int], home: Ints, count: int) -> Ints:
    """A micro-batch for each sample, so that all limits are kept; further ones where that needs more of them.

    Args:
        sizes, limits: see :func:`even_costs`. Only the first limit need be kept so far.
        home: the micro-batch that each sample is in, ``[samples]``.
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
    held = [list(one) for one in bins.held.T.tolist()]
    taken = sizes.T.tolist()
    left = []
    for number in np.argsort(-sizes[1:].max(axis=0), kind="stable").tolist():
        here = int(place[number])
        if any(load > limit for load, limit in zip(held[here], limits, strict=True)):
            held[here] = [load - size for load, size in zip(held[here], taken[number], strict=True)]
            left.append(number)
    for number in left:
        for here, loads in enumerate(held):  # the first that holds it
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
    """A place for each micro-batch as it is, as many for each: ``[micro-batches]``."""
    ones, limits = np.ones((1, shares.shape[1]), dtype=np.int64), np.array([shares.shape[1] // places])
    bins = MovableSamples(shares, ones, limits, _deal(shares, ones, limits, places), places)
    for turn in range(_ROUNDS):
        bins.exchange_singles(turn)
    return bins.place()


def _blocks(count: int) -> int:
    """Into how many columns a large step is divided before anything else."""
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
    """The costliest first, each to the micro-batch whose columns have least of what it is made of; where none holds it,
    to the one that it overfills least. What is reserved is where it is. Copies go to different ones while there are."""
    columns = RankColumns(shares, count)
    place = np.full(shares.shape[1], -1, dtype=np.int64) if reserved is None else reserved.copy()
    pull = columns.pulls(loads_of(shares, place, count)).T.copy()
    room = limits - loads_of(sizes, place, count).T
    order = np.argsort(-shares.max(axis=0), kind="stable")
    copies: dict[int, set[int]] = defaultdict(set)  # where those of an owner are
    for bundle in _bundles(order[place[order] < 0], count):
        cost, size = shares[:, bundle].sum(axis=1), sizes[:, bundle].sum(axis=1)
        fullness = pull @ cost
        fits = (room >= size).all(axis=1)
        owners = [] if owner is None else owner[bundle].tolist()
        apart = fits.copy()
        apart[[one for each in owners for one in copies[each]]] = False
        fits = apart if apart.any() else fits
        if fits.any():
            fullness[~fits] = np.iinfo(np.int64).max
            best = int(fullness.argmin())
        else:
            best = int(((size - room) * UNIT // np.maximum(limits, 1)).max(axis=1).argmin())
        place[bundle] = best
        for each in owners:
            copies[each].add(best)
            if len(copies[each]) == count:
                copies[each].clear()
        pull += columns.near_to(best) * cost
        room[best] -= size
    return place


def _bundles(order: Ints, count: int) -> list[Ints]:
    """Single samples, and bundles of small ones: the work then grows with the micro-batches."""
    single = min(len(order), _SINGLE * count)
    rest = order[single:]
    parts = min(len(rest), _SINGLE * count)
    # Each bundle has some of every size.
    return [*order[:single, None], *(rest[part::parts] for part in range(parts))]
