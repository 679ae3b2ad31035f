"""Places of a step as ranks see them, however many ranks there are: columns.

In turn ``t``, rank ``r`` of ``w`` takes the micro-batch at place ``t * w + r`` of the step, so its share is a *column*:
the places that are ``r`` modulo ``w``. A plan that looks at the columns of all divisors of the step at once need not
be told how many ranks there will be.
"""

from __future__ import annotations

from functools import cached_property, lru_cache

import numpy as np

from energon_lite.batching.capacity import Ints

__all__ = ["UNIT", "RankColumns", "column_sums", "levels_of", "loads_of", "shares_of"]

#: The mean of a row of costs over micro-batches. Larger ones would not leave sums of products in a word.
UNIT = 1 << 16
#: Costs are taken for so many means at most.
_MOST = 64
#: Levels on which a rank has more micro-batches than this are even when the others are.
_TURNS = 64
#: How much a level may weigh; and the multiple of the square of the largest sample at which it does not weigh more.
_HEAVIEST, _ENOUGH = 1 << 9, 32


def shares_of(costs: Ints, count: int) -> Ints:
    """Rows of costs in units of which a mean micro-batch has :data:`UNIT`, without floating point.

    Args:
        costs: ``[rows, samples]``.
        count: micro-batches.

    Example:
        >>> (shares_of(np.array([[1, 3]]), count=2) / UNIT).tolist()
        [[0.5, 1.5]]
    """
    made = np.zeros(costs.shape, dtype=np.int64)
    for row, values in enumerate(costs):
        # 31 bits of a value are kept, so that the products below fit.
        kept = values >> max(0, int(values.max(initial=0)).bit_length() - 31)
        made[row] = np.minimum(kept * (UNIT * count) // max(1, int(kept.sum())), _MOST * UNIT)
    return made


def loads_of(rows: Ints, place: Ints, count: int) -> Ints:
    """What micro-batches have of some rows, ``[rows, count]``.

    Args:
        rows: of samples, ``[rows, samples]``.
        place: the micro-batch of each, -1 for none, ``[samples]``.
    """
    made = np.zeros((len(rows), count), dtype=np.int64)
    placed = np.flatnonzero(place >= 0)
    for loads, row in zip(made, rows, strict=True):
        np.add.at(loads, place[placed], row[placed])
    return made


def column_sums(loads: Ints, width: int) -> Ints:
    """What the columns of a level have, ``[rows, width]``, of what micro-batches have, ``[rows, count]``."""
    sums: Ints = loads.reshape(len(loads), -1, width).sum(axis=1)
    return sums


@lru_cache(maxsize=64)
def levels_of(count: int) -> tuple[int, ...]:
    """Numbers of columns that are evened out: the divisors of ``count``, that is, the numbers of ranks with which a
    step can go on, from itself down.

    Example:
        >>> levels_of(12)
        (12, 6, 4, 3, 2)
    """
    found = [count // turns for turns in range(1, min(count, _TURNS) + 1) if count % turns == 0]
    return tuple(width for width in found if width > 1) or (count,)


class RankColumns:
    """The columns of a step on each level, and how much each row of costs weighs there.

    Deviations of columns are squared and summed. A row weighs more the more micro-batches a column has, until its
    largest sample is small beside a column: before that, it is no use to make columns even that cannot be.

    Args:
        shares: :func:`shares_of`, ``[rows, samples]``.
        count: micro-batches.
    """

    def __init__(self, shares: Ints, count: int):
        self.count = count
        self.levels = levels_of(count)
        largest = np.minimum(shares.max(axis=1, initial=0), _MOST * UNIT) * 16 // UNIT  # in sixteenths of a mean
        enough = np.maximum(4 * _ENOUGH * largest * largest // 256, 4)
        turns = np.array([min(count // width, 8) for width in self.levels], dtype=np.int64)
        self.weights: Ints = np.minimum(np.minimum(4 * turns[:, None] ** 3, enough), _HEAVIEST)  # [levels, rows]

    @cached_property
    def near(self) -> Ints:
        """The weight of the levels on which two places share a column, by their distance; twice, one behind the other:
        ``[2 * count, rows]``."""
        distance = np.arange(self.count)
        shared = np.stack([distance % width == 0 for width in self.levels], axis=1).astype(np.int64)
        weight = shared @ self.weights
        return np.concatenate([weight, weight])

    def near_to(self, place: int) -> Ints:
        """The weight of the levels on which each place shares a column with this one, ``[count, rows]``."""
        return self.near[self.count - place : 2 * self.count - place]

    def apart(self, one: int, other: int) -> Ints:
        """The weight of the levels on which two places are in different columns, ``[rows]``."""
        apart: Ints = self.near[0] - self.near[(one - other) % self.count]
        return apart

    def pulls(self, loads: Ints) -> Ints:
        """How full the columns of each place are: the weighted sum over levels, ``[rows, count]``.

        Args:
            loads: of each micro-batch, ``[rows, count]``.
        """
        made = np.zeros_like(loads)
        for width, weight in zip(self.levels, self.weights, strict=True):
            made += np.tile(column_sums(loads, width), self.count // width) * weight[:, None]
        return made
