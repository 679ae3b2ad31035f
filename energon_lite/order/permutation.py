"""Keyed permutations of [0, n): any element in constant time, without storage.

There are three kinds, chosen by ``n`` alone, all bijections for every key:

* ``n > 65,535``: a Feistel network of 6 rounds on a mixed radix. An index is written as ``left * b + right`` with
  ``a * b >= n`` and ``a, b`` near ``sqrt(n)``; the rounds add a keyed hash of one half to the other half, modulo its
  radix. The few of the ``a * b`` values that are not below ``n`` are skipped by cycle walking (at most one in
  ``sqrt(n)``).
* ``1,024 < n <= 65,535``: the same with 12 rounds, because a round mixes less when the halves are short.
* ``n <= 1,024``: a table, the argsort of keyed hashes, which is as uniform over all permutations as the hash is.

The scalar and the vectorised forms give equal values; below about 32 indices the scalar one is faster.

Feistel networks on arbitrary domains, with cycle walking: Black and Rogaway 2002, "Ciphers with arbitrary finite
domains". The round hash is Wellons' ``lowbias32``. ``tests/order/test_permutation.py`` measures that a round needs two
multiplications, and that three rounds are too few.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from energon_lite.order.feistel import (
    Direction,
    cycle_walk,
    cycle_walk_one,
    radices,
    radices_of_one,
    round_key,
    round_keys,
)
from energon_lite.order.hashing import MASK64, mix64, mix64_array

__all__ = ["MAX_LENGTH", "permute", "permute_array", "unpermute", "unpermute_array"]

#: The largest domain: both halves of an index then fit into 31 bits.
MAX_LENGTH = 1 << 62
#: Largest domain whose permutation is a table, of two bytes for each element.
TABLE_LENGTH = 1024
#: Elements that are processed at once, so that all intermediate arrays stay in the processor's cache.
CHUNK = 1 << 13

Ints = NDArray[np.int64]
Keys = NDArray[np.uint64]


def rounds_for(n: int) -> int:
    """Number of Feistel rounds for a domain of ``n`` elements; 0 for a table."""
    return 6 if n > 0xFFFF else 12 if n > TABLE_LENGTH else 0


def rounds_of_each(n: Ints) -> Ints:
    """Numbers of rounds for many domains, ``[k]``; see :func:`rounds_for`."""
    return np.where(n <= TABLE_LENGTH, 0, np.where(n > 0xFFFF, 6, 12))


def permute(index: int, n: int, key: int) -> int:
    """Image of ``index`` under the permutation of [0, n) that belongs to ``key``.

    Args:
        index: 0 <= index < n.
        n: size of the domain, at most 2**62.
        key: 64 bits; each key gives a different permutation.

    Example:
        >>> sorted(permute(i, 10, key=7) for i in range(10)) == list(range(10))
        True
    """
    if n <= TABLE_LENGTH:
        return int(_table(n, key)[index])
    return cycle_walk_one(index, n, _keys_of(n, key), 1)


def unpermute(index: int, n: int, key: int) -> int:
    """Invert :func:`permute`: ``unpermute(permute(i, n, key), n, key) == i``."""
    if n <= TABLE_LENGTH:
        return int(_inverse_table(n, key)[index])
    return cycle_walk_one(index, n, _keys_of(n, key), -1)


def _keys_of(n: int, key: int) -> list[int]:
    return [round_key(key, round_) for round_ in range(rounds_for(n))]


def permute_array(index: Ints, n: int | Ints, key: int | Keys) -> Ints:
    """Permute many indices at once; see :func:`permute`.

    Args:
        index: ``[k]`` int64.
        n: one size, or ``[k]`` int64: a size for each index.
        key: one key, or ``[k]`` uint64: a key for each index.

    Returns:
        ``[k]`` int64.
    """
    return _dispatch(index, n, key, 1)


def unpermute_array(index: Ints, n: int | Ints, key: int | Keys) -> Ints:
    """Invert :func:`permute_array`, with the same arguments."""
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


def _dispatch(index: Ints, n: int | Ints, key: int | Keys, direction: Direction) -> Ints:
    if isinstance(n, int):
        if n <= TABLE_LENGTH and isinstance(key, int):
            return (_table if direction == 1 else _inverse_table)(n, key)[index].astype(np.int64)
        kinds = {rounds_for(n): slice(None)}
    else:
        of = rounds_of_each(n)
        present = [kind for kind in (0, 6, 12) if (of == kind).any()]  # not np.unique, whose first call is slow
        kinds = {k: np.flatnonzero(of == k) if len(present) > 1 else slice(None) for k in present}  # type: ignore[misc]
    out = np.empty_like(index)
    for kind, where in kinds.items():
        i = index[where]
        size = n if isinstance(n, int) else n[where]
        keys = key if isinstance(key, int) else key[where]
        if kind == 0:
            sizes, keys = np.broadcast_to(size, i.shape), np.broadcast_to(np.asarray(keys, np.uint64), i.shape)
            out[where] = _look_up(i, sizes, keys, direction)
        else:
            out[where] = _cycle_walk_array(i, size, keys, kind, direction)
    return out


def _cycle_walk_array(index: Ints, n: int | Ints, key: int | Keys, rounds: int, direction: Direction) -> Ints:
    if isinstance(key, int):
        keys = [np.array(round_key(key, round_), np.uint32) for round_ in range(rounds)]
    if isinstance(n, int):
        sizes = radices_of_one(n)
    out = np.empty_like(index)
    for start in range(0, len(index), CHUNK):
        part = slice(start, start + CHUNK)
        if not isinstance(key, int):
            keys = [round_keys(key[part], round_) for round_ in range(rounds)]
        if isinstance(n, int):
            out[part] = cycle_walk(index[part], n, sizes, keys, direction)
        else:
            out[part] = cycle_walk(index[part], n[part], radices(n[part]), keys, direction)
    return out
