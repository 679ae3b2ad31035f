"""Strategies for padded micro-batches: a number of samples, similar lengths, or sorted windows of the stream."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from energon_lite.batching.capacity import Capacity, Ints, checked_lengths
from energon_lite.batching.micro_batches import MicroBatches, Oversize, Pieces, PlanOrder, arrange, cut_to_fit
from energon_lite.errors import UsageError, at_least_one


def _key(lengths: Ints, key_lengths: object, name: str | None) -> Ints:
    """Lengths to group by: those of the key field if one is named, else the whole lengths."""
    if name is None:
        return lengths
    if key_lengths is None:
        raise UsageError(f"the strategy groups by the field {name!r}", fix="give its lengths as key_lengths")
    key = checked_lengths(key_lengths, "key_lengths")
    if len(key) != len(lengths):
        raise UsageError(f"{len(key)} key_lengths for {len(lengths)} samples", fix="give a key length for each sample")
    return key


def _runs_of(count: int, batch_size: int) -> Ints:
    """Boundaries of runs of ``batch_size``, ``[runs + 1]``; the last run may be shorter."""
    return np.append(np.arange(0, count, batch_size, dtype=np.int64), count)


def _padded(
    pieces: Pieces, entries: Ints, offsets: Ints | list[int], *, is_sorted: bool, order: PlanOrder, seed: int
) -> MicroBatches:
    """Padded micro-batches without a limit, from pieces in stream order or in an order of their own."""
    late = len(entries) if is_sorted or order != "none" else 0
    return arrange(pieces, entries, offsets, None, late, order=order, seed=seed)


@dataclass(frozen=True)
class Fixed:
    """Strategy with ``batch_size`` samples in each micro-batch, padded to the longest; the last one has the rest.

    It corresponds to DynamiCat's ``FixedBatchSize`` planner.

    Args:
        batch_size: samples in a micro-batch.
        sort: sort the samples by length first (smart batching).
        order: order of the micro-batches.

    Example:
        >>> [part.tolist() for part in Fixed(2, sort=True).plan(np.array([9, 2, 8, 1]), seed=0)]
        [[3, 1], [2, 0]]
    """

    batch_size: int
    sort: bool = False
    order: PlanOrder = "none"

    def __post_init__(self) -> None:
        at_least_one(batch_size=self.batch_size)

    def plan(self, lengths: Ints, *, seed: int = 0, key_lengths: Ints | None = None) -> MicroBatches:
        """See :class:`energon_lite.batching.strategy.Strategy`."""
        lengths = checked_lengths(lengths)
        pieces = Pieces.of(lengths)
        entries = np.argsort(lengths, kind="stable") if self.sort else pieces.sample
        runs = _runs_of(len(lengths), self.batch_size)
        return _padded(pieces, entries, runs, is_sorted=self.sort, order=self.order, seed=seed)


@dataclass(frozen=True)
class LengthDifference:
    """Strategy with up to ``batch_size`` samples whose lengths differ by at most ``max_difference``.

    The samples are sorted by the length of the key field; a micro-batch ends where the next sample is too long for its
    first one. It corresponds to DynamiCat's ``LengthDifferenceRestricted`` planner.

    Args:
        batch_size: largest number of samples in a micro-batch.
        max_difference: largest difference of key lengths inside a micro-batch, in tokens.
        key: the field whose length counts, for example ``prompt``; None: the whole sample.
        order: order of the micro-batches; ``random`` by default, because they are made from short samples to long ones.

    Example:
        >>> [part.tolist() for part in LengthDifference(3, 1, order="none").plan(np.array([5, 2, 6, 1, 8]), seed=0)]
        [[3, 1], [0, 2], [4]]
    """

    batch_size: int
    max_difference: int
    key: str | None = None
    order: PlanOrder = "random"

    def __post_init__(self) -> None:
        at_least_one(batch_size=self.batch_size)
        if self.max_difference < 0:
            raise UsageError(f"max_difference is {self.max_difference}", fix="give 0 or more tokens")

    def plan(self, lengths: Ints, *, seed: int = 0, key_lengths: Ints | None = None) -> MicroBatches:
        """See :class:`energon_lite.batching.strategy.Strategy`."""
        lengths = checked_lengths(lengths)
        key = _key(lengths, key_lengths, self.key)
        entries = np.argsort(key, kind="stable")
        ordered = key[entries]
        ends = np.searchsorted(ordered, ordered + self.max_difference, side="right").tolist()
        offsets = [0]
        while offsets[-1] < len(lengths):
            offsets.append(min(offsets[-1] + self.batch_size, ends[offsets[-1]]))
        return _padded(Pieces.of(lengths), entries, offsets, is_sorted=True, order=self.order, seed=seed)


@dataclass(frozen=True)
class MaxLength:
    """Strategy with ``batch_size`` samples in each micro-batch, none with a key field longer than ``max_length``.

    It corresponds to DynamiCat's ``MaxLengthRestricted`` planner, which splits longer fields; the pieces then have the
    key field only.

    Args:
        batch_size: samples in a micro-batch.
        max_length: largest number of tokens of the key field.
        key: the field whose length counts, for example ``content``; None: the whole sample.
        sort: sort by the length of the key field first (smart batching).
        oversize: treatment of a longer field. With ``truncate`` and ``split``, ``start`` and ``length`` are relative to
            the key field.
        order: order of the micro-batches.

    Example:
        >>> batches = MaxLength(2, 4).plan(np.array([3, 10]), seed=0)
        >>> [part.tolist() for part in batches], batches.length.tolist()
        ([[0, 1], [1, 1]], [3, 4, 4, 2])
    """

    batch_size: int
    max_length: int
    key: str | None = None
    sort: bool = False
    oversize: Oversize = "split"
    order: PlanOrder = "none"

    def __post_init__(self) -> None:
        at_least_one(batch_size=self.batch_size, max_length=self.max_length)
        if self.oversize == "own_batch":
            raise UsageError(
                "a field above max_length cannot have a batch of its own: the limit is on each field",
                fix="use error, drop, truncate or split",
            )

    def plan(self, lengths: Ints, *, seed: int = 0, key_lengths: Ints | None = None) -> MicroBatches:
        """See :class:`energon_lite.batching.strategy.Strategy`."""
        lengths = checked_lengths(lengths)
        key = _key(lengths, key_lengths, self.key)
        pieces = cut_to_fit(key, Capacity(self.max_length), self.oversize)
        sort_key = pieces.length if self.key is None else np.minimum(key, self.max_length)[pieces.sample]
        # A sample that was not cut keeps its other fields.
        cut = (key > self.max_length)[pieces.sample]
        pieces = replace(pieces, length=np.where(cut, pieces.length, lengths[pieces.sample]))
        count = len(pieces.sample)
        entries = np.argsort(sort_key, kind="stable") if self.sort else np.arange(count, dtype=np.int64)
        runs = _runs_of(count, self.batch_size)
        return _padded(pieces, entries, runs, is_sorted=self.sort, order=self.order, seed=seed)


@dataclass(frozen=True)
class SortedWindow:
    """Strategy that sorts the samples of a window by length and cuts them into micro-batches, longest first.

    Little padding is left: about ``3 * sigma / batches`` of the tokens, where ``sigma`` is the standard deviation of
    the log lengths. The drawback is bias: a micro-batch has one length, so steps differ from each other far more than
    random ones do, and a loss that is averaged over each micro-batch gives the tokens of short samples another weight.
    Divide by the tokens of the global step, or pack (:class:`BestFit`).

    With ``batches=None`` the whole chunk is one window: smart batching, DynamiCat's ``GPUMemoryRestricted`` planner.

    No samples move from one window to the next: the rest of a sorted window is always its shortest samples, and these
    would wait until the end of the epoch.

    Args:
        capacity: what a micro-batch may hold; the strategy is meant for ``padded_tokens``.
        batches: size of a window, in full micro-batches. Windows have equal numbers of tokens. None: one window.
        max_samples: largest number of samples in a micro-batch; None: as many as fit.
        oversize: treatment of a sample that does not fit alone.
        order: order of the micro-batches in a window.

    Example:
        >>> strategy = SortedWindow(Capacity(10, "padded_tokens"), batches=None, order="none")
        >>> [part.tolist() for part in strategy.plan(np.array([5, 3, 1, 5, 2, 1, 2, 1]), seed=0)]
        [[0, 3], [1, 4, 6], [2, 5, 7]]
    """

    capacity: Capacity
    batches: int | None = 300
    max_samples: int | None = None
    oversize: Oversize = "error"
    order: PlanOrder = "random"

    def __post_init__(self) -> None:
        at_least_one("give at least 1, or None", batches=self.batches, max_samples=self.max_samples)

    def plan(self, lengths: Ints, *, seed: int = 0, key_lengths: Ints | None = None) -> MicroBatches:
        """See :class:`energon_lite.batching.strategy.Strategy`."""
        pieces = cut_to_fit(checked_lengths(lengths), self.capacity, self.oversize)
        sizes = self.capacity.sizes(pieces.length)
        edges = self._windows(sizes)
        window = np.repeat(np.arange(len(edges) - 1), np.diff(edges))
        entries = np.lexsort((-sizes, window))
        most = self.max_samples or max(len(sizes), 1)
        offsets = _cut(sizes[entries], edges.tolist(), self.capacity, most)
        late = int(np.diff(edges).max(initial=0))
        groups = window[entries[offsets[:-1]]]
        return arrange(pieces, entries, offsets, self.capacity, late, order=self.order, seed=seed, groups=groups)

    def _windows(self, sizes: Ints) -> Ints:
        """Boundaries of the windows in the stream, ascending, the first 0 and the last ``len(sizes)``."""
        inner = []
        if self.batches is not None and len(sizes):
            total, window = int(sizes.sum()), self.batches * self.capacity.limit
            count = max(1, (total + window // 2) // window)
            ends = [total * part // count for part in range(1, count)]
            inner = np.searchsorted(np.cumsum(sizes), ends, side="right").tolist()
        return np.unique(np.array([0, *inner, len(sizes)], dtype=np.int64))


def _cut(sizes: Ints, edges: list[int], capacity: Capacity, most: int) -> list[int]:
    """Boundaries of micro-batches. Sizes descend inside each window, so the first of a micro-batch is its longest."""
    if capacity.adds_up:
        sums = np.cumsum(sizes)
        fitting = np.searchsorted(sums, sums - sizes + capacity.limit, side="right") - np.arange(len(sizes))
    else:
        fitting = capacity.limit // sizes
    rows = np.clip(fitting, 1, most).tolist()  # a sample above the limit has a micro-batch of its own
    offsets = [0]
    for end in edges[1:]:
        while (place := offsets[-1]) < end:
            offsets.append(min(place + rows[place], end))
    return offsets
