"""Ideal counts of samples of each leaf before a position while the shares change: integrals in fixed point.

Within a stretch of positions the share of a leaf changes linearly from ``first`` to ``last``. Its integral from the
start of the stretch to ``x`` positions further is ``first * (x - v) + last * v`` with ``v = x^2 / (2 * length)``.
Shares are integers that sum to 2**62, and ``v`` is one number for all leaves, rounded to 2**-31. So the integrals of
all leaves sum to ``x`` for any rounding of it, and the rest is multiplication of large integers in limbs of 31 bits:
exact to 2**-62 at every position below 2**62, and equal on every machine.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["FRACTION_BITS", "Ideal", "ShareIntegral", "begin"]

Ints = NDArray[np.int64]

#: Fractional bits of an :class:`Ideal`, and of a share.
FRACTION_BITS = 62
_LIMB = 31
_LIMB_MASK = (1 << _LIMB) - 1
_FRACTION_MASK = np.uint64((1 << FRACTION_BITS) - 1)


class Ideal(NamedTuple):
    """Fractional number of samples for each leaf: ``whole + fraction / 2**62``, ``[leaves]`` each."""

    whole: Ints
    fraction: NDArray[np.uint64]

    def plus(self, other: Ideal) -> Ideal:
        """The sum of two counts, leaf by leaf."""
        fraction = self.fraction + other.fraction
        carry = (fraction >> np.uint64(FRACTION_BITS)).view(np.int64)
        return Ideal(self.whole + other.whole + carry, fraction & _FRACTION_MASK)

    def total(self, which: NDArray[np.bool_]) -> int:
        """The sum over some leaves, rounded to the nearest integer."""
        halves = (self.fraction[which] >> np.uint64(_LIMB)).sum(dtype=np.uint64)  # the lower bits are negligible
        return int(self.whole[which].sum()) + ((int(halves) + (1 << (_LIMB - 1))) >> _LIMB)


def begin(leaves: int) -> Ideal:
    """Ideal counts of 0 for each leaf."""
    return Ideal(np.zeros(leaves, dtype=np.int64), np.zeros(leaves, dtype=np.uint64))


class ShareIntegral:
    """Ideal counts along one stretch of positions.

    Args:
        start: first position of the stretch.
        base: ideal counts before it.
        first: shares at its start, integers that sum to 2**62.
        last: shares at its end; None: they are constant.
        length: positions of the stretch; unused if shares are constant.

    Example:
        >>> half = 1 << 61
        >>> integral = ShareIntegral(0, begin(2), np.array([0, 2 * half]), np.array([2 * half, 0]), length=8)
        >>> integral.before(4).whole.tolist(), integral.before(8).whole.tolist()
        ([1, 3], [4, 4])
    """

    def __init__(self, start: int, base: Ideal, first: Ints, last: Ints | None, length: int):
        self.start = start
        self.length = length
        self._base = base
        self._first = first
        self._last = last

    @property
    def constant(self) -> bool:
        """True if the shares are constant."""
        return self._last is None

    def before(self, position: int) -> Ideal:
        """Ideal counts before a position of the stretch, counted from the start of the run."""
        x = position - self.start
        if self._last is None:
            return self._base.plus(_times(self._first, x << _LIMB))
        v = ((x * x << _LIMB) + self.length) // (2 * self.length)
        done = self._base.plus(_times(self._first, (x << _LIMB) - v))
        return done.plus(_times(self._last, v))

    def idle(self) -> NDArray[np.bool_]:
        """Mask of the leaves without a share anywhere in the stretch, ``[leaves]``."""
        idle: NDArray[np.bool_] = self._first == 0
        return idle if self._last is None else idle & (self._last == 0)


def _times(shares: Ints, x: int) -> Ideal:
    """``shares / 2**62 * x / 2**31``, rounded down to 2**-62. ``x`` is at most 2**93."""
    low, high = (shares & _LIMB_MASK).view(np.uint64), (shares >> _LIMB).view(np.uint64)
    x0, x1, x2 = (np.uint64(part) for part in (x & _LIMB_MASK, x >> _LIMB & _LIMB_MASK, x >> 2 * _LIMB))
    limb, mask = np.uint64(_LIMB), np.uint64(_LIMB_MASK)
    # Products of limbs are at most 2**62: two of them and a carry fit into 64 bits.
    digit = high * x0 + low * x1 + (low * x0 >> limb)
    upper = high * x1 + low * x2 + (digit >> limb)
    whole = high * x2 + (upper >> limb)
    return Ideal(whole.view(np.int64), (upper & mask) << limb | digit & mask)
