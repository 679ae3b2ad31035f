"""Best fit decreasing on a histogram: run time depends on the number of different sizes, not of samples.

When sizes come in descending order, all samples of one size are placed at once: the bins with the smallest sufficient
gap take as many as fit, and no other bin can fit better meanwhile. Bins with the same contents stay one entry.

Packing of the histogram is from Krell et al. 2021, "Efficient sequence packing without cross-contamination".
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from energon_lite.batching.capacity import Ints

__all__ = ["pack_histogram"]


# Contents of a kind of bins: (contents before the last addition, size of the samples added last, their number).
_Content = tuple["_Content | None", int, int]


class _Bins:
    """Bins, grouped by their free room."""

    def __init__(self) -> None:
        self.rooms: list[int] = []  # distinct values, ascending
        self.kinds: dict[int, list[tuple[_Content, int]]] = {}  # room -> (content, number of bins)

    def add(self, room: int, content: _Content, bins: int) -> None:
        if room not in self.kinds:
            insort(self.rooms, room)
            self.kinds[room] = []
        self.kinds[room].append((content, bins))

    def take(self, place: int) -> tuple[int, _Content, int]:
        """Remove one group of equal bins with the ``place``-th smallest room: its room, content and number of bins."""
        room = self.rooms[place]
        content, bins = self.kinds[room].pop()
        if not self.kinds[room]:
            del self.kinds[room], self.rooms[place]
        return room, content, bins


def pack_histogram(counts: Ints, limit: int) -> tuple[Ints, Ints]:
    """Sizes in the bins of best fit decreasing, bin after bin, and the first index of each bin, ``[bins + 1]``.

    Args:
        counts: number of samples of each size 0, 1, ..., ``[largest size + 1]``; none of size 0.
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
    """Put up to ``left`` samples into ``many`` equal bins, and return the number left over."""
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
    """Sizes in each single bin, and the bins' boundaries."""
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
