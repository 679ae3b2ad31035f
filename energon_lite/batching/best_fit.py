"""Best fit on a stream: a few micro-batches are open at a time, and each sample goes where it fits best."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

from energon_lite.batching.capacity import Capacity, Ints, at_least_one, checked_lengths
from energon_lite.batching.micro_batches import MicroBatches, arrange
from energon_lite.batching.oversize import Oversize, cut_to_fit
from energon_lite.errors import UsageError

__all__ = ["BestFit", "checked_packing_capacity"]


#: Gaps are treated as equal if they differ by less than ``limit / 400``.
_EQUAL_GAP_DIVISOR = 400
#: Similarity within micro-batches may fall below chance by ``variance / 70`` for each sample before it is corrected.
_TOLERANCE_DIVISOR = 70


def checked_packing_capacity(capacity: Capacity, name: str) -> None:
    """Refuse a capacity that is not additive over the samples of a micro-batch."""
    if not capacity.adds_up:
        raise UsageError(
            f"{name} packs samples one behind the other, but the capacity counts {capacity.unit}",
            fix="use packed_tokens or cost, or sorted_window for padded batches",
        )


@dataclass(frozen=True)
class BestFit:
    """Strategy that puts each sample, in stream order, into the open micro-batch where it leaves the smallest gap.

    If a sample fits into no open micro-batch, a new one is opened; if ``open_bins`` are open, the fullest is emitted
    first. Samples share a micro-batch because they were neighbours, and not because of their lengths, in contrast to
    sorting and to best fit *decreasing*. Plain best fit tends to combine long samples with short ones, the more so the
    fewer samples fill a micro-batch. While it does, a micro-batch with samples of similar length is preferred among
    those with about equal gaps, or, if that is not enough, among those with gaps up to half a capacity larger. With
    typical text lengths the correlation within micro-batches then stays below 0.02, at fills of 99 % and more, if
    about ten or more samples fit into one.

    A micro-batch waits at most ``max_age`` samples before it is emitted, so no sample starves.

    Best fit with bounded space: Csirik and Johnson 2001, "Bounded space on-line bin packing: best is better than
    first".

    Args:
        capacity: what a micro-batch may hold; not ``padded_tokens``.
        open_bins: largest number of micro-batches that are open at a time.
        max_age: a micro-batch is emitted when this number of samples has arrived since its first. None: the number that
            fills ``8 * open_bins`` micro-batches on average.
        oversize: treatment of a sample that does not fit alone.

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
    contents: dict[int, list[int]] = {}  # bin -> its samples; the name is its first sample, so the oldest comes first
    marks, variance = _marks(sizes)
    sums: dict[int, int] = {}  # bin -> sum of the marks of its samples
    # Between-group similarity, as in an analysis of variance: the sum over micro-batches of sum(marks)^2 / samples,
    # minus one variance for each micro-batch. Below 0, samples of a micro-batch differ more than by chance;
    # ``tolerance`` is the deviation that is accepted.
    similarity = 0
    tolerance = open_bins * variance

    def emit(samples: list[int]) -> None:
        entries.extend(samples)
        offsets.append(len(entries))

    def close(name: int) -> None:
        del sums[name]
        emit(contents.pop(name))

    def most_alike(mark: int, place: int, room: int) -> int:
        """Index of the micro-batch, from ``place`` on and with a gap of at most ``room``, most similar to ``mark``."""
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
            if similarity < 0:
                most = rooms[place][0] + limit // (2 if similarity < -tolerance else _EQUAL_GAP_DIVISOR)
                if place + 1 < len(rooms) and rooms[place + 1][0] <= most:
                    place = most_alike(mark, place, most)
            room, name = rooms.pop(place)
            before, many = sums[name], len(contents[name])
            sums[name] = after = before + mark
            contents[name].append(number)
            similarity += after * after // (many + 1) - before * before // many
            tolerance += variance // _TOLERANCE_DIVISOR
        else:
            if len(rooms) >= open_bins:
                close(rooms.pop(0)[1])
            room, name = limit, number
            contents[name], sums[name] = [number], mark
            similarity += mark * mark - variance
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
    """Centred base-2 logarithms of the sizes, in integer units of 1/256, and their variance: equal on every machine."""
    if not sizes:
        return [], 0
    values = np.maximum(1, np.array(sizes, dtype=np.int64))
    powers = np.frexp(values.astype(np.float64))[1].astype(np.int64) - 1  # 2 ** power <= value
    marks = (powers << 8) + ((values << 8) >> powers)
    marks -= int(marks.sum()) // len(marks)
    return marks.tolist(), int((marks * marks).sum()) // len(marks)
