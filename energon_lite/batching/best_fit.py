"""Packing a stream: a few micro-batches are open at a time, and each sample goes where it fits best."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

from energon_lite.batching.capacity import Capacity, Ints, at_least_one, checked_lengths
from energon_lite.batching.micro_batches import MicroBatches, arrange
from energon_lite.batching.oversize import Oversize, cut_to_fit
from energon_lite.errors import UsageError

__all__ = ["BestFit", "checked_packing_capacity"]


#: Rooms that differ by less than this part of the capacity are about the same.
_ABOUT = 400
#: The part of the variance of lengths by which those of a micro-batch may be less alike than random ones.
_LET_PASS = 70


def checked_packing_capacity(capacity: Capacity, name: str) -> None:
    """Refuse a capacity whose micro-batches are not the sum of their samples."""
    if not capacity.adds_up:
        raise UsageError(
            f"{name} packs samples one behind the other, but the capacity counts {capacity.unit}",
            fix="use packed_tokens or cost, or sorted_window for padded batches",
        )


@dataclass(frozen=True)
class BestFit:
    """Each sample, in stream order, goes into the open micro-batch that it leaves the least room in.

    Where it fits into none, another one is opened; if there are ``open_bins`` already, the fullest is emitted first.
    Samples come together because they were neighbours, and not because of their lengths, unlike in sorting and in
    best fit *decreasing*. Best fit alone tends to put the long with the short, the more so the fewer samples fill a
    micro-batch; while it does, the one with samples like this is taken of micro-batches with about as little room, or,
    if that is not enough, with up to half a capacity more. Lengths as texts have them then correlate by less than 0.02,
    at fills of 99 % and more where about ten or more samples fit into one.

    A micro-batch waits for its last gap to be filled no longer than ``max_age`` samples, so nothing starves.

    Best fit with bounded space: Csirik and Johnson 2001, "Bounded space on-line bin packing: best is better than
    first".

    Args:
        capacity: what a micro-batch may hold; not ``padded_tokens``.
        open_bins: most micro-batches that are open at a time.
        max_age: a micro-batch is emitted when so many samples have come since its first. None: as many as fill
            ``8 * open_bins`` micro-batches on average.
        oversize: what to do with a sample that does not fit alone.

    Example:
        >>> [part.tolist() for part in BestFit(Capacity(10)).plan(np.array([6, 7, 4, 3]), seed=0)]
        [[0, 2], [1, 3]]
    """

    capacity: Capacity
    open_bins: int = 32
    max_age: int | None = None
    oversize: Oversize = "error"

    def __post_init__(self) -> None:
        checked_packing_capacity(self.capacity, "best_fit")
        at_least_one(open_bins=self.open_bins, max_age=self.max_age)

    def plan(self, lengths: Ints, *, seed: int = 0, key_lengths: Ints | None = None) -> MicroBatches:
        """See :class:`energon_lite.batching.strategy.Strategy`."""
        pieces = cut_to_fit(checked_lengths(lengths), self.capacity, self.oversize)
        sizes = self.capacity.sizes(pieces.length)
        age = self.max_age
        if age is None:
            age = max(1, 8 * self.open_bins * self.capacity.limit * len(sizes) // max(1, int(sizes.sum())))
        entries, offsets = _fill(sizes.tolist(), self.capacity.limit, self.open_bins, age)
        return arrange(pieces, entries, offsets, self.capacity, age)


def _fill(sizes: list[int], limit: int, open_bins: int, max_age: int) -> tuple[list[int], list[int]]:
    """Entries and boundaries of the micro-batches, in the order in which they are emitted."""
    entries: list[int] = []
    offsets = [0]
    rooms: list[tuple[int, int]] = []  # (room left, bin), ascending
    contents: dict[int, list[int]] = {}  # bin -> its samples; a bin is named by its first, so the oldest comes first
    marks, variance = _marks(sizes)
    sums: dict[int, int] = {}  # bin -> the marks of its samples together
    # How alike the samples of a micro-batch are: the sum over micro-batches of sum(marks)^2 / samples less as many
    # variances, which an analysis of variance compares. Below 0 they are unlike; so much of it is let pass.
    alike, let_pass = 0, open_bins * variance

    def emit(samples: list[int]) -> None:
        entries.extend(samples)
        offsets.append(len(entries))

    def close(name: int) -> None:
        del sums[name]
        emit(contents.pop(name))

    def most_alike(mark: int, place: int, room: int) -> int:
        """Of the micro-batches from ``place`` on with at most so much room, the one with samples like this."""
        end = bisect_left(rooms, (room + 1,))
        unlike = [abs(sums[name] // len(contents[name]) - mark) for _, name in rooms[place:end]]
        return place + unlike.index(min(unlike))

    oldest = len(sizes)
    for number, (size, mark) in enumerate(zip(sizes, marks, strict=True)):
        while number - oldest >= max_age:
            rooms = [item for item in rooms if item[1] != oldest]
            close(oldest)
            oldest = next(iter(contents), len(sizes))
        if size > limit:
            emit([number])
            continue
        place = bisect_left(rooms, (size,))
        if place < len(rooms):
            if alike < 0:
                most = rooms[place][0] + limit // (2 if alike < -let_pass else _ABOUT)
                if place + 1 < len(rooms) and rooms[place + 1][0] <= most:
                    place = most_alike(mark, place, most)
            room, name = rooms.pop(place)
            before, many = sums[name], len(contents[name])
            sums[name] = after = before + mark
            contents[name].append(number)
            alike += after * after // (many + 1) - before * before // many
            let_pass += variance // _LET_PASS
        else:
            if len(rooms) >= open_bins:
                close(rooms.pop(0)[1])
            room, name = limit, number
            contents[name], sums[name] = [number], mark
            alike += mark * mark - variance
        if room > size:
            insort(rooms, (room - size, name))
        else:
            close(name)
        if oldest not in contents:
            oldest = next(iter(contents), len(sizes))
    for samples in contents.values():
        emit(samples)
    return entries, offsets


def _marks(sizes: list[int]) -> tuple[list[int], int]:
    """Logarithms of the sizes less their mean, and their variance, in whole 256ths: equal on every machine."""
    if not sizes:
        return [], 0
    values = np.maximum(1, np.array(sizes, dtype=np.int64))
    powers = np.frexp(values.astype(np.float64))[1].astype(np.int64) - 1  # 2 ** power <= value
    marks = (powers << 8) + ((values << 8) >> powers)
    marks -= int(marks.sum()) // len(marks)
    return marks.tolist(), int((marks * marks).sum()) // len(marks)
