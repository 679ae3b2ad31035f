"""Capacity of a micro-batch: a limit and its unit."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from energon_lite.errors import UsageError, at_least_one

Ints = NDArray[np.int64]
Unit = Literal["padded_tokens", "packed_tokens", "cost"]
UNITS: tuple[Unit, ...] = get_args(Unit)
#: Upper bound on the tokens of a sample; its square fits into 64 bits.
_LONGEST = 1 << 31


@dataclass(frozen=True)
class AttentionCost:
    """Cost ``l + l * l // alpha``: work linear in the length, and attention, which is quadratic.

    Args:
        alpha: the length at which attention costs as much as all the rest. For a decoder that is about ``6 * hidden``
            with full attention and ``12 * hidden`` with a causal kernel.

    Example:
        >>> AttentionCost(alpha=4096)(np.array([1024, 4096])).tolist()
        [1280, 8192]
    """

    alpha: int = 24_576

    def __post_init__(self) -> None:
        at_least_one("give the length at which attention is half of the work", alpha=self.alpha)

    def __call__(self, lengths: Ints) -> Ints:
        return lengths + lengths * lengths // self.alpha


@dataclass(frozen=True)
class Capacity:
    """The most that a micro-batch may hold.

    "A capacity of 12,000 tokens" is ambiguous, and a limit that is right in one sense is an out-of-memory error in the
    other. So a capacity has a unit:

    * ``padded_tokens``: number of samples times the longest of them, padding included;
    * ``packed_tokens``: the sum of the samples' lengths, without padding;
    * ``cost``: the sum of a cost for each sample; ``l + l * l // alpha`` by default.

    Args:
        limit: tokens, or cost.
        unit: what ``limit`` counts.
        multiple: every length counts as the next multiple of this number, for collations that pad each sample to it.
        cost: for the unit ``cost``: int64 lengths ``[n]`` -> int64 costs ``[n]``, growing with the length. Integers,
            because all ranks, on any machines, must compute the same plan.

    Raises:
        UsageError: not even one token fits, or the unit is unknown.

    Example:
        >>> Capacity(10).sizes(np.array([3, 4])).tolist()
        [3, 4]
        >>> Capacity(10, multiple=8).largest_length()
        8
    """

    limit: int
    unit: Unit = "packed_tokens"
    multiple: int = 1
    cost: Callable[[Ints], Ints] = AttentionCost()

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise UsageError(f"unknown unit of capacity: {self.unit!r}", fix=f"use one of {', '.join(UNITS)}")
        at_least_one(multiple=self.multiple)
        if not hasattr(self.limit, "__index__"):
            raise UsageError(f"a capacity of {self.limit!r} {self.unit}", fix="give an integer")
        if self._size(1) > self.limit:
            raise UsageError(f"a sample of one token does not fit into a capacity of {self.limit} {self.unit}")

    @property
    def adds_up(self) -> bool:
        """True if the size of a micro-batch is the sum of its samples' sizes."""
        return self.unit != "padded_tokens"

    def sizes(self, lengths: Ints) -> Ints:
        """Size of each sample, at least 1, ``[n]``; with ``padded_tokens``, the row length that it requires."""
        lengths = np.maximum(lengths, 1)
        if self.multiple > 1:
            lengths = -(-lengths // self.multiple) * self.multiple
        if self.unit != "cost":
            return lengths
        costs = np.asarray(self.cost(lengths))
        if costs.dtype.kind not in "iu" or costs.shape != lengths.shape:
            raise UsageError(
                f"the cost function returned {costs.dtype} {list(costs.shape)} for {list(lengths.shape)} lengths",
                fix="return one integer for each length; floating point differs between machines",
            )
        return np.maximum(costs.astype(np.int64), 1)

    def largest_length(self) -> int:
        """Length in tokens of the longest sample that fits alone."""
        if self.unit != "cost":
            return self.limit // self.multiple * self.multiple
        bound = 1  # doubled, because a cost may overflow far above the limit
        while bound <= _LONGEST and self._size(bound) <= self.limit:
            bound *= 2
        longer = range(bound // 2 + 1, min(bound, _LONGEST + 1))
        return bound // 2 + bisect_right(longer, self.limit, key=self._size)

    def _size(self, length: int) -> int:
        return int(self.sizes(np.array([length], dtype=np.int64))[0])


def checked_lengths(lengths: object, name: str = "lengths") -> Ints:
    """An int64 copy or view of a one-dimensional array of lengths.

    Raises:
        UsageError: not one-dimensional, not integers, or negative.
    """
    array = np.asarray(lengths)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise UsageError(
            f"{name} are {array.dtype} {list(array.shape)}", fix="give a one-dimensional array of integers"
        )
    array = array.astype(np.int64, copy=False)
    if array.size and int(array.min()) < 0:
        place = int(np.argmax(array < 0))
        raise UsageError(f"{name}[{place}] is {int(array[place])}", fix="a length counts tokens: 0 or more")
    return array
