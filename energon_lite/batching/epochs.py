"""Separation of epochs of small data sets, which repeat several times within one planned chunk.

A strategy knows lengths, not samples: planned together, all copies of a sample would share one micro-batch. So a chunk
is cut into *stretches* that are planned one after the other. A stretch ends where an epoch ends
(:meth:`~energon_lite.order.orders.Order.epoch_ends`), or where a sample of a blend would repeat. A leaf with an epoch
of a few micro-batches would make stretches too short to fill micro-batches well. Its copies stay in one stretch, and
are moved to different micro-batches of it (:func:`keep_apart`).

The result is a function of the chunk's addresses and lengths, so every rank computes the same plan.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from energon_lite.batching.capacity import Ints
from energon_lite.batching.micro_batches import MicroBatches, concatenate
from energon_lite.batching.strategy import Strategy, capacity_of
from energon_lite.order.hashing import hash_ints

#: Function of the sizes and key lengths of samples: True if one micro-batch may hold them.
Fits = Callable[[list[int], list[int]], bool]

#: Candidates for a swap: this number of samples of similar length is tried on each side.
_TRIED = 64


def keep_apart(batches: MicroBatches, sample: Ints, sizes: Ints, keys: Ints, fits: Fits) -> MicroBatches:
    """Move copies of a sample to different micro-batches, and number them in the order of the stream.

    Of ``c`` copies in ``m`` micro-batches, at most ``ceil(c / m)`` stay in one. A copy is swapped with a sample of
    another micro-batch of equal or similar length. If no swap is possible, the copy goes into a new micro-batch.

    Args:
        batches: micro-batches of a chunk, or of a step.
        sample: the number of the sample at each position that they are made of, ``[positions]``.
        sizes: size of each entry, ``[entries]``.
        keys: key length of each entry, ``[entries]``.
        fits: True if one micro-batch may hold the given sizes and key lengths.
    """
    positions = len(sample)
    places, position = np.unique(batches.sample, return_inverse=True)
    owner = np.unique(sample[places], return_inverse=True)[1]  # of each place
    copies = np.bincount(owner)
    if copies.max(initial=0) < 2:
        return batches
    moved = _Crowd(batches, owner[position], copies, sizes, keys, fits).spread()
    entries = np.array([entry for members in moved for entry in members], dtype=np.int64)
    rows = np.array([len(members) for members in moved], dtype=np.int64)
    apart = batches.regrouped(entries, rows)
    batch = np.repeat(np.arange(len(rows)), rows)
    sample = places[_in_order(position[entries], apart.length, batch, owner)]
    return replace(apart, sample=sample, lateness_bound=max(batches.lateness_bound, positions))


def _in_order(position: Ints, length: Ints, batch: Ints, owner: Ints) -> Ints:
    """The position of each entry, such that copies of a sample follow one another in the order of the stream.

    If hooks made copies of different lengths, they are not interchangeable: these keep their positions.

    Args:
        position, length, batch: of each entry, ``[entries]``. Positions have no gap.
        owner: the sample at each position, ``[positions]``.
    """
    first = np.full(len(owner), len(position), dtype=np.int64)
    total = np.zeros(len(owner), dtype=np.int64)
    np.minimum.at(first, position, batch)
    np.add.at(total, position, length)
    everything = np.arange(len(owner), dtype=np.int64)
    becomes = np.empty_like(everything)
    becomes[np.lexsort((everything, first, total, owner))] = np.lexsort((everything, total, owner))
    return becomes[position]


class _Crowd:
    """The entries of micro-batches, during the moves.

    Args:
        batches, sizes, keys, fits: see :func:`keep_apart`.
        owner: the sample of each entry, ``[entries]``.
        copies: number of copies of each sample, in all micro-batches.
    """

    def __init__(self, batches: MicroBatches, owner: Ints, copies: Ints, sizes: Ints, keys: Ints, fits: Fits):
        several = copies > 1
        self._several = several.tolist()
        self._most = (-(-copies // len(batches))).tolist()
        offsets = batches.offsets.tolist()
        self._members = [list(range(*edges)) for edges in pairwise(offsets)]
        self._batch = np.repeat(np.arange(len(batches)), batches.rows()).tolist()
        self._owner = owner.tolist()
        self._position = batches.sample.tolist()
        self._sizes = sizes.tolist()
        self._keys = keys.tolist()
        self._fits = fits
        by_length = np.lexsort((owner, keys, sizes))
        # Edges of the runs of copies of one sample, in the order by length.
        edges = np.flatnonzero(np.diff(owner[by_length], prepend=-1, append=-1))
        block = np.empty(len(sizes), dtype=np.int64)
        block[by_length] = np.repeat(np.arange(len(edges) - 1), np.diff(edges))
        self._by_length = by_length.tolist()
        self._block = block.tolist()
        self._edges = edges.tolist()
        # Of samples with several copies, in each micro-batch: sample -> (position of the copy -> number of its pieces).
        self._copies: list[dict[int, Counter[int]]] = [defaultdict(Counter) for _ in self._members]
        for entry in np.flatnonzero(several[owner]).tolist():
            self._count(entry, self._batch[entry], 1)

    def spread(self) -> list[list[int]]:
        """Move the copies, and return the entries of each micro-batch."""
        left = []
        for number, copies in enumerate(self._copies):
            if not any(len(pieces) > self._most[owner] for owner, pieces in copies.items()):
                continue
            for entry in reversed(self._members[number].copy()):
                owner = self._owner[entry]
                too_many = len(copies.get(owner, ())) > self._most[owner]
                if too_many and not any(self._swap(entry, other) for other in self._alike(entry)):
                    self._take(entry)
                    left.append(entry)
        for entry in sorted(left, key=lambda entry: (-self._sizes[entry], entry)):
            self._put(entry)
        return [members for members in self._members if members]

    def _alike(self, entry: int) -> Iterator[int]:
        """Entries of other samples of similar length, the nearest first."""
        block, owner = self._block[entry], self._owner[entry]
        below, above = self._edges[block] - 1, self._edges[block + 1]
        for distance in range(_TRIED):
            for place in (below - distance, above + distance):
                # Pieces of the same sample have several lengths, so they also stand behind those of others.
                if 0 <= place < len(self._by_length) and self._owner[self._by_length[place]] != owner:
                    yield self._by_length[place]

    def _swap(self, entry: int, other: int) -> bool:
        here, there = self._batch[entry], self._batch[other]
        if there in (here, -1) or not (self._may_come(entry, there) and self._may_come(other, here)):
            return False
        mine = [other if member == entry else member for member in self._members[here]]
        theirs = [entry if member == other else member for member in self._members[there]]
        alike = self._sizes[entry] == self._sizes[other] and self._keys[entry] == self._keys[other]
        if not alike and not (self._holds(mine) and self._holds(theirs)):
            return False
        self._take(entry)
        self._take(other)
        self._add(entry, there)
        self._add(other, here)
        return True

    def _may_come(self, entry: int, batch: int) -> bool:
        owner = self._owner[entry]
        pieces = self._copies[batch].get(owner, ())
        return len(pieces) < self._most[owner] or self._position[entry] in pieces

    def _holds(self, members: Sequence[int]) -> bool:
        return self._fits([self._sizes[entry] for entry in members], [self._keys[entry] for entry in members])

    def _take(self, entry: int) -> None:
        batch = self._batch[entry]
        self._members[batch].remove(entry)
        self._count(entry, batch, -1)
        self._batch[entry] = -1

    def _put(self, entry: int) -> None:
        """Put an entry into the first micro-batch that can hold it, else into a new one.

        An earlier micro-batch may have room for it since another copy left.
        """
        for batch in range(len(self._members)):
            if self._may_come(entry, batch) and self._holds([*self._members[batch], entry]):
                break
        else:
            batch = len(self._members)
            self._members.append([])
            self._copies.append(defaultdict(Counter))
        self._add(entry, batch)

    def _add(self, entry: int, batch: int) -> None:
        self._members[batch].append(entry)
        self._batch[entry] = batch
        self._count(entry, batch, 1)

    def _count(self, entry: int, batch: int, step: int) -> None:
        owner, position = self._owner[entry], self._position[entry]
        if not self._several[owner]:
            return
        pieces = self._copies[batch][owner]
        pieces[position] += step
        if not pieces[position]:
            del pieces[position]


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


def plan_epochs(
    strategy: Strategy,
    lengths: Ints,
    samples: tuple[Ints, Ints, Ints],
    *,
    ends: Sequence[int] = (),
    seed: int,
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
        >>> batches, _ = plan_epochs(Fixed(2, sort=True), np.array([5, 6, 6, 5]), samples, ends=[2], seed=0)
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
