"""Moving copies of a sample that were planned into one micro-batch to different ones."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from energon_lite.batching.capacity import Ints
from energon_lite.batching.micro_batches import MicroBatches

__all__ = ["Fits", "keep_apart"]

#: Sizes and key lengths of samples -> whether a micro-batch may consist of them.
Fits = Callable[[list[int], list[int]], bool]

#: Of samples about as long, so many on each side are tried in exchange for one that has to go elsewhere.
_TRIED = 64


def keep_apart(batches: MicroBatches, sample: Ints, sizes: Ints, keys: Ints, fits: Fits) -> MicroBatches:
    """Move copies of a sample to different micro-batches, and bring them into the order of the stream.

    Of ``c`` copies in ``m`` micro-batches, at most ``ceil(c / m)`` stay in one. A copy is exchanged for a sample of
    another micro-batch that is as long, or nearly so. Where that fits nowhere, it goes into a new micro-batch.

    Args:
        batches: of a stretch, or of a step.
        sample: the number of the sample at each position that they are made of, ``[positions]``.
        sizes: what each entry takes up, ``[entries]``.
        keys: key length of each entry, ``[entries]``.
        fits: what a micro-batch may consist of.
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
    """The position of each entry, so that copies of a sample come one after the other.

    Where hooks made copies of different lengths, none can stand for another one: these stay as they are.

    Args:
        position, length, batch: of each entry, ``[entries]``. Positions have no gap.
        owner: the sample at each position, ``[positions]``.
    """
    first, total = np.full(len(owner), len(position), dtype=np.int64), np.zeros(len(owner), dtype=np.int64)
    np.minimum.at(first, position, batch)
    np.add.at(total, position, length)
    everything = np.arange(len(owner), dtype=np.int64)
    becomes = np.empty_like(everything)
    becomes[np.lexsort((everything, first, total, owner))] = np.lexsort((everything, total, owner))
    return becomes[position]


class _Crowd:
    """The entries of micro-batches while some of them are moved.

    Args:
        batches, sizes, keys, fits: see :func:`keep_apart`.
        owner: the sample of each entry, ``[entries]``.
        copies: of each sample, in all micro-batches.
    """

    def __init__(self, batches: MicroBatches, owner: Ints, copies: Ints, sizes: Ints, keys: Ints, fits: Fits):
        several = copies > 1
        self._several, self._most = several.tolist(), (-(-copies // len(batches))).tolist()
        offsets = batches.offsets.tolist()
        self._members = [list(range(*edges)) for edges in pairwise(offsets)]
        self._batch = np.repeat(np.arange(len(batches)), batches.rows()).tolist()
        self._owner, self._position = owner.tolist(), batches.sample.tolist()
        self._sizes, self._keys, self._fits = sizes.tolist(), keys.tolist(), fits
        by_length = np.lexsort((owner, keys, sizes))
        # Where the copies of a sample begin and end among all by length.
        edges = np.flatnonzero(np.diff(owner[by_length], prepend=-1, append=-1))
        block = np.empty(len(sizes), dtype=np.int64)
        block[by_length] = np.repeat(np.arange(len(edges) - 1), np.diff(edges))
        self._by_length, self._block, self._edges = by_length.tolist(), block.tolist(), edges.tolist()
        # Of samples with several copies, in each micro-batch: how many pieces there are of each copy.
        self._copies: list[dict[int, Counter[int]]] = [defaultdict(Counter) for _ in self._members]
        for entry in np.flatnonzero(several[owner]).tolist():
            self._count(entry, self._batch[entry], 1)

    def spread(self) -> list[list[int]]:
        """The entries of each micro-batch, afterwards."""
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
        """Entries of other samples, about as long, the nearest first."""
        block = self._block[entry]
        below, above = self._edges[block] - 1, self._edges[block + 1]
        for distance in range(_TRIED):
            if below - distance >= 0:
                yield self._by_length[below - distance]
            if above + distance < len(self._by_length):
                yield self._by_length[above + distance]

    def _swap(self, entry: int, other: int) -> bool:
        here, there = self._batch[entry], self._batch[other]
        if there in (here, -1) or not (self._may_come(entry, there) and self._may_come(other, here)):
            return False
        mine = [other if one == entry else one for one in self._members[here]]
        theirs = [entry if one == other else one for one in self._members[there]]
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
        return self._fits([self._sizes[one] for one in members], [self._keys[one] for one in members])

    def _take(self, entry: int) -> None:
        batch = self._batch[entry]
        self._members[batch].remove(entry)
        self._count(entry, batch, -1)
        self._batch[entry] = -1

    def _put(self, entry: int) -> None:
        """Into the first micro-batch that holds it, where another copy may have gone from, or a new one."""
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
