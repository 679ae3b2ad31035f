"""Index of samples by their keys: sorted hashes of all keys of a data set, in a file that all processes share.

It is made at the first request for a sample by its key, and kept in the user's cache under the digest of the packed
index, so copies of a data set share it. It takes 16 bytes a sample. Hashes are evenly distributed, so the place of a
hash is estimated and searched nearby. Matches are compared with the key itself, so equal hashes of different keys do
no harm.
"""

from __future__ import annotations

import logging
import os
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from energon_lite.errors import DataIndexError
from energon_lite.order.hashing import mix64_array
from energon_lite.storage.files.array_file import FileKind, write_arrays
from energon_lite.storage.files.stored_array import MemoryArray, Numbers, open_arrays, whole_or_none
from energon_lite.storage.index.index_cache import cache_folder, made_once
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.tar_members import Int64

_log = logging.getLogger(__name__)

UInt64 = NDArray[np.uint64]

#: The increment of Splitmix64.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FILE = FileKind(b"ENRGLKEY", 2, "index of keys", "remove the file; it is made again")
#: Least number of entries on either side of the estimated place that are searched.
_NEAR = 256
#: Most keys that are hashed together.
_BLOCK = 1 << 16
#: Most unwanted bytes of keys for each wanted byte, with which all are read rather than skipped.
_SPARSE = 16


class KeyIndex:
    """Numbers of samples by their keys; the file is made if it does not exist.

    Args:
        index: the packed index of the data set.

    Example:
        >>> KeyIndex(index).find("000412")
        [412]
    """

    def __init__(self, index: PackedIndex):
        self._index = index
        self._hashes, self._samples = _open(index)

    @property
    def doubled(self) -> int:
        """Number of samples whose key an earlier sample has."""
        hashes = self._hashes[:]
        return int((hashes[1:] == hashes[:-1]).sum())

    def find(self, key: str) -> list[int]:
        """Return the numbers of the samples with this key over the whole data set: usually one."""
        wanted = np.uint64(hash_key(key))
        count, near = len(self._hashes), _NEAR
        guess = int(wanted) * count >> 64
        while count:
            first, stop = max(0, guess - near), min(count, guess + near)
            block = self._hashes[first:stop]
            if (not first or block[0] < wanted) and (stop == count or block[-1] > wanted):
                low = np.searchsorted(block, wanted, "left")
                high = np.searchsorted(block, wanted, "right")
                candidates = self._samples[first + int(low) : first + int(high)].tolist()
                return sorted(sample for sample in candidates if self._index.key(sample) == key)
            near *= 4
        return []


def _open(index: PackedIndex) -> tuple[Numbers, Numbers]:
    path = os.path.join(cache_folder(), "keys", f"{index.digest}.keys")

    def make() -> None:
        hashes, samples = _sorted_hashes(index)
        write_arrays(path, _FILE, {"hashes": hashes, "samples": samples}, {})

    try:
        return made_once(path, partial(whole_or_none, _opened), make)
    except OSError as error:
        if isinstance(error, DataIndexError):
            raise
        _log.warning("%s cannot be written (%s): each process keeps the keys in memory", path, error.strerror or error)
        hashes, samples = _sorted_hashes(index)
        return hashes.view(MemoryArray), samples.view(MemoryArray)


def _opened(path: str) -> tuple[Numbers, Numbers]:
    arrays, _ = open_arrays(path, _FILE)
    try:
        return arrays["hashes"], arrays["samples"]
    except KeyError:
        raise _FILE.damaged(path, "its tables do not fit together") from None


def _sorted_hashes(index: PackedIndex) -> tuple[UInt64, Int64]:
    [hashes] = hash_keys(index, np.arange(len(index)))
    order = np.argsort(hashes, kind="stable")
    return hashes[order], order.astype(np.int64)


# -- hashes of keys --------------------------------------------------------------------------------------------------
#
# Computed for many at once: used to find a key, and to match the keys of two data sets. Equal keys have equal hashes,
# in all indexes; equal hashes have to be checked by comparing the keys.


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


def hash_key(key: str) -> int:
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
    first, last = int(starts.min()), int(ends[:, 1].max())
    if (ends[1:, 0] == ends[:-1, 1]).all():
        return index.key_bytes(first, last), lengths
    if last - first > _SPARSE * total + 4096:
        return np.concatenate([index.key_bytes(start, stop) for start, stop in ends.tolist()]), lengths
    before = np.cumsum(lengths) - lengths
    return index.key_bytes(first, last)[np.repeat(starts - first - before, lengths) + np.arange(total)], lengths


def _factors(count: int, words: int) -> UInt64:
    """Odd factors for each place of a key, ``[words, count]``."""
    seeds = np.arange(1, 2 * count + 1, dtype=np.uint64) * _GOLDEN
    factors: UInt64 = _mixed(seeds).reshape(count, 2).T[:words] | np.uint64(1)
    return np.ascontiguousarray(factors)


@lru_cache(maxsize=256)  # by length
def _first_factors(count: int) -> list[int]:
    return _factors(count, 1)[0].tolist()


def _mixed(values: UInt64) -> UInt64:
    """Splitmix64's last step: equal only for equal values, and every bit influences every bit."""
    return mix64_array(values - _GOLDEN)  # which adds it
