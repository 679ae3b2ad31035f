"""Best fit decreasing: packing with the longest samples first, of a whole chunk, or of the samples of a buffer.

A chunk is packed as a histogram: run time depends on the number of different sizes, not of samples. When sizes come in
descending order, all samples of one size are placed at once: the bins with the smallest sufficient gap take as many as
fit, and no other bin can fit better meanwhile. Bins with the same contents stay one entry. Packing of the histogram is
from Krell et al. 2021, "Efficient sequence packing without cross-contamination".

Packing a whole buffer leaves a last pack that is partly empty, although the end of the buffer has no meaning. So of a
buffer only the samples up to a suitable cut are packed (:func:`full_packs`); the others wait for more. The waiting
samples are the end of the stream, so one number describes them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from energon_lite.batching.capacity import Capacity, Ints, checked_lengths
from energon_lite.batching.micro_batches import MicroBatches, Oversize, PlanOrder, arrange, concatenate, cut_to_fit
from energon_lite.batching.packing import checked_packing_capacity
from energon_lite.errors import UsageError, at_least_one
from energon_lite.order.hashing import HashDomain, hash_ints
from energon_lite.order.permutation import permute_array

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


_DEAL_TAG = HashDomain.DEAL.value
#: Largest size, exclusive, that fits 16 bits: numpy sorts 16-bit integers by radix, several times as fast.
_SHORT = 1 << 16


@dataclass(frozen=True)
class BestFitDecreasing:
    """Best-fit-decreasing strategy: the fullest micro-batches of all strategies, mostly at 99.9 %.

    The sizes are packed as a histogram; then samples are assigned to the places of their size in a random order that
    depends on the seed. Long samples still share micro-batches with long ones more often than by chance, because they
    are placed while only long ones are there. If that bias matters, and ten or more samples fit into a micro-batch, use
    :class:`BestFit`.

    Args:
        capacity: what a micro-batch may hold; not ``padded_tokens``.
        chunk: largest number of samples that are packed together, which bounds the distance a sample moves in the
            stream; None: all that are planned together.
        oversize: treatment of a sample that does not fit alone.
        order: order of the micro-batches; ``random`` by default, because they are made from long samples to short ones.

    Example:
        >>> strategy = BestFitDecreasing(Capacity(10), order="none")
        >>> [sorted(part.tolist()) for part in strategy.plan(np.array([3, 6, 7, 4, 2]), seed=0)]
        [[0, 2], [1, 3], [4]]
    """

    capacity: Capacity
    chunk: int | None = None
    oversize: Oversize = "error"
    order: PlanOrder = "random"

    def __post_init__(self) -> None:
        checked_packing_capacity(self.capacity, "bfd")
        at_least_one("give at least 1, or None", chunk=self.chunk)

    def plan(self, lengths: Ints, *, seed: int = 0, key_lengths: Ints | None = None) -> MicroBatches:
        """See :class:`energon_lite.batching.strategy.Strategy`."""
        lengths = checked_lengths(lengths)
        count = max(1, -(-len(lengths) // self.chunk)) if self.chunk else 1
        # Parts of equal size: a short last one would pack worse.
        edges = [len(lengths) * part // count for part in range(count + 1)]
        parts = [self._pack(lengths[first:last], hash_ints(seed, first)) for first, last in pairwise(edges)]
        return concatenate(parts, edges[:-1])

    def _pack(self, lengths: Ints, seed: int) -> MicroBatches:
        pieces = cut_to_fit(lengths, self.capacity, self.oversize)
        sizes = self.capacity.sizes(pieces.length)
        shuffled = permute_array(np.arange(len(sizes), dtype=np.int64), len(sizes), hash_ints(seed, _DEAL_TAG))
        by_size = shuffled[_order(sizes[shuffled])]
        fitting = len(sizes) - int((sizes > self.capacity.limit).sum())
        places, offsets = pack_histogram(np.bincount(sizes[by_size[:fitting]]), self.capacity.limit)
        entries = np.empty(fitting, dtype=np.int64)
        entries[_order(places)] = by_size[:fitting]
        entries = np.concatenate([entries, by_size[fitting:]])
        offsets = np.concatenate([offsets, np.arange(fitting + 1, len(sizes) + 1)])
        return arrange(pieces, entries, offsets, self.capacity, len(sizes), order=self.order, seed=seed)


def _order(sizes: Ints) -> Ints:
    """Stable argsort of the sizes, ascending."""
    short = len(sizes) == 0 or int(sizes.max()) < _SHORT
    return np.argsort(sizes.astype(np.uint16) if short else sizes, kind="stable")


#: Version of the algorithm; raised when the same lengths would give other packs.
PACK_VERSION = 1

#: Fill at which the search for a better cut stops.
_FULL = 0.995
#: Numbers of packs that are tried.
_COUNTS = 6
#: Cuts that are tried for each number of packs.
_PLACES = 5


#: A sample, and the number of its copy.
Owner = tuple[Hashable, Hashable]


def full_packs(
    lengths: Sequence[int], capacity: int, owners: Sequence[Owner | None] | None = None
) -> tuple[list[list[int]], int]:
    """Pack the first samples of a stream, and return the packs and the number of packed samples.

    At least half of the samples that fit into whole packs are packed, and at least one sample. Samples that together
    fill no pack make one pack.

    Args:
        lengths: lengths of the samples in tokens, in stream order.
        capacity: tokens of a pack.
        owners: the sample and the copy at each position: two copies of a sample are not put into one pack. None: no
            sample repeats.

    Returns:
        Packs of indices into ``lengths``, in stream order of their first samples, and the cut: samples before it are in
        packs, later ones are not.

    Raises:
        UsageError: a sample is longer than a pack.

    Example:
        >>> full_packs([6, 3, 4, 7, 5, 4], capacity=10)  # the last two are left for later
        ([[0, 2], [1, 3]], 4)
    """
    at_least_one(capacity=capacity)
    longest = max(lengths, default=0)
    if longest > capacity:
        raise UsageError(
            f"a sample of {longest} tokens does not fit into a pack of {capacity}",
            fix="raise the capacity, or skip such samples before they are packed",
        )
    ends = list(accumulate(lengths))
    whole = ends[-1] // capacity if ends else 0
    owners = [None] * len(lengths) if owners is None else owners
    if not whole:
        return _packed(lengths, capacity, owners), len(ends)
    best, best_fill = (list[list[int]](), 0), 0.0
    for count in range(whole, max(0, whole - _COUNTS, (whole - 1) // 2), -1):
        most = bisect_left(ends, count * capacity + 1)
        for taken in range(most, max(0, most - _PLACES), -1):
            packs = _packed(lengths[:taken], capacity, owners)
            fill = ends[taken - 1] / (capacity * len(packs))
            if fill > best_fill:
                best, best_fill = (packs, taken), fill
            if len(packs) <= count:
                break
        if best_fill >= _FULL:
            break
    return best


def _packed(lengths: Sequence[int], capacity: int, owners: Sequence[Owner | None]) -> list[list[int]]:
    """Best fit decreasing packs, with no two copies of a sample in one pack."""
    packs: list[list[int]] = []
    copies: list[dict[Hashable, Hashable]] = []  # sample -> its copy, for each pack
    rooms: list[tuple[int, int]] = []  # (free tokens, pack), ascending
    for sample in sorted(range(len(lengths)), key=lambda place: (-lengths[place], place)):
        at, owner = bisect_left(rooms, (lengths[sample], -1)), owners[sample]
        while owner and at < len(rooms) and copies[rooms[at][1]].get(owner[0], owner[1]) != owner[1]:
            at += 1
        if at == len(rooms):
            room, pack = capacity, len(packs)
            packs.append([])
            copies.append({})
        else:
            room, pack = rooms.pop(at)
        packs[pack].append(sample)
        if owner:
            copies[pack][owner[0]] = owner[1]
        insort(rooms, (room - lengths[sample], pack))
    # Stream order of the packs: otherwise the fullest or the emptiest of each buffer would be delivered first, on all
    # ranks at the same time.
    return [sorted(pack) for pack in sorted(packs)]
