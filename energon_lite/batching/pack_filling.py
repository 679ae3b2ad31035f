"""Packs without a partly filled last one: packing of as many samples of a stream as fill whole packs.

Packing a whole buffer leaves a last pack that is partly empty, although the end of the buffer has no meaning. So only
the samples up to a suitable cut are packed, longest first, each where it leaves the smallest gap; the others wait for
more. The waiting samples are the end of the stream, so one number describes them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Sequence
from itertools import accumulate

from energon_lite.batching.capacity import at_least_one
from energon_lite.errors import UsageError

__all__ = ["PACK_VERSION", "full_packs"]

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
