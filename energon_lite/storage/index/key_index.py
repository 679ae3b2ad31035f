"""Index of samples by their keys: sorted hashes of all keys of a data set, in a file that all processes share.

It is made at the first request for a sample by its key, and kept in the user's cache under the digest of the packed
index, so copies of a data set share it. It takes 16 bytes a sample. Hashes are evenly distributed, so the place of a
hash is estimated and searched nearby. Matches are compared with the key itself, so equal hashes of different keys do
no harm.
"""

from __future__ import annotations

import logging
import os

import numpy as np

from energon_lite.errors import DataIndexError
from energon_lite.storage.files.array_file import FileKind, write_arrays
from energon_lite.storage.files.file_lock import only_one
from energon_lite.storage.files.stored_array import MemoryArray, Numbers, open_arrays, whole_or_none
from energon_lite.storage.index.index_cache import cache_folder
from energon_lite.storage.index.key_hashes import UInt64, hash_keys, hash_text
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.tar.tar_scan import Int64

__all__ = ["KeyIndex"]

_log = logging.getLogger(__name__)

_FILE = FileKind(b"ENRGLKEY", 2, "index of keys", "remove the file; it is made again")
#: Entries on either side of the estimated place that are searched first.
_NEAR = 256


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
        wanted = np.uint64(hash_text(key))
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
    arrays = whole_or_none(_opened, path)
    try:
        if arrays is None:
            with only_one(path):
                arrays = whole_or_none(_opened, path)  # another process may have made it while this one waited
                if arrays is None:
                    hashes, samples = _sorted_hashes(index)
                    write_arrays(path, _FILE, {"hashes": hashes, "samples": samples}, {})
                    arrays = _opened(path)
    except OSError as error:
        if isinstance(error, DataIndexError):
            raise
        _log.warning("%s cannot be written (%s): each process keeps the keys in memory", path, error.strerror or error)
        hashes, samples = _sorted_hashes(index)
        return hashes.view(MemoryArray), samples.view(MemoryArray)
    return arrays


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
