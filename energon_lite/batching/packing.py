"""Strategies that fill micro-batches along the stream: in its order, by best fit, or by concatenation."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

from energon_lite.batching.capacity import Capacity, Ints, checked_lengths
from energon_lite.batching.micro_batches import MicroBatches, Oversize, Pieces, PlanOrder, arrange, cut_to_fit
from energon_lite.batching.plan import Counts
from energon_lite.errors import UsageError, at_least_one


@dataclass(frozen=True)
class Greedy:
    """Strategy that fills a micro-batch in stream order until the next sample does not fit.

    It is the simplest strategy with a capacity. It has no bias, and no sample waits. With ``padded_tokens`` it has
    padding: every row of a micro-batch is as wide as its longest sample.

    Args:
        capacity: what a micro-batch may hold.
        max_samples: largest number of samples in a micro-batch; None: as many as fit.
        oversize: treatment of a sample that does not fit alone.
        order: order of the micro-batches.

    Example:
        >>> batches = Greedy(Capacity(10, "padded_tokens")).plan(np.array([5, 3, 1, 5, 2]), seed=0)
        >>> [part.tolist() for part in batches]
        [[0, 1], [2, 3], [4]]
    """

    capacity: Capacity
    max_samples: int | None = None
    oversize: Oversize = "error"
    order: PlanOrder = "none"

    def __post_init__(self) -> None:
        at_least_one(max_samples=self.max_samples)

    def plan(self, lengths: Ints, *, seed: int = 0, key_lengths: Ints | None = None) -> MicroBatches:
        """See :class:`energon_lite.batching.strategy.Strategy`."""
        pieces = cut_to_fit(checked_lengths(lengths), self.capacity, self.oversize)
        sizes = self.capacity.sizes(pieces.length).tolist()
        entries, offsets = _fill_in_order(
            sizes, self.capacity.limit, self.max_samples or len(sizes), self.capacity.adds_up
        )
        # A sample in a micro-batch of its own waits until the one that is open is full.
        wait = int(np.diff(offsets).max()) if pieces.counts.own_batches else 0
        late = len(sizes) if self.order != "none" else wait
        return arrange(pieces, entries, offsets, self.capacity, late, order=self.order, seed=seed)


def _fill_in_order(sizes: list[int], limit: int, most: int, adds_up: bool) -> tuple[list[int], list[int]]:
    """Entries and boundaries of the micro-batches, in the order in which they are emitted."""
    entries: list[int] = []
    # ``held`` is the size of the open micro-batch: the sum of its sizes or, with padding, its largest size.
    offsets = [0]
    alone: list[int] = []
    held = 0
    for number, size in enumerate(sizes):
        if size > limit:
            alone.append(number)
            continue
        rows = len(entries) - offsets[-1] + 1
        if adds_up:
            held += size
            is_full = held > limit
        else:
            if size > held:
                held = size
            is_full = held * rows > limit
        if is_full or rows > most:
            _close(entries, offsets, alone)
            held = size
        entries.append(number)
    _close(entries, offsets, alone)
    return entries, offsets


def _close(entries: list[int], offsets: list[int], alone: list[int]) -> None:
    """Emit the open micro-batch, then the oversized samples that arrived meanwhile, each in its own micro-batch."""
    if len(entries) > offsets[-1]:
        offsets.append(len(entries))
    for number in alone:
        entries.append(number)
        offsets.append(len(entries))
    alone.clear()


#: Gaps are treated as equal if they differ by less than ``limit / 400``.
_EQUAL_GAP_DIVISOR = 400
#: Similarity within micro-batches may fall below chance by ``variance / 70`` for each sample before it is corrected.
_TOLERANCE_DIVISOR = 70


def checked_packing_capacity(capacity: Capacity, name: str) -> None:
    """Refuse a capacity that is not additive over the samples of a micro-batch."""
    if not capacity.adds_up:
        raise UsageError(
            f"{name} packs samples, but the capacity counts {capacity.unit}",
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
        entries, offsets = _fill_best(sizes.tolist(), self.capacity.limit, self.open_bins, age)
        return arrange(pieces, entries, offsets, self.capacity, age)


def _fill_best(sizes: list[int], limit: int, open_bins: int, max_age: int) -> tuple[list[int], list[int]]:
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


@dataclass(frozen=True)
class ConcatSplit:
    """Strategy with micro-batches of exactly ``tokens`` tokens (the last one is shorter), as usual in pretraining.

    It fills micro-batches completely, but loses the most context: a sample is cut at the end of each micro-batch, and
    its second part is read without the first. Not for samples that must stay whole, such as those with images. For the
    effect of such cuts on a model see Ding et al. 2024, "Fewer truncations improve language modeling".

    Samples without tokens are in no micro-batch; they are counted as dropped.

    Args:
        tokens: tokens in a micro-batch.

    Example:
        >>> batches = ConcatSplit(4).plan(np.array([3, 6]), seed=0)
        >>> [part.tolist() for part in batches], batches.start.tolist(), batches.length.tolist()
        ([[0, 1], [1], [1]], [0, 0, 1, 5], [3, 1, 4, 1])
    """

    tokens: int

    def __post_init__(self) -> None:
        Capacity(self.tokens)

    @property
    def capacity(self) -> Capacity:
        """Capacity of a micro-batch, in packed tokens."""
        return Capacity(self.tokens)

    def plan(self, lengths: Ints, *, seed: int = 0, key_lengths: Ints | None = None) -> MicroBatches:
        """See :class:`energon_lite.batching.strategy.Strategy`."""
        lengths = checked_lengths(lengths)
        ends = np.cumsum(lengths)
        total = int(ends[-1]) if len(lengths) else 0
        cuts = np.arange(0, total, self.tokens, dtype=np.int64)
        begins = np.union1d((ends - lengths)[lengths > 0], cuts)
        sample = np.searchsorted(ends, begins, side="right").astype(np.int64)
        pieces = Pieces(
            sample,
            begins - (ends - lengths)[sample],
            np.diff(np.append(begins, total)),
            Counts(
                dropped_samples=int((lengths == 0).sum()),
                split_samples=int((np.bincount(sample, minlength=1) > 1).sum()),
            ),
        )
        offsets = np.append(np.searchsorted(begins, cuts), len(begins))
        return arrange(pieces, np.arange(len(begins)), offsets, self.capacity, 0)
