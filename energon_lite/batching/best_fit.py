"""Packing a stream: a few micro-batches are open at a time, and each sample goes where it fits best."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

from energon_lite.batching.capacity import Capacity, Ints, checked_lengths
from energon_lite.batching.micro_batches import MicroBatches, arrange
from energon_lite.batching.oversize import Oversize, cut_to_fit
from energon_lite.errors import UsageError

__all__ = ["BestFit", "checked_packing_capacity"]


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
    Samples come together because they were neighbours, hardly because of their lengths: unlike sorting and unlike
    best fit *decreasing*, this leaves no correlation of lengths inside a micro-batch, at fills of 99 % and more where
    about ten or more samples fit into one.

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
        for name, value in (("open_bins", self.open_bins), ("max_age", self.max_age)):
            if value is not None and value < 1:
                raise UsageError(f"{name} is {value}", fix="give at least 1")

    def plan(self, lengths: Ints, *, seed: int = 0, key_lengths: Ints | None = None) -> MicroBatches:
        """See :class:`energon_lite.batching.strategy.Strategy`."""
        pieces = cut_to_fit(checked_lengths(lengths), self.capacity, self.oversize)
        sizes = self.capacity.sizes(pieces.length)
        age = self.max_age
        if age is None:
            age = max(1, 8 * self.open_bins * self.capacity.limit * len(sizes) // max(1, int(sizes.sum())))
        entries, offsets = _fill(sizes.tolist(), self.capacity.limit, self.open_bins, age)
        return arrange(
            pieces,
            np.array(entries, dtype=np.int64),
            np.array(offsets, dtype=np.int64),
            packed=True,
            limit=self.capacity.limit,
            lateness_bound=age,
        )


def _fill(sizes: list[int], limit: int, open_bins: int, max_age: int) -> tuple[list[int], list[int]]:
    """Entries and boundaries of the micro-batches, in the order in which they are emitted."""
    entries: list[int] = []
    offsets = [0]
    rooms: list[tuple[int, int]] = []  # (room left, bin), ascending
    contents: dict[int, list[int]] = {}  # bin -> its samples; a bin is named by its first, so the oldest comes first

    def emit(samples: list[int]) -> None:
        entries.extend(samples)
        offsets.append(len(entries))

    oldest = len(sizes)
    for number, size in enumerate(sizes):
        while number - oldest >= max_age:
            rooms = [item for item in rooms if item[1] != oldest]
            emit(contents.pop(oldest))
            oldest = next(iter(contents), len(sizes))
        if size > limit:
            emit([number])
            continue
        place = bisect_left(rooms, (size,))
        if place < len(rooms):
            room, name = rooms.pop(place)
            contents[name].append(number)
        else:
            if len(rooms) >= open_bins:
                emit(contents.pop(rooms.pop(0)[1]))
            room, name = limit, number
            contents[name] = [number]
        if room > size:
            insort(rooms, (room - size, name))
        else:
            emit(contents.pop(name))
        if oldest not in contents:
            oldest = next(iter(contents), len(sizes))
    for samples in contents.values():
        emit(samples)
    return entries, offsets
