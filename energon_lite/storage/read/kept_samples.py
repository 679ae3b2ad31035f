"""The samples that are left after an exclusion: the place of the n-th kept sample, without a list of all of them.

Two forms with the same answers. The few samples that ``split.yaml`` excludes are stored as sorted positions. Many
excluded samples, such as those that a task encoder skipped, are stored as a bit for each sample and a count for each
512 of them: 0.14 bytes for a sample, whatever the number of exclusions. Both are plain arrays, so forked processes
share their memory.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon_lite.storage.tar.members import Int64

#: Samples of one block, which has a count.
_BLOCK = 512
#: Bytes of the bits of a block.
_BYTES = _BLOCK // 8
#: Places that are looked up at once: as many blocks are unpacked.
_ROWS = 4096


class SparseExclusion:
    """The samples of a range without a few excluded ones.

    Args:
        samples: length of the range.
        left_out: ``[n]``, ascending places in the range.

    Example:
        >>> kept = SparseExclusion(10, np.array([0, 4]))
        >>> [kept.place(number) for number in range(len(kept))]
        [1, 2, 3, 5, 6, 7, 8, 9]
    """

    def __init__(self, samples: int, left_out: Int64):
        self._length = samples - len(left_out)
        # The number of excluded samples before the i-th kept one is the count of shifted places up to i.
        self._shifted = left_out.astype(np.int64) - np.arange(len(left_out), dtype=np.int64)
        self._view = memoryview(self._shifted)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return self._length

    def place(self, number: int) -> int:
        """The place within the range of the kept sample ``number``."""
        return number + bisect_right(self._view, number)

    def places(self, numbers: Int64) -> Int64:
        """:meth:`place` of many samples, ``[n]``."""
        return numbers + np.searchsorted(self._shifted, numbers, side="right")


class DenseExclusion:
    """The samples of a range whose bit is set, for exclusions of many samples.

    Args:
        samples: length of the range.
        kept: boolean arrays that together make up the range, in order.

    Attributes:
        digest: 32 hexadecimal characters that identify the exclusion.

    Example:
        >>> kept = DenseExclusion(4, [np.array([False, True]), np.array([True, False])])
        >>> len(kept), kept.place(1)
        (2, 2)
    """

    def __init__(self, samples: int, kept: Iterable[NDArray[np.bool_]]):
        blocks = -(-samples // _BLOCK)
        self._bits = np.zeros((blocks, _BYTES), dtype=np.uint8)
        flat, filled = self._bits.reshape(-1), 0
        rest: NDArray[np.bool_] = np.zeros(0, dtype=bool)  # samples that do not fill a byte yet
        for part in kept:
            part = np.concatenate([rest, part]) if len(rest) else part
            whole = len(part) // 8
            flat[filled : filled + whole] = np.packbits(part[: 8 * whole])
            filled, rest = filled + whole, part[8 * whole :]
        if len(rest):
            flat[filled] = np.packbits(rest)[0]
        assert 8 * filled + len(rest) == samples
        counts = np.empty(blocks, dtype=np.int64)
        for start in range(0, blocks, _ROWS):
            counts[start : start + _ROWS] = _ONES[self._bits[start : start + _ROWS]].sum(axis=1, dtype=np.int64)
        #: Kept samples before each block; the last entry counts all of them.
        self._before = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])
        self._view = self._before.data
        self.digest = hashlib.blake2b(flat.data, digest_size=16).hexdigest()

    def __len__(self) -> int:
        return self._view[-1]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_view"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _view=state["_before"].data)

    def place(self, number: int) -> int:
        """The place within the range of the kept sample ``number``."""
        block = bisect_right(self._view, number) - 1
        ones = np.flatnonzero(np.unpackbits(self._bits[block]))
        return block * _BLOCK + int(ones[number - self._view[block]])

    def places(self, numbers: Int64) -> Int64:
        """:meth:`place` of many samples, ``[n]``."""
        places = np.empty(len(numbers), dtype=np.int64)
        for start in range(0, len(numbers), _ROWS):
            part = numbers[start : start + _ROWS]
            rows = np.arange(len(part))
            block = np.searchsorted(self._before, part, side="right") - 1
            bits, rank = self._bits[block], part - self._before[block]
            ones = np.cumsum(_ONES[bits], axis=1, dtype=np.int16)
            byte = (ones <= rank[:, None]).sum(axis=1)
            here = bits[rows, byte]
            rank -= ones[rows, byte] - _ONES[here]  # kept samples of the block before this byte
            places[start : start + len(part)] = block * _BLOCK + 8 * byte + _SELECT[here, rank]
        return places


#: The kept samples of a range, counted from 0.
KeptSamples = SparseExclusion | DenseExclusion

_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)
#: Number of ones in each byte.
_ONES = _BITS.sum(axis=1, dtype=np.uint8)
#: Position of the n-th one in each byte.
_SELECT = np.argsort(1 - _BITS.astype(np.int8), axis=1, kind="stable")
