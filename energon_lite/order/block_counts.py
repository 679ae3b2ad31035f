"""Sharing positions out by halving: how many samples of each leaf stand before any block, in logarithmic time.

A range of positions holds so many samples of each leaf. Its first half gets half of each leaf's samples, rounded so
that each leaf is as near to its share at the middle as the others allow (largest remainder). Some fifty halvings lead
from the largest range to one block; neighbouring blocks share most of the way, which is kept. Counts are integers and
never run backwards, so a leaf's samples come in order and none is left out.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from energon_lite.errors import UsageError

__all__ = ["BLOCK", "BLOCK_BITS", "BlockCounts", "CountRange", "fill"]

BLOCK_BITS = 12
#: Positions in a block.
BLOCK = 1 << BLOCK_BITS

Ints = NDArray[np.int64]

_UNUSED = np.zeros(0)
#: Numbers that are kept of ranges on the way to a block: 16 MiB. Of very many leaves only the last steps of it fit,
#: and the range of about so many blocks, from which the others are found again.
_KEPT, _SOME = 1 << 21, 1 << 10
#: Both halves of a range have so many numbers of each leaf.
_OF_HALVES = 4


class CountRange(NamedTuple):
    """A range of positions, from one block's start to another's."""

    first_block: int
    stop_block: int
    length: int  # positions; the last block of all may be shorter than the others
    before: Ints  # samples of each leaf before the range
    inside: Ints  # samples of each leaf inside it
    error_start: NDArray[np.float64] = _UNUSED  # before - share * position, at the range's start
    error_stop: NDArray[np.float64] = _UNUSED  # the same at its end


class BlockCounts:
    """The way from a range that is known to each of its blocks.

    Args:
        counts: samples of each leaf in the whole range, ``[leaves]`` int64.

    Example:
        >>> counts = BlockCounts(np.array([3 * BLOCK, BLOCK]))
        >>> counts.block(1).before.tolist()
        [3072, 1024]
    """

    def __init__(self, counts: Ints):
        length = int(counts.sum())
        zeros = np.zeros(len(counts))
        self._begin(CountRange(0, -(-length // BLOCK), length, np.zeros_like(counts), counts, zeros, zeros))

    def _begin(self, root: CountRange) -> None:
        #: Ranges around the block asked for last, each half of the one before; and both halves of each.
        self._halves: list[tuple[CountRange, CountRange] | None] = []
        self._path = [root]

    def block(self, number: int) -> CountRange:
        """The range that is just this block. Halves on the way to the block asked for last are not computed again."""
        if not 0 <= number < self._path[0].stop_block:
            raise UsageError(
                f"block {number} of {self._path[0].stop_block}: the order ends before this position",
                fix="look at where the position comes from",
            )
        path, halves = self._path, self._halves
        while not path[-1].first_block <= number < path[-1].stop_block:
            path.pop()
        del halves[len(path) :]
        most = max(4, _KEPT // (_OF_HALVES * max(1, len(path[0].inside))))
        while path[-1].stop_block - path[-1].first_block > 1:
            both = halves.pop() if len(halves) == len(path) else None
            left, right = both = both or self._both_halves(path[-1])
            halves.append(both)
            path.append(left if number < left.stop_block else right)
            if len(path) > most + 2:
                self._forget(len(path) - most)
        return path[-1]

    def _forget(self, steps: int) -> None:
        """Let the first steps of the way go; they can be gone again."""
        path = self._path
        some = next((one for one in path[1:steps] if one.stop_block - one.first_block <= _SOME), None)
        first = [path[0]] if some is None else [path[0], some]
        path[:steps], self._halves[:steps] = first, [None] * len(first)

    def _both_halves(self, range_: CountRange) -> tuple[CountRange, CountRange]:
        return _halves(range_)


def _halves(range_: CountRange) -> tuple[CountRange, CountRange]:
    """Both halves of a range.

    Where a leaf should be at the middle is its part of the range's samples, less the error that the straight line
    between both ends has there. That is ``whole + rest``, an integer and a fraction below 1 or so. Everyone gets the
    floor, and those with the largest fractions get one more until the half is full. Clipping keeps counts from running
    backwards.
    """
    middle = (range_.first_block + range_.stop_block) // 2
    length = (middle - range_.first_block) * BLOCK
    n = range_.inside
    whole, part = _portion(n, length, range_.length)
    share = length / range_.length
    rest = part - (range_.error_start * (1.0 - share) + range_.error_stop * share)
    left = whole + np.floor(rest).astype(np.int64)
    np.minimum(np.maximum(left, 0, out=left), n, out=left)
    lag = (whole - left) + rest
    fill(left, lag, n, length)
    np.negative(lag, out=lag)
    return (
        CountRange(range_.first_block, middle, length, range_.before, left, range_.error_start, lag),
        CountRange(
            middle,
            range_.stop_block,
            range_.length - length,
            range_.before + left,
            n - left,
            lag,
            range_.error_stop,
        ),
    )


def fill(counts: Ints, lag: NDArray[np.float64], most: Ints, length: int) -> None:
    """Give one more (or less) to those that lag most (or least) until the sum is ``length``, none less than zero or
    more than ``most``; both arrays are changed."""
    while missing := length - int(counts.sum()):
        step = 1 if missing > 0 else -1
        able = counts < most if step > 0 else counts > 0
        chosen = largest(np.where(able, lag if step > 0 else -lag, -np.inf), abs(missing)) * step
        counts += chosen
        lag -= chosen


def largest(values: NDArray[np.float64], count: int) -> Ints:
    """1 at the ``count`` largest values but minus infinity, 0 elsewhere; of equal ones, the first are taken."""
    count = min(count, len(values))
    bound = np.partition(values, -count)[-count]
    chosen = values >= bound
    if np.count_nonzero(chosen) != count or bound == -np.inf:
        chosen = values > bound
        if bound > -np.inf:
            chosen[np.flatnonzero(values == bound)[: count - np.count_nonzero(chosen)]] = True
    return chosen.astype(np.int64)


def _portion(n: Ints, length: int, total: int) -> tuple[Ints, NDArray[np.float64]]:
    """``n * length / total`` as an integer and a fraction; exact where the halves are equal."""
    if 2 * length == total:
        return np.right_shift(n, 1), np.multiply(n & 1, 0.5, dtype=np.float64)
    if total < 1 << 31:  # then the products fit
        product = n * length
        whole = (product // total).astype(np.int64)
        return whole, (product - whole * total).astype(np.float64) / total
    ideal = n.astype(np.float64) * (length / total)
    floor = np.floor(ideal)
    return floor.astype(np.int64), ideal - floor
