"""Samples by their keys: hashes of all keys of a data set, sorted, in a file that all processes share.

It is made once, when a sample is first asked for by its key, and kept in the user's cache under the digest of the
packed index, so that copies of a data set share it; 16 bytes a sample. A key is found by where its hash must be, about,
among equally distributed ones; what is found there is compared with the key itself, so equal hashes do no harm.
"""

from __future__ import annotations

import logging
import os

import numpy as np
from numpy.typing import NDArray

from energon_lite.errors import DataIndexError
from energon_lite.storage.files.array_file import FileKind, write_arrays
from energon_lite.storage.files.file_lock import only_one
from energon_lite.storage.files.stored_array import MemoryArray, Numbers, open_arrays
from energon_lite.storage.index.index_cache import cache_folder
from energon_lite.storage.index.packed_index import PackedIndex

__all__ = ["KeyIndex", "hash_keys"]

_log = logging.getLogger(__name__)

_FILE = FileKind(b"ENRGLKEY", 1, "index of keys", "remove the file; it is made again")
#: Keys that are hashed together.
_TOGETHER = 1 << 17
#: Entries on either side of where a hash should be that are looked at first.
_NEAR = 256
_BASE = 0x9E3779B97F4A7C15


class KeyIndex:
    """Numbers of samples by their keys; made, if it is not there yet.

    Args:
        index: of the data set.

    Example:
        >>> KeyIndex(index).find("000412")
        [412]
    """

    def __init__(self, index: PackedIndex):
        self._index = index
        self._hashes, self._samples = _open(index)

    def find(self, key: str) -> list[int]:
        """The samples with this key, counted over the whole data set: usually one."""
        text = key.encode("utf-8", "surrogateescape")
        data = np.frombuffer(text, np.uint8)
        wanted = hash_keys(data, np.array([0, len(text)], dtype=np.int64))[0]
        count, near = len(self._hashes), _NEAR
        guess = int(wanted) * count >> 64
        while count:
            first, stop = max(0, guess - near), min(count, guess + near)
            block = self._hashes[first:stop]
            if (not first or block[0] < wanted) and (stop == count or block[-1] > wanted):
                low, high = np.searchsorted(block, wanted, "left"), np.searchsorted(block, wanted, "right")
                found = self._samples[first + int(low) : first + int(high)].tolist()
                return sorted(sample for sample in found if self._index.key(sample) == key)
            near *= 4
        return []


def _open(index: PackedIndex) -> tuple[Numbers, Numbers]:
    path = os.path.join(cache_folder(), "keys", f"{index.digest}.keys")
    found = _found(path, len(index))
    if found is not None:
        return found
    try:
        with only_one(path):
            found = _found(path, len(index))  # another process may have made it while this one waited
            if found is None:
                hashes, samples = _sorted_hashes(index)
                write_arrays(path, _FILE, {"hashes": hashes, "samples": samples}, {})
                found = _found(path, len(index))
    except OSError as error:
        if isinstance(error, DataIndexError):
            raise
        _log.warning("%s cannot be written (%s): each process keeps the keys in memory", path, error.strerror or error)
    if found is None:
        hashes, samples = _sorted_hashes(index)
        return hashes.view(MemoryArray), samples.view(MemoryArray)
    return found


def _found(path: str, count: int) -> tuple[Numbers, Numbers] | None:
    try:
        arrays, _ = open_arrays(path, _FILE)
        hashes, samples = arrays["hashes"], arrays["samples"]
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    except (DataIndexError, KeyError) as error:
        _log.warning("%s (it will be made again)", error)
        return None
    return (hashes, samples) if len(hashes) == len(samples) == count else None


def _sorted_hashes(index: PackedIndex) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    hashes = np.empty(len(index), dtype=np.uint64)
    for first in range(0, len(index), _TOGETHER):
        stop = min(first + _TOGETHER, len(index))
        places = index.samples[first : stop + 1][:, 1]
        data = index.key_bytes(int(places[0]), int(places[-1]))
        hashes[first:stop] = hash_keys(data, places - places[0])
    order = np.argsort(hashes, kind="stable")
    return hashes[order], order.astype(np.int64)


def hash_keys(data: NDArray[np.uint8], places: NDArray[np.int64]) -> NDArray[np.uint64]:
    """64 bits for each key: a polynomial of its bytes, mixed.

    Args:
        data: the bytes of all keys, one behind the other.
        places: ``[n + 1]``, where each of them starts, and where the last one ends.
    """
    lengths = np.diff(places)
    longest = int(lengths.max(initial=0))
    powers = np.cumprod(np.full(longest + 1, _BASE, dtype=np.uint64))
    within = np.arange(len(data)) - np.repeat(places[:-1], lengths)
    terms = (data.astype(np.uint64) + np.uint64(1)) * powers[within]
    sums = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(terms, dtype=np.uint64)])
    mixed = sums[places[1:]] - sums[places[:-1]]
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    hashes: NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(31))
    return hashes
