"""Distribution of copies of one sample over different micro-batches."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from energon_lite.batching.capacity import Ints
from energon_lite.batching.micro_batches import MicroBatches

__all__ = ["Fits", "keep_apart"]

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
