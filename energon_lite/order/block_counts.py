"""Counts of samples before a block, in logarithmic time, by repeated halving of the positions.

A range of positions holds a number of samples of each leaf. Its first half gets half of each leaf's samples, rounded
such that each leaf is as close to its share at the middle as the others allow (largest remainder). About fifty halvings
lead from the largest range to one block; neighbouring blocks share most of that path, which is cached. Counts are
integers and never decrease, so a leaf's samples come in order and none is left out.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from energon_lite.errors import UsageError

BLOCK_BITS = 12
#: Positions in a block.
BLOCK = 1 << BLOCK_BITS

Ints = NDArray[np.int64]

_UNUSED = np.zeros(0)
#: Largest number of cached integers of ranges on the path to a block: 16 MiB. With very many leaves only the last steps
#: of the path fit.
_KEPT = 1 << 21
#: Size, in blocks, of the range that stays cached then, as the start of the next search.
_SOME = 1 << 10
#: Integers per leaf that both halves of a range have.
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
    """Search for the counts of a block, from a known range.

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
        #: Pairs of halves on the path to the block looked up last, and the path itself: each range is half of the
        #: previous one.
        self._halves: list[tuple[CountRange, CountRange] | None] = []
        self._path = [root]

    def block(self, number: int) -> CountRange:
        """The range of one block. Halves on the path to the block looked up last are not computed again."""
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
        """Drop the first steps of the cached path; they can be computed again."""
        path = self._path
        some = next((step for step in path[1:steps] if step.stop_block - step.first_block <= _SOME), None)
        first = [path[0]] if some is None else [path[0], some]
        path[:steps], self._halves[:steps] = first, [None] * len(first)

    def _both_halves(self, range_: CountRange) -> tuple[CountRange, CountRange]:
        return _halves(range_)


def _halves(range_: CountRange) -> tuple[CountRange, CountRange]:
    """Split a range into its halves.

    The ideal count of a leaf at the middle is its part of the range's samples, minus the linearly interpolated error of
    both ends. That is ``whole + rest``, an integer and a fraction of about 1 or less. Every leaf gets the floor, and
    the leaves with the largest fractions get one more until the half is full. Clipping keeps counts from decreasing.
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
    """Adjust counts, in place, until their sum is ``length``.

    Counts of the largest lags are raised by one, or those of the smallest lowered; none leaves the range from 0 to
    ``most``. ``lag`` is adjusted, too.
    """
    while missing := length - int(counts.sum()):
        step = 1 if missing > 0 else -1
        able = counts < most if step > 0 else counts > 0
        chosen = largest(np.where(able, lag if step > 0 else -lag, -np.inf), abs(missing)) * step
        counts += chosen
        lag -= chosen


def largest(values: NDArray[np.float64], count: int) -> Ints:
    """Indicator of the ``count`` largest finite values: 1 for them, 0 elsewhere; of equal ones, the first count."""
    count = min(count, len(values))
    bound = np.partition(values, -count)[-count]
    chosen = values >= bound
    if np.count_nonzero(chosen) != count or bound == -np.inf:
        chosen = values > bound
        if bound > -np.inf:
            chosen[np.flatnonzero(values == bound)[: count - np.count_nonzero(chosen)]] = True
    return chosen.astype(np.int64)


def _portion(n: Ints, length: int, total: int) -> tuple[Ints, NDArray[np.float64]]:
    """``n * length / total`` as an integer and a fraction; exact if the halves are equal."""
    if 2 * length == total:
        return np.right_shift(n, 1), np.multiply(n & 1, 0.5, dtype=np.float64)
    if total < 1 << 31:  # then the products fit
        product = n * length
        whole = (product // total).astype(np.int64)
        return whole, (product - whole * total).astype(np.float64) / total
    ideal = n.astype(np.float64) * (length / total)
    floor = np.floor(ideal)
    return floor.astype(np.int64), ideal - floor
