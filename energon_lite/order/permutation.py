"""Keyed permutations of [0, n): any element in constant time, nothing stored.

Three kinds, chosen by ``n`` alone, all bijections for every key:

* ``n > 65,535``: a Feistel network of 6 rounds on a mixed radix. An index is written as ``left * b + right`` with
  ``a * b >= n`` and ``a, b`` near ``sqrt(n)``; the rounds add a keyed hash of one half to the other half, modulo its
  radix. The few values of ``a * b`` that are not below ``n`` are walked over (at most one in ``sqrt(n)``).
* ``1,024 < n <= 65,535``: the same with 12 rounds, because a round mixes less when the halves are short.
* ``n <= 1,024``: a table, the argsort of keyed hashes, which is uniform over all permutations as far as the hash is.

The scalar and the vectorised forms give equal values; below some 32 indices the scalar one is faster.

Feistel networks on arbitrary domains, with cycle walking: Black and Rogaway 2002, "Ciphers with arbitrary finite
domains". The round hash is Wellons' ``lowbias32``. That two multiplications a round are needed, and that three rounds
are too few, is measured in ``tests/order/test_permutation.py``.
"""

from __future__ import annotations

from functools import lru_cache
from math import isqrt
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from energon_lite.order.hashing import MASK64, mix64, mix64_array

__all__ = ["MAX_LENGTH", "permute", "permute_array", "unpermute", "unpermute_array"]

#: The largest domain: both halves of an index then fit into 31 bits.
MAX_LENGTH = 1 << 62
#: Up to here a permutation is a table of two bytes an element.
TABLE_LENGTH = 1024
#: Elements worked on at once, so that all intermediate arrays stay in the processor's cache.
_CHUNK = 1 << 14
_MASK32 = (1 << 32) - 1
_GOLDEN = 0x9E3779B97F4A7C15

Ints = NDArray[np.int64]
Keys = NDArray[np.uint64]
Direction = Literal[1, -1]


def rounds_for(n: int) -> int:
    """Number of Feistel rounds used for a domain of ``n`` elements."""
    return 6 if n > 0xFFFF else 12


def permute(index: int, n: int, key: int) -> int:
    """The place of ``index`` in the permutation of [0, n) that belongs to ``key``.

    Args:
        index: 0 <= index < n.
        n: size of the domain, at most 2**62.
        key: 64 bits; each key gives another permutation.

    Example:
        >>> sorted(permute(i, 10, key=7) for i in range(10)) == list(range(10))
        True
    """
    if n <= TABLE_LENGTH:
        return int(_table(n, key)[index])
    return _walk(index, n, key, 1)


def unpermute(index: int, n: int, key: int) -> int:
    """Inverse of :func:`permute`: ``unpermute(permute(i, n, key), n, key) == i``."""
    if n <= TABLE_LENGTH:
        return int(_inverse_table(n, key)[index])
    return _walk(index, n, key, -1)


def permute_array(index: Ints, n: int | Ints, key: int | Keys) -> Ints:
    """:func:`permute` of many indices at once.

    Args:
        index: ``[k]`` int64.
        n: one size, or ``[k]`` int64: a size for each index.
        key: one key, or ``[k]`` uint64: a key for each index.

    Returns:
        ``[k]`` int64.
    """
    return _dispatch(index, n, key, 1)


def unpermute_array(index: Ints, n: int | Ints, key: int | Keys) -> Ints:
    """:func:`unpermute` of many indices at once; arguments as for :func:`permute_array`."""
    return _dispatch(index, n, key, -1)


# -- tables ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)  # at most 8 MiB
def _table(n: int, key: int) -> NDArray[np.uint16]:
    hashes = mix64_array(np.uint64(mix64(key & MASK64)) + np.arange(n, dtype=np.uint64))
    return np.argsort(hashes, kind="stable").astype(np.uint16)


@lru_cache(maxsize=1024)
def _inverse_table(n: int, key: int) -> NDArray[np.uint16]:
    return np.argsort(_table(n, key), kind="stable").astype(np.uint16)


def _look_up(index: Ints, n: Ints, key: Keys, direction: Direction) -> Ints:
    """Table permutations where each index may have its own size and key: one look-up for each different pair."""
    table = _table if direction == 1 else _inverse_table
    out = np.empty_like(index)
    order = np.lexsort((n, key))
    n, key = n[order], key[order]
    starts = np.flatnonzero(np.r_[True, (n[1:] != n[:-1]) | (key[1:] != key[:-1])])
    for start, stop in zip(starts, np.r_[starts[1:], len(order)], strict=True):
        places = order[start:stop]
        out[places] = table(int(n[start]), int(key[start]))[index[places]]
    return out


# -- Feistel, scalar ------------------------------------------------------------------------------------------------


