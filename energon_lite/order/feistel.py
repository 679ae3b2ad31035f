"""Feistel networks on mixed radices, for one index or many: the inner loop of every shuffle.

An index below ``n`` is written as ``left * b + right`` with ``a * b >= n``; a round adds a keyed hash of one digit to
the other, modulo its radix (see :mod:`energon_lite.order.permutation`). A batch has some thousand indices, so the time
depends on the number of numpy calls more than on arithmetic: constants are zero-dimensional arrays (numpy would convert
a scalar in each call), results go into existing buffers, and the caller computes once whatever depends only on the
domain or on the key.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import isqrt
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from energon_lite.order.hashing import MASK64, mix64, mix64_array

__all__ = [
    "Radices",
    "cycle_walk",
    "cycle_walk_one",
    "quotient",
    "radices",
    "radices_of_one",
    "round_key",
    "round_keys",
]

Ints = NDArray[np.int64]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
Direction = Literal[1, -1]

GOLDEN = 0x9E3779B97F4A7C15
_MASK32 = (1 << 32) - 1
_HIGH = 1 if sys.byteorder == "little" else 0  # the upper half of a 64-bit word
_15 = np.array(15, np.uint32)
_16 = np.array(16, np.uint32)
_32 = np.array(32, np.uint64)
_M1 = np.array(0x7FEB352D, np.uint32)
_M2 = np.array(0x846CA68B, np.uint32)
#: Bound below which quotients of integers are exact when they are computed in floats.
_EXACT = 1 << 51
#: Up to this number of indices outside of their domain, each is walked separately.
_FEW = 12

# -- one ------------------------------------------------------------------------------------------------------------


def round_key(key: int, round_: int) -> int:
    """Round key: 32 bits derived from the key of a permutation."""
    return mix64((key + round_ * GOLDEN) & MASK64) >> 32


def cycle_walk_one(index: int, n: int, keys: Sequence[int], direction: Direction) -> int:
    """Apply the network until the result is below ``n``; a repetition is needed with probability ``1 / sqrt(n)``."""
    a = isqrt(n - 1) + 1
    b = -(-n // a)
    while True:
        left, right = divmod(index, b)
        for round_ in range(len(keys))[::direction]:
            if round_ % 2 == 0:
                left = (left + direction * _below(right ^ keys[round_], a)) % a
            else:
                right = (right + direction * _below(left ^ keys[round_], b)) % b
        index = left * b + right
        if index < n:
            return index


def _below(x: int, limit: int) -> int:
    """Hash of 32 bits, reduced to [0, limit) by multiplication (Lemire 2019)."""
    x ^= x >> 16
    x = (x * 0x7FEB352D) & _MASK32
    x ^= x >> 15
    x = (x * 0x846CA68B) & _MASK32
    x ^= x >> 16
    return (x * limit) >> 32


# -- many -----------------------------------------------------------------------------------------------------------


class Radices(NamedTuple):
    """Radices of ``k`` domains, in both integer widths that the rounds need."""

    a: U64
    b: U64
    a32: U32
    b32: U32

    def take(self, which: Ints) -> Radices:
        """Radices of a selection of the domains."""
        a, b = self.a.take(which), self.b.take(which)
        return Radices(a, b, a.astype(np.uint32), b.astype(np.uint32))


def radices(n: Ints) -> Radices:
    """Radices ``a = ceil(sqrt(n))`` and ``b = ceil(n / a)`` of each ``n``."""
    root = np.sqrt((n - 1).astype(np.float64)).astype(np.int64)
    root -= root * root > n - 1  # the float root may be one too large,
    root += (root + 1) * (root + 1) <= n - 1  # or one too small
    a = (root + 1).astype(np.uint64)
    b = (n.astype(np.uint64) + (a - np.uint64(1))) // a
    return Radices(a, b, a.astype(np.uint32), b.astype(np.uint32))


def radices_of_one(n: int) -> Radices:
    """Radices of a single domain, as zero-dimensional arrays."""
    a = isqrt(n - 1) + 1
    b = -(-n // a)
    return Radices(np.array(a, np.uint64), np.array(b, np.uint64), np.array(a, np.uint32), np.array(b, np.uint32))


def round_keys(keys: U64, round_: int) -> U32:
    """Round keys of many permutation keys, ``[k]`` uint32; see :func:`round_key`."""
    mixed = mix64_array(keys + np.uint64((round_ * GOLDEN) & MASK64))
    return (mixed >> _32).astype(np.uint32)


def quotient(x: Ints, divisor: U64 | Ints) -> Ints:
    """``x // divisor`` for ``x >= 0``, computed in floats where these are exact (64-bit division is slow).

    The quotient of two integers up to 2**51 differs from the next integer by at least 2**-51 of itself; the error of a
    float division is at most 2**-53 of it.
    """
    if len(x) and int(x.max()) > _EXACT:
        return x // divisor.astype(np.int64)
    return (x.astype(np.float64) / divisor.astype(np.float64)).astype(np.int64)


def cycle_walk(index: Ints, n: int | Ints, sizes: Radices, keys: Sequence[U32], direction: Direction) -> Ints:
    """Permute each of ``index`` by its own network, with cycle walking.

    Args:
        index: ``[k]``, each below its ``n``.
        n: ``[k]``, or one integer for all.
        sizes: the radices of ``n``.
        keys: keys of each round, ``[k]`` or zero-dimensional.
        direction: 1, or -1 for the inverse.
    """
    if not len(index):
        return index.copy()
    x = _scramble(index, sizes, keys, direction)
    outside = x >= n
    if not outside.any():
        return x
    where = np.flatnonzero(outside)
    if len(where) <= _FEW:
        columns = [column if column.ndim else np.broadcast_to(column, x.shape) for column in (np.asarray(n), *keys)]
        for i in where.tolist():
            size, *own = (column.item(i) for column in columns)
            x[i] = cycle_walk_one(x.item(i), size, own, direction)
    else:
        ends = np.broadcast_to(np.asarray(n), x.shape)[where]
        x[where] = cycle_walk(
            x[where], ends, radices(ends), [np.broadcast_to(key, x.shape)[where] for key in keys], direction
        )
    return x


def _scramble(index: Ints, sizes: Radices, keys: Sequence[U32], direction: Direction) -> Ints:
    """Apply all rounds once. Results are at most ``a * b - 1``."""
    a, b, a32, b32 = sizes
    quotients = quotient(index, b).view(np.uint64)
    left = quotients.astype(np.uint32)
    right = (index.astype(np.uint64) - quotients * b).astype(np.uint32)
    hash_, shifted = np.empty_like(left), np.empty_like(left)
    wide = np.empty(len(left), dtype=np.uint64)
    high = wide.view(np.uint32)[_HIGH::2]
    for round_ in range(len(keys))[::direction]:
        # The digits swap roles after each round.
        (to, of, radix, radix32) = (left, right, a, a32) if round_ % 2 == 0 else (right, left, b, b32)
        np.bitwise_xor(of, keys[round_], out=hash_)
        _mix(hash_, shifted)
        # Reduced to [0, radix) by multiplication: the upper half of a 64-bit product.
        np.copyto(wide, hash_)
        np.multiply(wide, radix, out=wide)
        # Radices are below 2**31, so the wrong one of the two sums wraps around to a larger value.
        if direction == 1:
            np.add(to, high, out=to)
            np.subtract(to, radix32, out=hash_)
        else:
            np.subtract(to, high, out=to)
            np.add(to, radix32, out=hash_)
        np.minimum(to, hash_, out=to)
    return (left.astype(np.uint64) * b + right).view(np.int64)


def _mix(x: U32, shifted: U32) -> None:
    """Wellons' ``lowbias32``, in place."""
    np.right_shift(x, _16, out=shifted)
    np.bitwise_xor(x, shifted, out=x)
    np.multiply(x, _M1, out=x)
    np.right_shift(x, _15, out=shifted)
    np.bitwise_xor(x, shifted, out=x)
    np.multiply(x, _M2, out=x)
    np.right_shift(x, _16, out=shifted)
    np.bitwise_xor(x, shifted, out=x)
