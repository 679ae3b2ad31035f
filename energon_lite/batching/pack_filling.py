"""Packs of a stream of samples, without a rest: so many samples from its beginning as fill whole packs.

Whoever packs a buffer to its end closes a last pack that is half empty. But where the buffer ends is nobody's wish. So
of the samples that came, in their order, those up to a good place are packed, longest first, each where it leaves the
least room; the others wait for more. What waits is the end of the stream, so one number says what it is.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Sequence
from itertools import accumulate

from energon_lite.batching.capacity import at_least_one
from energon_lite.errors import UsageError

__all__ = ["PACK_VERSION", "full_packs"]

#: Raised when the same lengths make other packs.
PACK_VERSION = 1

#: Good enough: no other place is looked for.
_FULL = 0.995
#: Numbers of packs that are tried, and for each of them, places.
_COUNTS, _PLACES = 6, 5


#: A sample, and which copy of it.
Owner = tuple[Hashable, Hashable]


def full_packs(
    lengths: Sequence[int], capacity: int, owners: Sequence[Owner | None] | None = None
) -> tuple[list[list[int]], int]:
    """Packs of the first samples of a stream, and how many samples these are.

    At least half of what fits into whole packs is packed, and at least one sample. Samples that together fill no pack
    are one.

    Args:
        lengths: of the samples, in their order, in tokens.
        capacity: tokens of a pack.
        owners: which sample each is, and which copy of it: two copies are not put into one pack. None: nobody's.

    Returns:
        Packs of places in ``lengths``, as their longest samples came, and a number of samples: those before it are in
        packs, those from it on are in none.

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
    """The samples in packs, longest first, each where it leaves the least room, and no other copy of it is."""
    packs: list[list[int]] = []
    copies: list[dict[Hashable, Hashable]] = []  # in each pack
    rooms: list[tuple[int, int]] = []  # of each pack, ascending
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
    # In the order in which their longest samples came: else the longest, or the shortest, would be delivered first of
    # each buffer, on all ranks at the same time.
    return [sorted(pack) for pack in sorted(packs)]
