"""Numbered streams of the items of wrapped data sets: closed forms over the inner plans, in integers only.

An *item* is what one step of a loader returns to one rank: a micro-batch, or a single sample if nothing is batched. The
innermost data sets are *branches*. A stream maps each of its positions to an item of a branch; position ``pass *
per_pass + i`` is the i-th item of a pass. So a limit, a repetition and a blend are each a few lines of arithmetic, and
all their combinations can be entered at any position.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from energon_lite.errors import UsageError
from energon_lite.order.blend import Blend
from energon_lite.order.hashing import hash_ints, mix64_array
from energon_lite.order.orders import Addresses, position_of
from energon_lite.order.permutation import MAX_LENGTH, permute_array

Ints = NDArray[np.int64]


class ItemStream(ABC):
    """A numbered list of items, which is the order of a plan; see :class:`~energon_lite.order.orders.Order`.

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

    def bounds(self, pass_number: int) -> tuple[int, int] | None:
        length = self.per_pass
        if length is None:
            return None
        if (pass_number + 1) * length >= MAX_LENGTH:
            raise UsageError(f"pass {pass_number} of {length} items is too far", fix="use a pass that can be reached")
        return pass_number * length, (pass_number + 1) * length

    def epoch_ends(self, start: int, stop: int) -> list[int]:
        return []

    def cycles(self, addresses: Addresses) -> Ints:
        return addresses.epoch

    def rebased(self, rebase: object) -> ItemStream:
        raise UsageError(
            "a wrapped data set cannot be carried over to another blend",
            fix="rebase the state of a loader of the data set inside, or start without the state",
        )


class PlanStream(ItemStream):
    """Items of one data set, in the order of its plan.

    Args:
        count: items in each pass of the data set; None: it is endless.
    """

    branches = 1

    def __init__(self, count: int | None):
        self.per_pass = count

    def lookup(self, positions: Ints) -> Addresses:
        passes, inside = self._in_passes(positions)
        return Addresses(np.zeros_like(positions), inside, passes)


class PassStream(ItemStream):
    """A stream in passes of another length: the first items again and again, or the next items in each pass.

    Args:
        per_pass: items in a pass; None: the passes of the inner stream follow each other without end.
        stride: items of the inner stream from the start of a pass to the start of the next one.
    """

    def __init__(self, inner: ItemStream, per_pass: int | None, stride: int = 0):
        self._inner = inner
        self.branches = inner.branches
        self.per_pass = per_pass
        self._stride = stride

    def lookup(self, positions: Ints) -> Addresses:
        passes, inside = self._in_passes(positions)
        return self._inner.lookup(passes * self._stride + inside)


def limited(inner: ItemStream, length: int) -> ItemStream:
    """Return the first items of a stream, the same ones in every pass."""
    return PassStream(inner, length if inner.per_pass is None else min(length, inner.per_pass))


def repeated(inner: ItemStream, repeats: float | None = None) -> ItemStream:
    """Return the passes of a stream one after the other.

    Args:
        repeats: number of passes; a fraction ends inside a pass. None: endless.
    """
    if repeats is None or inner.per_pass is None:
        return PassStream(inner, None)
    return PassStream(inner, int(inner.per_pass * repeats), inner.per_pass * math.ceil(repeats))


class _JoinedStream(ItemStream):
    """Items of several streams."""

    def __init__(self, inners: Sequence[ItemStream]):
        self._inners = inners
        self.branches = sum(inner.branches for inner in inners)
        lengths = [inner.per_pass for inner in inners]
        self.per_pass = None if None in lengths else sum(length or 0 for length in lengths)
        self._lengths = np.array([length or 0 for length in lengths], dtype=np.int64)

    @abstractmethod
    def _divided(self, inside: Ints) -> tuple[Ints, Ints]:
        """Return the stream at each place in a pass, and the place in the pass of that stream."""

    def lookup(self, positions: Ints) -> Addresses:
        passes, inside = self._in_passes(positions)
        which, place = self._divided(inside)
        place = place + passes * self._lengths[which]
        branch, item, epoch = (np.empty_like(positions) for _ in range(3))
        first = 0
        for number, inner in enumerate(self._inners):
            here = np.flatnonzero(which == number)
            if len(here):
                addresses = inner.lookup(place[here])
                branch[here] = addresses.leaf + first
                item[here] = addresses.index
                epoch[here] = addresses.epoch
            first += inner.branches
        return Addresses(branch, item, epoch)


class ConcatStream(_JoinedStream):
    """Streams one after the other."""

    def __init__(self, inners: Sequence[ItemStream]):
        super().__init__(inners)
        endless = [number for number, inner in enumerate(inners[:-1]) if inner.per_pass is None]
        if endless:
            raise UsageError(
                f"data set {endless[0]} of a ConcatDataset never ends: those after it would never be read",
                fix="limit it (LimitDataset, or repeat=False), or mix them with BlendDataset",
            )
        self._starts = np.cumsum([0, *self._lengths[:-1]])

    def _divided(self, inside: Ints) -> tuple[Ints, Ints]:
        which = np.searchsorted(self._starts[1:], inside, side="right")
        return which, inside - self._starts[which]


class _Stage(NamedTuple):
    """A part of a pass of a blend in which the same streams are left.

    Attributes:
        begin: its first place in the pass.
        numbers: the streams.
        blend: their mixture.
        shown: items of each stream of the whole blend before it.
    """

    begin: int
    numbers: Ints
    blend: Blend
    shown: Ints


class BlendStream(_JoinedStream):
    """Streams mixed by weight. Streams that end drop out, and the others continue at their shares, until all have
    ended.

    Args:
        weights: weight of each stream; only ratios count.
        key: 64-bit key of the mixing.
    """

    def __init__(self, inners: Sequence[ItemStream], weights: Sequence[float], key: int):
        super().__init__(inners)
        self._weights = weights
        self._key = key

    @cached_property
    def _stages(self) -> list[_Stage]:
        left = {number: inner.per_pass for number, inner in enumerate(self._inners) if inner.per_pass != 0}
        stages = list[_Stage]()
        begin = 0
        shown = np.zeros(len(self._inners), dtype=np.int64)
        while left:
            blend = Blend([self._weights[number] for number in left], hash_ints(self._key, len(stages)))
            stages.append(_Stage(begin, np.array([*left]), blend, shown.copy()))
            ends = [
                1 + position_of(blend, place, rest - 1) for place, rest in enumerate(left.values()) if rest is not None
            ]
            if not ends:
                break
            length = min(ends)
            counts = blend.counts_before(length)
            shown[[*left]] += counts
            begin += length
            given = dict(zip(left, counts.tolist(), strict=True))
            left = {number: rest and rest - given[number] for number, rest in left.items() if rest != given[number]}
        return stages

    def _divided(self, inside: Ints) -> tuple[Ints, Ints]:
        begins = np.array([stage.begin for stage in self._stages])
        stage_of = np.searchsorted(begins, inside, side="right") - 1
        which = np.empty_like(inside)
        place = np.empty_like(inside)
        for number in np.unique(stage_of).tolist():
            here = stage_of == number
            stage = self._stages[number]
            mixed, place[here] = stage.blend.lookup(inside[here] - stage.begin)
            which[here] = stage.numbers[mixed]
            place[here] += stage.shown[which[here]]
        return which, place


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
