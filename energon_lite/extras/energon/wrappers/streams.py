"""Numbered streams of the items of wrapped data sets: closed forms over the inner plans, in integers only.

An *item* is what one step of a loader returns to one rank: a micro-batch, or a single sample if nothing is batched. The
innermost data sets are *branches*. A stream maps each of its positions to an item of a branch; position ``pass *
per_pass + i`` is the i-th item of a pass. So a limit, a repetition and a blend are each a few lines of arithmetic, and
all their combinations can be entered at any position.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from energon_lite.errors import UsageError
from energon_lite.order.blend import Blend
from energon_lite.order.hashing import hash_ints, mix64_array
from energon_lite.order.orders import Addresses
from energon_lite.order.permutation import MAX_LENGTH, permute_array

__all__ = [
    "BlendStream",
    "ConcatStream",
    "ItemOrder",
    "ItemStream",
    "LimitStream",
    "PlanStream",
    "RepeatStream",
    "ShuffleStream",
]

Ints = NDArray[np.int64]


class ItemStream(ABC):
    """A numbered list of items.

    Attributes:
        branches: number of innermost data sets.
        per_pass: items in a pass, over all ranks together; None: the stream is endless.
    """

    branches: int
    per_pass: int | None

    @abstractmethod
    def lookup(self, positions: Ints) -> Addresses:
        """Return branch, number of the item in its pass, and pass, at positions (``[k]`` int64)."""

    def _in_passes(self, positions: Ints) -> tuple[Ints, Ints]:
        """Return the pass of each position, and its place in the pass."""
        if self.per_pass is None:
            return np.zeros_like(positions), positions
        return np.divmod(positions, self.per_pass)


class PlanStream(ItemStream):
    """Items of one data set, in the order of its plan.

    Args:
        count: items in each pass of the data set; None: it is endless.
        loop: items in each of its ``for`` loops, which continue one after the other; None: a loop is a pass.
    """

    branches = 1

    def __init__(self, count: int | None, loop: int | None = None):
        self._count = count
        self.per_pass = count if loop is None else loop

    def lookup(self, positions: Ints) -> Addresses:
        branch = np.zeros_like(positions)
        if self._count is None:
            return Addresses(branch, positions, branch)
        return Addresses(branch, positions % self._count, positions // self._count)


class RepeatStream(ItemStream):
    """A stream repeated: its passes one after the other.

    Args:
        repeats: number of passes; a fraction ends inside a pass. None: endless.
    """

    def __init__(self, inner: ItemStream, repeats: float | None = None):
        self._inner = inner
        self.branches = inner.branches
        self.per_pass = None
        self._stride = 0
        if repeats is not None and inner.per_pass is not None:
            self.per_pass = int(inner.per_pass * repeats)
            self._stride = inner.per_pass * int(np.ceil(repeats))

    def lookup(self, positions: Ints) -> Addresses:
        if self.per_pass is None:
            return self._inner.lookup(positions)
        return self._inner.lookup(positions // self.per_pass * self._stride + positions % self.per_pass)


class LimitStream(ItemStream):
    """The first items of a stream, in every pass the same ones, or the next ones.

    Args:
        length: number of items, over all ranks together.
        goes_on: each pass continues where the one before ended.
    """

    def __init__(self, inner: ItemStream, length: int, *, goes_on: bool = False):
        self._inner = inner
        self.branches = inner.branches
        self._goes_on = goes_on
        self.per_pass = self._length = length if goes_on or inner.per_pass is None else min(length, inner.per_pass)

    def lookup(self, positions: Ints) -> Addresses:
        return self._inner.lookup(positions if self._goes_on else positions % self._length)


class ConcatStream(ItemStream):
    """Streams one after the other."""

    def __init__(self, inners: Sequence[ItemStream]):
        self._inners = inners
        self.branches = sum(inner.branches for inner in inners)
        lengths = [inner.per_pass for inner in inners]
        if None in lengths[:-1]:
            raise UsageError(
                f"data set {lengths.index(None)} of a ConcatDataset never ends: those after it would never be read",
                fix="limit it (LimitDataset, or repeat=False), or mix them with BlendDataset",
            )
        self._starts = np.cumsum([0, *(length or 0 for length in lengths)])
        self.per_pass = None if lengths and lengths[-1] is None else int(self._starts[-1])

    def lookup(self, positions: Ints) -> Addresses:
        passes, inside = self._in_passes(positions)
        which = np.searchsorted(self._starts[1:-1], inside, side="right")
        lengths = np.diff(self._starts)
        if self.per_pass is None:
            lengths[-1] = 0
        return _of_each(self._inners, which, passes * lengths[which] + inside - self._starts[which])


class BlendStream(ItemStream):
    """Streams mixed by weight. Streams that end drop out, and the others continue at their shares, until all have
    ended.

    Args:
        weights: weight of each stream; only ratios count.
        key: 64-bit key of the mixing.
    """

    def __init__(self, inners: Sequence[ItemStream], weights: Sequence[float], key: int):
        self._inners = inners
        self._weights = weights
        self._key = key
        self.branches = sum(inner.branches for inner in inners)
        lengths = [inner.per_pass for inner in inners]
        self.per_pass = None if None in lengths else sum(length or 0 for length in lengths)

    @cached_property
    def _stages(self) -> list[_Stage]:
        """Parts of a pass in which the same streams are left."""
        left = {number: inner.per_pass for number, inner in enumerate(self._inners) if inner.per_pass != 0}
        stages = list[_Stage]()
        begin = 0
        shown = np.zeros(len(self._inners), dtype=np.int64)
        while left:
            numbers = np.array(sorted(left))
            blend = None
            if len(left) > 1:
                blend = Blend([self._weights[number] for number in numbers], hash_ints(self._key, len(stages)))
            stages.append(_Stage(begin, numbers, blend, shown.copy()))
            ends = [
                _first_with(blend, place, rest)
                for place, number in enumerate(numbers.tolist())
                if (rest := left[number]) is not None
            ]
            if not ends:
                break
            length = min(ends)
            counts = np.array([length]) if blend is None else blend.counts_before(length)
            shown[numbers] += counts
            begin += length
            for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
                rest = left.pop(number)
                if rest is None or rest > count:
                    left[number] = None if rest is None else rest - count
        return stages

    def lookup(self, positions: Ints) -> Addresses:
        passes, inside = self._in_passes(positions)
        begins = np.array([stage.begin for stage in self._stages])
        stage_of = np.searchsorted(begins, inside, side="right") - 1
        which = np.empty_like(positions)
        place = np.empty_like(positions)
        for number in np.unique(stage_of).tolist():
            here = stage_of == number
            which[here], place[here] = self._stages[number].lookup(inside[here])
        lengths = np.array([inner.per_pass or 0 for inner in self._inners], dtype=np.int64)
        return _of_each(self._inners, which, passes * lengths[which] + place)


class _Stage:
    """A part of a blend in which the same streams are mixed."""

    def __init__(self, begin: int, numbers: Ints, blend: Blend | None, shown: Ints):
        self.begin = begin
        self._numbers = numbers
        self._blend = blend
        self._shown = shown

    def lookup(self, positions: Ints) -> tuple[Ints, Ints]:
        """Return the stream at each position, and the position in that stream."""
        positions = positions - self.begin
        if self._blend is None:
            which = np.zeros_like(positions)
            place = positions
        else:
            which, place = self._blend.lookup(positions)
        number = self._numbers[which]
        return number, place + self._shown[number]


def _first_with(blend: Blend | None, place: int, wanted: int) -> int:
    """Return the smallest number of positions that contain ``wanted`` positions of one stream of a blend."""
    if blend is None:
        return wanted
    high = wanted
    while blend.counts_before(high)[place] < wanted:
        high *= 2
    low = 0
    while low < high:
        middle = (low + high) // 2
        if blend.counts_before(middle)[place] < wanted:
            low = middle + 1
        else:
            high = middle
    return low


class ShuffleStream(ItemStream):
    """A stream mixed within windows.

    Args:
        window: items in a window.
        key: 64-bit key of the mixing.
    """

    def __init__(self, inner: ItemStream, window: int, key: int):
        self._inner = inner
        self.branches = inner.branches
        self.per_pass = inner.per_pass
        self._window = window
        self._key = key

    def lookup(self, positions: Ints) -> Addresses:
        per_pass = self.per_pass
        passes, inside = self._in_passes(positions)
        number = inside // self._window
        start = number * self._window
        length = np.full_like(inside, self._window) if per_pass is None else np.minimum(self._window, per_pass - start)
        keys = mix64_array(
            np.uint64(self._key) ^ mix64_array(number.astype(np.uint64) ^ mix64_array(passes.astype(np.uint64)))
        )
        return self._inner.lookup(positions - inside + start + permute_array(inside - start, length, keys))


def _of_each(inners: Sequence[ItemStream], which: Ints, positions: Ints) -> Addresses:
    """Look up positions in several streams, each position in the stream given by ``which``."""
    branch, item, passes = (np.empty_like(positions) for _ in range(3))
    first = 0
    for number, inner in enumerate(inners):
        here = np.flatnonzero(which == number)
        if len(here):
            addresses = inner.lookup(positions[here])
            branch[here] = addresses.leaf + first
            item[here] = addresses.index
            passes[here] = addresses.epoch
        first += inner.branches
    return Addresses(branch, item, passes)


class ItemOrder:
    """A stream as an order for a plan; see :class:`~energon_lite.order.orders.Order`."""

    def __init__(self, stream: ItemStream):
        self.stream = stream

    def bounds(self, pass_number: int) -> tuple[int, int] | None:
        length = self.stream.per_pass
        if length is None:
            return None
        if (pass_number + 1) * length >= MAX_LENGTH:
            raise UsageError(f"pass {pass_number} of {length} items is too far", fix="use a pass that can be reached")
        return pass_number * length, (pass_number + 1) * length

    def lookup(self, positions: Ints) -> Addresses:
        return self.stream.lookup(positions)

    def epoch_ends(self, start: int, stop: int) -> list[int]:
        return []

    def cycles(self, addresses: Addresses) -> Ints:
        return addresses.epoch

    def rebased(self, rebase: object) -> ItemOrder:
        raise UsageError(
            "a wrapped data set cannot be carried over to another blend",
            fix="rebase the state of a loader of the data set inside, or start without the state",
        )
