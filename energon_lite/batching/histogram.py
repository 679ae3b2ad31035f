"""Best fit decreasing on a histogram: cost depends on the number of different sizes, not on the number of samples.

When sizes come in descending order, all samples of one size are placed at once: the bins with the least sufficient room
take as many as go in, and no other bin can fit better meanwhile. Bins that got the same samples stay one entry.

The idea to pack the histogram: Krell et al. 2021, "Efficient sequence packing without cross-contamination".
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

from energon_lite.batching.capacity import Ints

__all__ = ["Template", "pack_histogram"]


@dataclass(frozen=True)
class Template:
    """Bins of equal content, kind by kind.

    Args:
        bins: how many bins there are of each kind, ``[kinds]``.
        sizes: the sizes in a bin of each kind, kind after kind.
        offsets: where each kind begins in ``sizes``, ``[kinds + 1]``.
    """

    bins: Ints
    sizes: Ints
    offsets: Ints

    def expand(self) -> tuple[Ints, Ints]:
        """The sizes in each single bin, bin after bin, and where each bin begins, ``[bins + 1]``."""
        kind = np.repeat(np.arange(len(self.bins)), self.bins)
        length = np.diff(self.offsets)[kind]
        begins = np.concatenate([[0], np.cumsum(length)]).astype(np.int64)
        inside = np.repeat(self.offsets[:-1][kind] - begins[:-1], length) + np.arange(begins[-1])
        return self.sizes[inside], begins


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


def pack_histogram(counts: Ints, limit: int) -> Template:
    """Best fit decreasing.

    Args:
        counts: how many samples there are of each size 0, 1, ..., ``[largest size + 1]``; none of size 0.
        limit: size of a bin, at least the largest size.

    Example:
        >>> template = pack_histogram(np.bincount([6, 7, 4, 3, 3]), limit=10)
        >>> template.bins.tolist(), template.sizes.tolist(), template.offsets.tolist()
        ([1, 1, 1], [7, 3, 6, 4, 3], [0, 2, 4, 5])
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
    return _template(bins)


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


def _template(bins: _Bins) -> Template:
    many: list[int] = []
    sizes: list[int] = []
    offsets = [0]
    for room in bins.rooms:
        for kind, count in bins.kinds[room]:
            content: _Content | None = kind
            inside: list[int] = []
            while content is not None:
                content, size, times = content
                inside += [size] * times
            many.append(count)
            sizes += inside[::-1]
            offsets.append(len(sizes))
    return Template(np.array(many, dtype=np.int64), np.array(sizes, dtype=np.int64), np.array(offsets, dtype=np.int64))
