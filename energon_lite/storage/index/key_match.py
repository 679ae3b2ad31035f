"""Which samples of two data sets have the same key, for millions of them in seconds.

Of each key 128 bits are kept: two sums of its bytes, each times an odd number of its place. Keys are read once, in
their order, and numbers are sorted. Two keys of one data set whose first sum is the same are looked at themselves.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.tar.tar_scan import Int64

__all__ = ["SampleKeys", "match_keys"]

#: Keys that are worked on together.
_BLOCK = 1 << 16
#: Bytes of keys that nobody asked for, for each that is wanted, which are rather read than skipped.
_SPARSE = 16

UInt64 = NDArray[np.uint64]


class SampleKeys:
    """The keys of some samples of an index.

    Args:
        index: the packed index.
        samples: their numbers over all shards of the data set, in the order that counts.

    Attributes:
        sums: ``[2, n]``, what is kept of each key.
    """

    def __init__(self, index: PackedIndex, samples: Int64):
        self.index, self.samples = index, samples
        self.sums = np.zeros((2, len(samples)), dtype=np.uint64)
        for start in range(0, len(samples), _BLOCK):
            data, lengths = _bytes_of(index, samples[start : start + _BLOCK])
            filled = np.flatnonzero(lengths)
            if not len(filled):
                continue
            starts = np.cumsum(lengths) - lengths
            place = np.arange(len(data)) - np.repeat(starts, lengths)
            bytes_ = data.astype(np.uint64) + np.uint64(1)
            for row, factors in zip(self.sums, _factors(int(lengths.max())), strict=True):
                row[start + filled] = np.add.reduceat(bytes_ * factors[place], starts[filled])

    def __len__(self) -> int:
        return len(self.samples)

    def key(self, place: int) -> str:
        """One of the keys."""
        return self.index.key(int(self.samples[place]))

    def twice(self) -> list[str]:
        """Keys that are there more than once, some of them."""
        return sorted({name for name, count in Counter(map(self.key, self._alike)).items() if count > 1})

    @cached_property
    def order(self) -> Int64:
        """The places, by the first sum."""
        return np.argsort(self.sums[0], kind="stable")

    @cached_property
    def _alike(self) -> list[int]:
        """Places of keys whose first sum another one has, too; some of them."""
        ordered = self.sums[0][self.order]
        same = np.flatnonzero(ordered[1:] == ordered[:-1])[:1000]
        alike: list[int] = self.order[np.unique(np.concatenate([same, same + 1]))].tolist()
        return alike


def match_keys(wanted: SampleKeys, there: SampleKeys) -> Int64:
    """For each of the wanted keys its place among those that are there, no key of which is there twice; -1: it is not.

    Example:
        >>> match_keys(SampleKeys(images, np.arange(3)), SampleKeys(captions, np.arange(2)))
        array([ 1, -1,  0])
    """
    if not len(there):
        return np.full(len(wanted), -1, dtype=np.int64)
    if there._alike:  # sums of different keys have met
        known = {there.key(place): place for place in range(len(there))}
        return np.array([known.get(wanted.key(place), -1) for place in range(len(wanted))], dtype=np.int64)
    if wanted.sums.shape == there.sums.shape and (wanted.sums == there.sums).all():
        return np.arange(len(wanted))  # as in data sets that were made together
    at = np.empty(len(wanted), dtype=np.int64)
    at[wanted.order] = np.searchsorted(there.sums[0][there.order], wanted.sums[0][wanted.order])
    near = there.order[np.minimum(at, len(there) - 1)]
    return np.where((there.sums[:, near] == wanted.sums).all(axis=0), near, -1)


def _bytes_of(index: PackedIndex, samples: Int64) -> tuple[NDArray[np.uint8], Int64]:
    """The bytes of some keys, one after the other, and the length of each."""
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


def _factors(count: int) -> tuple[UInt64, UInt64]:
    """Two odd numbers for each place of a key, by splitmix64."""
    with np.errstate(over="ignore"):
        mixed = np.arange(1, 2 * count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    factors: UInt64 = (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)
    return factors[::2], factors[1::2]
