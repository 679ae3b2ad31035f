"""Matching of samples of two data sets by their keys: millions of keys in seconds.

Two hashes of each key are kept. Keys are read once, in their order, and numbers are sorted. Keys of one data set with
the same first hash are compared as texts.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property

import numpy as np

from energon_lite.storage.index.key_index import hash_keys
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.tar.tar_scan import Int64

__all__ = ["SampleKeys", "match_keys"]


class SampleKeys:
    """The keys of some samples of an index, as hashes.

    Args:
        index: the packed index.
        samples: their numbers over all shards of the data set, in the order of the match.

    Attributes:
        hashes: ``[2, n]``, two hashes of each key.
    """

    def __init__(self, index: PackedIndex, samples: Int64):
        self.index = index
        self.samples = samples
        self.hashes = hash_keys(index, samples, words=2)

    def __len__(self) -> int:
        return len(self.samples)

    def key(self, place: int) -> str:
        """The key at a place of ``samples``."""
        return self.index.key(int(self.samples[place]))

    def twice(self) -> list[str]:
        """Keys that appear more than once; at most some of them."""
        return sorted({name for name, count in Counter(map(self.key, self._alike)).items() if count > 1})

    @cached_property
    def order(self) -> Int64:
        """The places, sorted by the first hash of their keys."""
        return np.argsort(self.hashes[0], kind="stable")

    @cached_property
    def _alike(self) -> list[int]:
        """Places of keys that share their first hash with another key; at most some of them."""
        ordered = self.hashes[0][self.order]
        same = np.flatnonzero(ordered[1:] == ordered[:-1])[:1000]
        alike: list[int] = self.order[np.unique(np.concatenate([same, same + 1]))].tolist()
        return alike


def match_keys(wanted: SampleKeys, there: SampleKeys) -> Int64:
    """Return for each wanted key its place among ``there``, whose keys are unique; -1: the key is not there.

    Example:
        >>> match_keys(SampleKeys(images, np.arange(3)), SampleKeys(captions, np.arange(2)))
        array([ 1, -1,  0])
    """
    if not len(there):
        return np.full(len(wanted), -1, dtype=np.int64)
    if there._alike:  # different keys have equal hashes
        known = {there.key(place): place for place in range(len(there))}
        return np.array([known.get(wanted.key(place), -1) for place in range(len(wanted))], dtype=np.int64)
    if wanted.hashes.shape == there.hashes.shape and (wanted.hashes == there.hashes).all():
        return np.arange(len(wanted))  # the same keys in the same order, as in data sets that were made together
    at = np.empty(len(wanted), dtype=np.int64)
    at[wanted.order] = np.searchsorted(there.hashes[0][there.order], wanted.hashes[0][wanted.order])
    near = there.order[np.minimum(at, len(there) - 1)]
    return np.where((there.hashes[:, near] == wanted.hashes).all(axis=0), near, -1)
