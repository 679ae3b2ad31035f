"""Columns: the places of a step that one rank takes, for any number of ranks.

In turn ``t``, rank ``r`` of ``w`` takes the micro-batch at place ``t * w + r`` of the step, so its share is a *column*:
the places that are ``r`` modulo ``w``. A plan that balances the columns of all divisors of the step at once does not
depend on the number of ranks.
"""

from __future__ import annotations

from functools import cached_property, lru_cache

import numpy as np

from energon_lite.batching.capacity import Ints

#: Mean of a row of costs over micro-batches, in internal units, small enough for sums of products to fit 64 bits.
UNIT = 1 << 16
#: Upper bound on a cost, in means.
_MOST = 64
#: Largest number of micro-batches of a rank for which a level is balanced explicitly; the rest follow from the others.
_TURNS = 64
#: Largest weight of a level.
_HEAVIEST = 1 << 9
#: Multiple of the squared largest sample that bounds the weight of a level.
_ENOUGH = 32


def shares_of(costs: Ints, count: int) -> Ints:
    """Costs in internal units, in which a mean micro-batch has :data:`UNIT`, without floating point.

    Args:
        costs: costs of samples, ``[rows, samples]``.
        count: number of micro-batches.

    Example:
        >>> (shares_of(np.array([[1, 3]]), count=2) / UNIT).tolist()
        [[0.5, 1.5]]
    """
    shares = np.zeros(costs.shape, dtype=np.int64)
    for row, values in enumerate(costs):
        # 31 bits of a value are kept, so that the products below fit.
        kept = values >> max(0, int(values.max(initial=0)).bit_length() - 31)
        shares[row] = np.minimum(kept * (UNIT * count) // max(1, int(kept.sum())), _MOST * UNIT)
    return shares


def loads_of(rows: Ints, place: Ints, count: int) -> Ints:
    """Sums of the samples' rows over each micro-batch, ``[rows, count]``.

    Args:
        rows: values of samples, ``[rows, samples]``.
        place: the micro-batch of each sample, -1 for none, ``[samples]``.
    """
    made = np.zeros((len(rows), count), dtype=np.int64)
    placed = np.flatnonzero(place >= 0)
    for loads, row in zip(made, rows, strict=True):
        np.add.at(loads, place[placed], row[placed])
    return made


def column_sums(loads: Ints, width: int) -> Ints:
    """Sums over the columns of a level, ``[rows, width]``, of the loads of micro-batches, ``[rows, count]``."""
    return loads.reshape(len(loads), -1, width).sum(axis=1)


@lru_cache(maxsize=64)
def levels_of(count: int) -> tuple[int, ...]:
    """Numbers of columns to balance: the divisors of ``count``, descending from ``count`` itself.

    These are the numbers of ranks on which the step can be resumed.

    Example:
        >>> levels_of(12)
        (12, 6, 4, 3, 2)
    """
    divisors = [count // turns for turns in range(1, _TURNS + 1) if count % turns == 0]
    return tuple(width for width in divisors if width > 1) or (count,)


class RankColumns:
    """Columns of a step on each level, with the weight of each row of costs.

    The objective is the weighted sum of squared deviations of columns. The weight of a row grows with the number of
    micro-batches of a column, until the row's largest sample is small relative to a column: before that, columns that
    cannot be balanced should not dominate.

    Args:
        shares: costs from :func:`shares_of`, ``[rows, samples]``.
        count: number of micro-batches.
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
        """Total weight of the levels on which two places share a column, by their distance, ``[2 * count, rows]``.

        The values are repeated twice, so that a slice gives the weights for any place.
        """
        distance = np.arange(self.count)
        shared = np.stack([distance % width == 0 for width in self.levels], axis=1).astype(np.int64)
        weight = shared @ self.weights
        return np.concatenate([weight, weight])

    def near_to(self, place: int) -> Ints:
        """Total weight of the levels on which each place shares a column with ``place``, ``[count, rows]``."""
        return self.near[self.count - place : 2 * self.count - place]

    def apart(self, one: int, other: int) -> Ints:
        """Total weight of the levels on which two places are in different columns, ``[rows]``."""
        return self.near[0] - self.near[(one - other) % self.count]

    def pulls(self, loads: Ints) -> Ints:
        """Weighted load of the columns of each place, summed over levels, ``[rows, count]``.

        Args:
            loads: costs of each micro-batch, ``[rows, count]``.
        """
        pulls = np.zeros_like(loads)
        for width, weight in zip(self.levels, self.weights, strict=True):
            pulls += np.tile(column_sums(loads, width), self.count // width) * weight[:, None]
        return pulls
