"""Best fit decreasing on a histogram: cost depends on the number of different sizes, not on the number of samples.

When sizes come in descending order, all samples of one size are placed at once: the bins with the least sufficient room
take as many as go in, and no other bin can fit better meanwhile. Bins that got the same samples stay one entry.

The idea to pack the histogram: Krell et al. 2021, "Efficient sequence packing without cross-contamination".
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from energon_lite.batching.capacity import Ints

__all__ = ["pack_histogram"]


# What a kind of bins holds: (the kind it was before, size of the samples that came last, how many of them).
_Content = tuple["_Content | None", int, int]


class _Bins:
    """Bins by the room left in them."""

    def __init__(self) -> None:
        self.rooms: list[int] = []  # different ones, ascending
        self.kinds: dict[int, list[tuple[_Content, int]]] = {}  # room -> (content, how many bins)

    def add(self, room: int, content: _Content, bins: int) -> None:
        if room not in self.kinds:
            insort(self.rooms, room)
            self.kinds[room] = []
        self.kinds[room].append((content, bins))

    def take(self, place: int) -> tuple[int, _Content, int]:
        """Room, content and number of some bins with the ``place``-th least room."""
        room = self.rooms[place]
        content, bins = self.kinds[room].pop()
        if not self.kinds[room]:
            del self.kinds[room], self.rooms[place]
        return room, content, bins


def pack_histogram(counts: Ints, limit: int) -> tuple[Ints, Ints]:
    """The sizes in each bin of best fit decreasing, bin after bin, and where each bin begins, ``[bins + 1]``.

    Args:
        counts: how many samples there are of each size 0, 1, ..., ``[largest size + 1]``; none of size 0.
        limit: size of a bin, at least the largest size.

    Example:
        >>> sizes, offsets = pack_histogram(np.bincount([6, 7, 4, 3, 3]), limit=10)
        >>> sizes.tolist(), offsets.tolist()
        ([7, 3, 6, 4, 3], [0, 2, 4, 5])
    """
    bins = _Bins()
    for size in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[size])
        while left:
            place = bisect_left(bins.rooms, size)
            if place < len(bins.rooms):
                room, content, many = bins.take(place)
                left = _put(bins, size, left, room, content, many)
            else:
                left = _put(bins, size, left, limit, None, left)
    return _expanded(bins)


def _put(bins: _Bins, size: int, left: int, room: int, content: _Content | None, many: int) -> int:
    """Put up to ``left`` samples into ``many`` equal bins; returns how many are left over."""
    each = room // size
    full = min(many, left // each)
    rest = min(left - full * each, each) if full < many else 0
    if full:
        bins.add(room - each * size, (content, size, each), full)
    if rest:
        bins.add(room - rest * size, (content, size, rest), 1)
    unused = many - full - (rest > 0)
    if unused and content is not None:
        bins.add(room, content, unused)
    return left - full * each - rest


def _expanded(bins: _Bins) -> tuple[Ints, Ints]:
    """The sizes in each single bin, and where it begins."""
    sizes: list[int] = []
    rows: list[int] = []
    for room in bins.rooms:
        for kind, count in bins.kinds[room]:
            content: _Content | None = kind
            inside: list[int] = []
            while content is not None:
                content, size, times = content
                inside += [size] * times
            sizes += inside[::-1] * count
            rows += [len(inside)] * count
    return np.array(sizes, dtype=np.int64), np.cumsum([0, *rows])
