"""Hashes of the keys of samples, computed for many at once: used to find a key, and to match the keys of two data sets.
Equal keys have equal hashes, in all indexes; equal hashes have to be checked by comparing the keys."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.tar.tar_scan import Int64

__all__ = ["UInt64", "hash_keys", "hash_text"]

UInt64 = NDArray[np.uint64]

#: Keys that are hashed together.
_BLOCK = 1 << 16
#: Unwanted bytes of keys for each wanted byte, up to which all are read rather than skipped.
_SPARSE = 16


def hash_keys(index: PackedIndex, samples: Int64, words: int = 1) -> UInt64:
    """Compute evenly spread 64-bit hashes of the keys of some samples: sums of the bytes of a key, each times an odd
    number for its place, mixed.

    Args:
        index: the packed index.
        samples: their numbers over all shards of the data set, ``[n]``.
        words: number of independent hashes of a key: 1 or 2.

    Returns:
        ``[words, n]``.
    """
    hashes = np.zeros((words, len(samples)), dtype=np.uint64)
    for start in range(0, len(samples), _BLOCK):
        hashes[:, start : start + _BLOCK] = _hashes(*_bytes_of(index, samples[start : start + _BLOCK]), words)
    return hashes


def hash_text(key: str) -> int:
    """The first hash of one key, as a number of 64 bits."""
    data = key.encode("utf-8", "surrogateescape")
    total = sum((byte + 1) * factor for byte, factor in zip(data, _first_factors(len(data)), strict=True))
    return int(_mixed(np.array([total & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64))[0])


def _hashes(data: NDArray[np.uint8], lengths: Int64, words: int) -> UInt64:
    """Hashes of keys whose bytes follow each other, ``[words, n]``."""
    sums = np.zeros((words, len(lengths)), dtype=np.uint64)
    filled = np.flatnonzero(lengths)
    if len(filled):
        starts = np.cumsum(lengths) - lengths
        place = np.arange(len(data)) - np.repeat(starts, lengths)
        bytes_ = data.astype(np.uint64) + np.uint64(1)
        for row, factors in zip(sums, _factors(int(lengths.max()), words), strict=True):
            row[filled] = np.add.reduceat(bytes_ * factors[place], starts[filled])
    return _mixed(sums)


def _bytes_of(index: PackedIndex, samples: Int64) -> tuple[NDArray[np.uint8], Int64]:
    """The bytes of some keys, one after the other, and the length of each key in bytes."""
    ends = index.key_places(samples)
    starts, lengths = ends[:, 0], ends[:, 1] - ends[:, 0]
    total = int(lengths.sum())
    if not total:
        return np.zeros(0, dtype=np.uint8), lengths
    first, last = int(starts.min()), int(ends[:, 1].max())
    if (ends[1:, 0] == ends[:-1, 1]).all():
        return index.key_bytes(first, last), lengths
    if last - first > _SPARSE * total + 4096:
        return np.concatenate([index.key_bytes(start, stop) for start, stop in ends.tolist()]), lengths
    before = np.cumsum(lengths) - lengths
    return index.key_bytes(first, last)[np.repeat(starts - first - before, lengths) + np.arange(total)], lengths


def _factors(count: int, words: int) -> UInt64:
    """Odd factors for each place of a key, ``[words, count]``."""
    seeds = np.arange(1, 2 * count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    factors: UInt64 = _mixed(seeds).reshape(count, 2).T[:words] | np.uint64(1)
    return np.ascontiguousarray(factors)


@lru_cache(maxsize=256)  # by length
def _first_factors(count: int) -> list[int]:
    return _factors(count, 1)[0].tolist() if count else []


def _mixed(values: UInt64) -> UInt64:
    """Splitmix64's last step: equal only for equal values, and every bit influences every bit."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        values = (values ^ (values >> np.uint64(shift))) * np.uint64(factor)
    mixed: UInt64 = values ^ (values >> np.uint64(31))
    return mixed
