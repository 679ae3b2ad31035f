"""Separation of epochs of small data sets, which repeat several times within one planned chunk.

A strategy knows lengths, not samples: planned together, all copies of a sample would share one micro-batch. So a chunk
is cut into *stretches* that are planned one after the other. A stretch ends where an epoch ends
(:meth:`~energon_lite.order.Order.epoch_ends`), or where a sample of a blend would repeat. A leaf with an epoch of a few
micro-batches would make stretches too short to fill micro-batches well. Its copies stay in one stretch, and are
moved to different micro-batches of it (:mod:`energon_lite.batching.copies`).

The result is a function of the chunk's addresses and lengths, so every rank computes the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from energon_lite.batching.capacity import Ints
from energon_lite.batching.copies import keep_apart
from energon_lite.batching.micro_batches import MicroBatches, concatenate
from energon_lite.batching.strategy import Strategy, capacity_of
from energon_lite.order.hashing import hash_ints

__all__ = ["ONE_STRETCH", "Stretches", "plan_epochs"]

#: Least number of micro-batches' worth of samples in a stretch that ends because a sample of a blend would repeat.
_LEAST = 128


@dataclass(frozen=True)
class Stretches:
    """Stretches of a chunk, and its repeated samples.

    Args:
        edges: the first position of each stretch, from 0, and the end of the last one.
        sample: the number of the sample at each position, ``[positions]``; None: no sample repeats.
    """

    edges: Sequence[int]
    sample: Ints | None = None


#: A chunk that needs no separation.
ONE_STRETCH = Stretches((0,))


def plan_epochs(
    strategy: Strategy,
    lengths: Ints,
    samples: tuple[Ints, Ints, Ints],
    *,
    ends: Sequence[int] = (),
    seed: int = 0,
    key_lengths: Ints | None = None,
) -> tuple[MicroBatches, Stretches]:
    """Micro-batches of some positions of an order, with the epochs of each leaf kept apart.

    Each of ``ends`` falls between two micro-batches. The copies of a sample keep their order in the plan, and are in
    different micro-batches. If a stretch has fewer micro-batches than copies, they are spread evenly.

    Args:
        strategy: the strategy that groups samples.
        lengths: tokens of each sample, ``[positions]``.
        samples: leaf, index and cycle of each, three arrays ``[positions]``. A cycle is an epoch, or several epochs
            that are mixed on purpose; a sample that repeats within a cycle counts as two samples.
        ends: positions at which an epoch of the whole order ends, ascending.
        seed: for strategies that shuffle.
        key_lengths: see :class:`~energon_lite.batching.strategy.Strategy`.

    Returns:
        The micro-batches, and the stretches, which are needed to change them.

    Example:
        >>> epoch = np.array([0, 0, 1, 1])
        >>> samples = np.zeros(4, dtype=np.int64), np.array([0, 1, 1, 0]), epoch
        >>> batches, _ = plan_epochs(Fixed(2, sort=True), np.array([5, 6, 6, 5]), samples, ends=[2])
        >>> [part.tolist() for part in batches]
        [[0, 1], [3, 2]]
    """
    leaf, index, cycle = samples
    number, again = _numbered(leaf, index, cycle)
    edges = [0, *ends, len(lengths)]
    if again:
        least = _LEAST * _rows(strategy, lengths)
        edges = [0] + [
            first + edge
            for first, stop in pairwise(edges)
            for edge in _stretches(number[first:stop], leaf[first:stop], cycle[first:stop], least)[1:]
        ]
    parts = []
    for turn, (first, stop) in enumerate(pairwise(edges)):
        own, keys = lengths[first:stop], None if key_lengths is None else key_lengths[first:stop]
        part = strategy.plan(own, seed=hash_ints(seed, turn) if turn else seed, key_lengths=keys)
        parts.append(_apart(strategy, part, number[first:stop], own if keys is None else keys) if again else part)
    return concatenate(parts, edges[:-1]), Stretches(edges, number if again else None)


def _apart(strategy: Strategy, part: MicroBatches, number: Ints, keys: Ints) -> MicroBatches:
    """Micro-batches of a stretch, with copies moved to different ones."""
    capacity = capacity_of(strategy)
    most = getattr(strategy, "max_samples", getattr(strategy, "batch_size", None))
    difference = getattr(strategy, "max_difference", None)
    sizes = part.length if capacity is None else capacity.sizes(part.length)
    of_entries = np.zeros_like(part.length) if difference is None else keys[part.sample]

    def fits(sizes: list[int], keys: list[int]) -> bool:
        if most is not None and len(sizes) > most:
            return False
        if difference is not None and max(keys) - min(keys) > difference:
            return False
        return capacity is None or (sum(sizes) if capacity.adds_up else len(sizes) * max(sizes)) <= capacity.limit

    _, numbers = np.unique(number, return_inverse=True)
    return keep_apart(part, numbers, sizes, of_entries, fits)


def _rows(strategy: Strategy, lengths: Ints) -> int:
    """Approximate number of samples in a micro-batch."""
    capacity = capacity_of(strategy)
    if capacity is None:
        return int(getattr(strategy, "batch_size", 1))
    return max(1, capacity.limit * len(lengths) // max(1, int(capacity.sizes(lengths).sum())))


def _numbered(leaf: Ints, index: Ints, cycle: Ints) -> tuple[Ints, bool]:
    """Number the distinct samples of a chunk, ``[positions]``; the flag is True if a sample repeats in another cycle.

    Args:
        leaf, index: leaf and index at each position, ``[positions]``.
        cycle: the epoch, or the number of completed rounds of deliberately mixed epochs, ``[positions]``.
    """
    if len(leaf) == 0 or not _any_again(leaf, cycle):
        return np.arange(len(leaf), dtype=np.int64), False
    order = np.lexsort((cycle, index, leaf))
    new = np.ones(len(order), dtype=bool)
    new[1:] = (np.diff(leaf[order]) != 0) | (np.diff(index[order]) != 0)
    again = ~new[1:] & (np.diff(cycle[order]) != 0)
    # A repetition within one cycle was requested by the user: each occurrence counts as a sample of its own.
    new[1:] |= ~again
    number = np.empty(len(order), dtype=np.int64)
    number[order] = np.cumsum(new) - 1
    return number, bool(again.any())


def _any_again(leaf: Ints, cycle: Ints) -> bool:
    """True if any leaf occurs in more than one cycle."""
    first = np.full(int(leaf.max()) + 1, -1, dtype=np.int64)
    first[leaf[::-1]] = cycle[::-1]
    return bool((first[leaf] != cycle).any())


def _stretches(sample: Ints, leaf: Ints, cycle: Ints, least: int) -> list[int]:
    """Boundaries of the stretches of some positions, the first 0 and the last ``len(sample)``.

    A stretch ends before the first sample that it already has, or at the last end of an epoch before that; but it has
    at least ``least`` positions.

    Args:
        sample: the number of the sample at each position, ``[positions]``.
        leaf, cycle: see :func:`_numbered`.
        least: least number of positions of a stretch, except the last.
    """
    count = len(sample)
    before = _before(sample)  # previous position of the same sample, -1 if there is none
    by_leaf = _before(leaf)
    ends = np.flatnonzero((by_leaf >= 0) & (cycle != cycle[by_leaf]))
    edges = [0]
    while edges[-1] < count:
        start = edges[-1]
        there = np.flatnonzero(before[start + least :] >= start)
        if not len(there):
            edges.append(count)
            continue
        stop = start + least + int(there[0])
        last = int(np.searchsorted(ends, stop, side="right")) - 1
        edges.append(int(ends[last]) if last >= 0 and ends[last] >= start + least else stop)
    return edges


def _before(values: Ints) -> Ints:
    """Index of the previous equal value for each value, ``[n]``; -1: there is none."""
    order = np.argsort(values, kind="stable")
    previous = np.full(len(values), -1, dtype=np.int64)
    equal = values[order[1:]] == values[order[:-1]]
    previous[order[1:][equal]] = order[:-1][equal]
    return previous
