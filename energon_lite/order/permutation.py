"""Keyed permutations of [0, n): any element in constant time, without storage.

There are three kinds, chosen by ``n`` alone, all bijections for every key:

* ``n > 65,535``: a Feistel network of 6 rounds on a mixed radix. An index is written as ``left * b + right`` with
  ``a * b >= n`` and ``a, b`` near ``sqrt(n)``; the rounds add a keyed hash of one half to the other half, modulo its
  radix. The few of the ``a * b`` values that are not below ``n`` are skipped by cycle walking (at most one in
  ``sqrt(n)``).
* ``1,024 < n <= 65,535``: the same with 12 rounds, because a round mixes less when the halves are short.
* ``n <= 1,024``: a table, the argsort of keyed hashes, which is as uniform over all permutations as the hash is.

Feistel networks on arbitrary domains, with cycle walking: Black and Rogaway 2002, "Ciphers with arbitrary finite
domains". The round hash is Wellons' ``lowbias32``. ``tests/core/order/test_permutation.py`` measures that a round needs
two multiplications, and that three rounds are too few.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from energon_lite.order.hashing import MASK64, mix64, mix64_array

Ints = NDArray[np.int64]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
Direction = Literal[1, -1]

#: The largest domain: both halves of an index then fit into 31 bits.
MAX_LENGTH = 1 << 62
#: Largest domain whose permutation is a table, of two bytes for each element.
TABLE_LENGTH = 1024
#: Most elements that are processed at once, so that all intermediate arrays stay in the processor's cache.
CHUNK = 1 << 13
_GOLDEN = 0x9E3779B97F4A7C15
_HIGH = 1 if sys.byteorder == "little" else 0  # the upper half of a 64-bit word
_15 = np.array(15, np.uint32)
_16 = np.array(16, np.uint32)
_32 = np.array(32, np.uint64)
_M1 = np.array(0x7FEB352D, np.uint32)
_M2 = np.array(0x846CA68B, np.uint32)
#: Bound below which quotients of integers are exact when they are computed in floats.
_EXACT = 1 << 51


def rounds_of_each(n: Ints) -> Ints:
    """Number of Feistel rounds for each of ``k`` domains, ``[k]``; 0 for a table."""
    return np.where(n <= TABLE_LENGTH, 0, np.where(n > 0xFFFF, 6, 12))


def permute_array(index: Ints, n: int | Ints, key: int | U64) -> Ints:
    """Images of indices under the permutations of [0, n) that belong to the keys.

    Args:
        index: ``[k]`` int64, 0 <= index < n.
        n: size of the domain, at most 2**62; or ``[k]`` int64: a size for each index.
        key: 64 bits; each key gives a different permutation. Or ``[k]`` uint64: a key for each index.

    Returns:
        ``[k]`` int64.

    Example:
        >>> np.sort(permute_array(np.arange(5), 5, key=7)).tolist()
        [0, 1, 2, 3, 4]
    """
    return _dispatch(index, n, key, 1)


def unpermute_array(index: Ints, n: int | Ints, key: int | U64) -> Ints:
    """Invert :func:`permute_array`, with the same arguments."""
    return _dispatch(index, n, key, -1)


# -- tables ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)  # at most 8 MiB
def _table(n: int, key: int) -> NDArray[np.uint16]:
    hashes = mix64_array(np.uint64(mix64(key)) + np.arange(n, dtype=np.uint64))
    return np.argsort(hashes, kind="stable").astype(np.uint16)


@lru_cache(maxsize=1024)
def _inverse_table(n: int, key: int) -> NDArray[np.uint16]:
    return np.argsort(_table(n, key), kind="stable").astype(np.uint16)


def _look_up(index: Ints, n: Ints, key: U64, direction: Direction) -> Ints:
    """Table permutations for indices with their own sizes and keys: one table for each distinct pair."""
    if not len(index):
        return index.copy()
    table = _table if direction == 1 else _inverse_table
    order = np.argsort(key)
    n, key = n[order], key[order]
    starts = np.flatnonzero(np.r_[True, (n[1:] != n[:-1]) | (key[1:] != key[:-1])])
    sizes = n[starts]
    # All tables in one array, and a single look-up in it.
    tables = np.concatenate([table(*pair) for pair in zip(sizes.tolist(), key[starts].tolist(), strict=True)])
    offset = np.repeat(np.cumsum(sizes) - sizes, np.diff(np.r_[starts, len(order)]))
    out = np.empty_like(index)
    out[order] = tables.take(offset + index[order])
    return out


# -- many at once ---------------------------------------------------------------------------------------------------


def _dispatch(index: Ints, n: int | Ints, key: int | U64, direction: Direction) -> Ints:
    n = np.array([n]) if isinstance(n, int) else n
    key = np.array([key & MASK64], np.uint64) if isinstance(key, int) else key
    of = rounds_of_each(n)
    present = [kind for kind in (0, 6, 12) if (of == kind).any()]  # not np.unique, whose first call is slow
    if len(present) == 1:
        return _permuted(index, n, key, present[0], direction)
    out, key = np.empty_like(index), np.broadcast_to(key, index.shape)
    for kind in present:
        where = np.flatnonzero(of == kind)
        out[where] = _permuted(index[where], n[where], key[where], kind, direction)
    return out


def _permuted(index: Ints, n: Ints, key: U64, rounds: int, direction: Direction) -> Ints:
    if not rounds:
        return _look_up(index, np.broadcast_to(n, index.shape), np.broadcast_to(key, index.shape), direction)
    return cycle_walk(index, n, radices(n), [round_keys(key, round_) for round_ in range(rounds)], direction)


# -- Feistel networks -----------------------------------------------------------------------------------------------
#
# An index below ``n`` is written as ``left * b + right`` with ``a * b >= n``; a round adds a keyed hash of one digit to
# the other, modulo its radix. A batch has some thousand indices, so the time depends on the number of numpy calls more
# than on arithmetic: constants are zero-dimensional arrays (numpy would convert a scalar in each call), results go into
# existing buffers, and the caller computes once whatever depends only on the domain or on the key. Of a size
# or key for all indices, arrays have one entry.


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
    root -= root * root > n - 1  # the float root may be one too large, but not too small: roots of squares are exact
    a = (root + 1).astype(np.uint64)
    b = (n.astype(np.uint64) + (a - np.uint64(1))) // a
    return Radices(a, b, a.astype(np.uint32), b.astype(np.uint32))


def round_keys(keys: U64, round_: int) -> U32:
    """Keys of a round: 32 bits derived from each of ``k`` permutation keys, ``[k]``."""
    mixed = mix64_array(keys + np.uint64((round_ * _GOLDEN) & MASK64))
    return (mixed >> _32).astype(np.uint32)


def quotient(x: Ints, divisor: U64 | Ints) -> Ints:
    """``x // divisor`` for ``x >= 0``, computed in floats where these are exact (64-bit division is slow).

    The quotient of two integers up to 2**51 differs from the next integer by at least 2**-51 of itself; the error of a
    float division is at most 2**-53 of it.
    """
    if len(x) and int(x.max()) > _EXACT:
        return x // divisor.astype(np.int64)
    return (x.astype(np.float64) / divisor.astype(np.float64)).astype(np.int64)


def cycle_walk(index: Ints, n: Ints, sizes: Radices, keys: Sequence[U32], direction: Direction) -> Ints:
    """Permute each of ``index`` by its own network, repeatedly until the result is below ``n`` (cycle walking).

    Args:
        index: ``[k]``, each below its ``n``.
        n: ``[k]``, or one for all.
        sizes: the radices of ``n``.
        keys: keys of each round, ``[k]``, or one for all.
        direction: 1, or -1 for the inverse.
    """
    x = np.empty_like(index)
    columns: list[NDArray[Any]] = [*sizes, *keys]
    for start in range(0, len(index), CHUNK):
        part = slice(start, start + CHUNK)
        own = [values[part] if len(values) > 1 else values for values in columns]
        x[part] = _scramble(index[part], Radices(*own[:4]), own[4:], direction)
    where = np.flatnonzero(x >= n)
    if len(where):
        ends = np.broadcast_to(n, x.shape)[where]
        keys = [np.broadcast_to(key, x.shape)[where] for key in keys]
        x[where] = cycle_walk(x[where], ends, radices(ends), keys, direction)
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
