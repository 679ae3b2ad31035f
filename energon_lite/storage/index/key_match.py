"""Which samples of two data sets have the same key, for millions of them in seconds.

Each key gets a hash of 64 bits (a sum of its bytes, each times a number of its place), so that only numbers are sorted.
What two equal hashes say is then verified on the keys themselves. Keys whose hashes meet by chance are told apart one
by one; results do not depend on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.tar.tar_scan import Int64

__all__ = ["SampleKeys", "find_twice", "match_keys"]

#: Keys that are worked on together.
_BLOCK = 1 << 16
#: Bytes of keys that nobody asked for, for each that is wanted, which are rather read than skipped.
_SPARSE = 16

UInt64 = NDArray[np.uint64]


class SampleKeys(NamedTuple):
    """The keys of some samples of an index.

    Attributes:
        index: the packed index.
        samples: their numbers over all shards of the data set, in the order that counts.
    """

    index: PackedIndex
    samples: Int64

    def key(self, place: int) -> str:
        """One of the keys."""
        return self.index.key(int(self.samples[place]))

    def bytes_of(self, places: Int64) -> tuple[NDArray[np.uint8], Int64]:
        """The bytes of some of the keys, one after the other, and the length of each."""
        ends = self.index.key_places(self.samples[places])
        starts, lengths = ends[:, 0], ends[:, 1] - ends[:, 0]
        total = int(lengths.sum())
        if not total:
            return np.zeros(0, dtype=np.uint8), lengths
        first, last = int(starts.min()), int(ends[:, 1].max())
        if last - first == total and (ends[1:, 0] == ends[:-1, 1]).all():
            return self.index.key_bytes(first, last), lengths
        if last - first > _SPARSE * total + 4096:
            keys = [self.index.key_bytes(start, stop) for start, stop in ends.tolist()]
            return np.concatenate(keys), lengths
        return self.index.key_bytes(first, last)[_each_byte(starts - first, lengths)], lengths

    def hashes(self) -> UInt64:
        """64 bits of each key."""
        found = np.zeros(len(self.samples), dtype=np.uint64)
        for places in _blocks(len(self.samples)):
            data, lengths = self.bytes_of(places)
            filled = lengths > 0
            if not filled.any():
                continue
            starts = np.cumsum(lengths) - lengths
            place = np.arange(len(data)) - np.repeat(starts, lengths)
            terms = (data.astype(np.uint64) + np.uint64(1)) * _factors(int(lengths.max()))[place]
            found[places[filled]] = np.add.reduceat(terms, starts[filled])
        return found


def match_keys(wanted: SampleKeys, there: SampleKeys) -> Int64:
    """For each of the wanted keys its place among those that are there; -1: it is not. Of a key that is there twice, it
    is any of the places; see :func:`find_twice`.

    Example:
        >>> match_keys(SampleKeys(images, np.arange(3)), SampleKeys(captions, np.arange(2)))
        array([ 1, -1,  0])
    """
    ours, theirs = wanted.hashes(), there.hashes()
    if not len(theirs):
        return np.full(len(ours), -1, dtype=np.int64)
    if len(ours) == len(theirs) and (ours == theirs).all():  # as data sets that belong together often are
        found = np.arange(len(ours))
    else:
        order = np.argsort(theirs, kind="stable")
        at = np.searchsorted(theirs[order], ours)
        near = order[np.minimum(at, len(order) - 1)]
        found = np.where(theirs[near] == ours, near, -1)
    hit = np.flatnonzero(found >= 0)
    if _are_equal(wanted, hit, there, found[hit]):
        return found.astype(np.int64)
    return _one_by_one(wanted, there)


def find_twice(keys: SampleKeys) -> list[str]:
    """Keys that are there more than once, some of them."""
    hashes = keys.hashes()
    order = np.argsort(hashes, kind="stable")
    same = np.flatnonzero(hashes[order][1:] == hashes[order][:-1])
    names = [keys.key(place) for place in order[np.unique(np.concatenate([same, same + 1]))][:1000].tolist()]
    return sorted({name for name in names if names.count(name) > 1})


def _are_equal(one: SampleKeys, places: Int64, other: SampleKeys, others: Int64) -> bool:
    """Whether keys are the same, byte by byte."""
    for block in _blocks(len(places)):
        data, lengths = one.bytes_of(places[block])
        same, their_lengths = other.bytes_of(others[block])
        if not (np.array_equal(lengths, their_lengths) and np.array_equal(data, same)):
            return False
    return True


def _one_by_one(wanted: SampleKeys, there: SampleKeys) -> Int64:
    """:func:`match_keys` without hashes of ours."""
    known = {there.key(place): place for place in range(len(there.samples))}
    places: Sequence[int] = [known.get(wanted.key(place), -1) for place in range(len(wanted.samples))]
    return np.array(places, dtype=np.int64)


def _blocks(count: int) -> Iterator[Int64]:
    for start in range(0, count, _BLOCK):
        yield np.arange(start, min(start + _BLOCK, count))


def _each_byte(starts: Int64, lengths: Int64) -> Int64:
    """The places of all bytes of texts that begin at ``starts``."""
    before = np.cumsum(lengths) - lengths
    places: Int64 = np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))
    return places


def _factors(count: int) -> UInt64:
    """An odd number for each place of a key, by splitmix64."""
    with np.errstate(over="ignore"):
        mixed = (np.arange(1, count + 1, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    factors: UInt64 = (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)
    return factors