def _walk(index: int, n: int, key: int, direction: Direction) -> int:
    a = isqrt(n - 1) + 1
    b = -(-n // a)
    keys = [mix64((key + round_ * _GOLDEN) & MASK64) >> 32 for round_ in range(rounds_for(n))]
    while True:
        index = _feistel(index, a, b, keys, direction)
        if index < n:
            return index


def _feistel(index: int, a: int, b: int, keys: list[int], direction: Direction) -> int:
    left, right = divmod(index, b)
    for round_ in range(len(keys))[::direction]:
        if round_ % 2 == 0:
            left = (left + direction * _below(right ^ keys[round_], a)) % a
        else:
            right = (right + direction * _below(left ^ keys[round_], b)) % b
    return left * b + right


def _below(x: int, limit: int) -> int:
    """A hash of 32 bits, reduced to [0, limit) by multiplication (Lemire 2019)."""
    x ^= x >> 16
    x = (x * 0x7FEB352D) & _MASK32
    x ^= x >> 15
    x = (x * 0x846CA68B) & _MASK32
    x ^= x >> 16
    return (x * limit) >> 32


# -- Feistel, vectorised --------------------------------------------------------------------------------------------


def _dispatch(index: Ints, n: int | Ints, key: int | Keys, direction: Direction) -> Ints:
    if isinstance(n, int):
        if n <= TABLE_LENGTH and isinstance(key, int):
            return (_table if direction == 1 else _inverse_table)(n, key)[index].astype(np.int64)
        kind = 0 if n <= TABLE_LENGTH else rounds_for(n)
        kinds = {kind: slice(None)}
    else:
        of = np.where(n <= TABLE_LENGTH, 0, np.where(n > 0xFFFF, 6, 12))
        found = np.unique(of)
        kinds = {int(k): np.flatnonzero(of == k) if len(found) > 1 else slice(None) for k in found}  # type: ignore[misc]
    out = np.empty_like(index)
    for kind, where in kinds.items():
        i = index[where]
        size = n if isinstance(n, int) else n[where]
        keys = key if isinstance(key, int) else key[where]
        if kind == 0:
            out[where] = _look_up(i, _as_array(size, i), _as_keys(keys, i), direction)
        else:
            out[where] = _walk_array(i, size, keys, kind, direction)
    return out


def _as_array(value: int | Ints, like: Ints) -> Ints:
    return np.full(len(like), value, dtype=np.int64) if isinstance(value, int) else value


def _as_keys(value: int | Keys, like: Ints) -> Keys:
    return np.full(len(like), value, dtype=np.uint64) if isinstance(value, int) else value


def _walk_array(index: Ints, n: int | Ints, key: int | Keys, rounds: int, direction: Direction) -> Ints:
    out = np.empty_like(index)
    for start in range(0, len(index), _CHUNK):
        part = slice(start, start + _CHUNK)
        size = n if isinstance(n, int) else n[part]
        keys = key if isinstance(key, int) else key[part]
        x = _feistel_array(index[part], size, keys, rounds, direction)
        while (outside := np.flatnonzero(x >= size)).size:
            s = size if isinstance(size, int) else size[outside]
            k = keys if isinstance(keys, int) else keys[outside]
            x[outside] = _feistel_array(x[outside], s, k, rounds, direction)
        out[part] = x
    return out


def _feistel_array(index: Ints, n: int | Ints, key: int | Keys, rounds: int, direction: Direction) -> Ints:
    a = np.uint64(isqrt(n - 1) + 1) if isinstance(n, int) else _ceil_sqrt(n)
    b = np.uint64(-(-n // int(a))) if isinstance(n, int) else (n.astype(np.uint64) + (a - np.uint64(1))) // a
    x = index.astype(np.uint64)
    left = x // b
    right = (x - left * b).astype(np.uint32)
    left = left.astype(np.uint32)
    a32, b32 = a.astype(np.uint32), b.astype(np.uint32)
    for round_ in range(rounds)[::direction]:
        k = _round_key(key, round_)
        if round_ % 2 == 0:
            left = _add(left, _below_array(right ^ k, a), a32, direction)
        else:
            right = _add(right, _below_array(left ^ k, b), b32, direction)
    return (left.astype(np.uint64) * b + right).astype(np.int64)


def _ceil_sqrt(n: Ints) -> NDArray[np.uint64]:
    root = np.sqrt((n - 1).astype(np.float64)).astype(np.int64)
    root -= root * root > n - 1  # the float root may be one too large,
    root += (root + 1) * (root + 1) <= n - 1  # or one too small
    return (root + 1).astype(np.uint64)


def _round_key(key: int | Keys, round_: int) -> np.uint32 | NDArray[np.uint32]:
    if isinstance(key, int):
        return np.uint32(mix64((key + round_ * _GOLDEN) & MASK64) >> 32)
    return (mix64_array(key + np.uint64((round_ * _GOLDEN) & MASK64)) >> np.uint64(32)).astype(np.uint32)


def _below_array(x: NDArray[np.uint32], limit: np.uint64 | NDArray[np.uint64]) -> NDArray[np.uint32]:
    x = x ^ (x >> np.uint32(16))
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    return ((x * limit) >> np.uint64(32)).astype(np.uint32)


def _add(
    x: NDArray[np.uint32], y: NDArray[np.uint32], limit: np.uint32 | NDArray[np.uint32], direction: Direction
) -> NDArray[np.uint32]:
    """(x + y) mod limit, or (x - y) mod limit. Limits are below 2**31, so the wrong branch wraps to a larger value."""
    if direction == 1:
        total = x + y
        return np.minimum(total, total - limit)
    total = x - y
    return np.minimum(total, total + limit)
