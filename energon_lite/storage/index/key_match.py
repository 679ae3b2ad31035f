"""Which samples of two data sets have the same key, for millions of them in seconds.

Of each key two hashes are kept. Keys are read once, in their order, and numbers are sorted. Two keys of one data set
whose first hash is the same are looked at themselves.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property

import numpy as np

from energon_lite.storage.index.key_hashes import hash_keys
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.tar.tar_scan import Int64

__all__ = ["SampleKeys", "match_keys"]


class SampleKeys:
    """The keys of some samples of an index.

    Args:
        index: the packed index.
        samples: their numbers over all shards of the data set, in the order that counts.

    Attributes:
        hashes: ``[2, n]``, what is kept of each key.
    """

    def __init__(self, index: PackedIndex, samples: Int64):
        self.index, self.samples = index, samples
        self.hashes = hash_keys(index, samples, words=2)

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
        """The places, by the first hash."""
        return np.argsort(self.hashes[0], kind="stable")

    @cached_property
    def _alike(self) -> list[int]:
        """Places of keys whose first hash another one has, too; some of them."""
        ordered = self.hashes[0][self.order]
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
    if there._alike:  # hashes of different keys have met
        known = {there.key(place): place for place in range(len(there))}
        return np.array([known.get(wanted.key(place), -1) for place in range(len(wanted))], dtype=np.int64)
    if wanted.hashes.shape == there.hashes.shape and (wanted.hashes == there.hashes).all():
        return np.arange(len(wanted))  # as in data sets that were made together
    at = np.empty(len(wanted), dtype=np.int64)
    at[wanted.order] = np.searchsorted(there.hashes[0][there.order], wanted.hashes[0][wanted.order])
    near = there.order[np.minimum(at, len(there) - 1)]
    return np.where((there.hashes[:, near] == wanted.hashes).all(axis=0), near, -1)
