"""Large array files (the packed index and columns), read and verified block by block.

A block is read at the first request for one of its bytes, verified, and kept. So the time for opening does not depend
on the size; a flipped bit, or a file that was cut off, raises an error and never gives another number.

Verified blocks are kept in one of three ways. A file of one block is read when it is opened. Files of up to 64 MiB
together have memory of their full length, which is allocated as blocks come in, and which forked workers share: a block
is read once, and stays right whatever happens to its file. All others share 4 MiB in each process, where the oldest
block is dropped. So memory is bounded, too. A random look-up takes a fraction of a microsecond in files that fit, and
about five in others, whose blocks are read repeatedly.

Blocks are read instead of mapped. Touching a mapped file after it was cut short ends the process; the system may drop
a page and read it again unverified; and a touched page loads its neighbours, so a few thousand look-ups would make
gigabytes appear in the memory of each worker.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, TypeVar
from weakref import WeakValueDictionary, finalize

import numpy as np
from numpy.typing import NDArray

from energon_lite.errors import DataIndexError, DatasetError, FatalStorageError, ShardChangedError
from energon_lite.storage.files.array_file import ALIGN, BLOCK, FileKind, Head, read_head
from energon_lite.storage.files.byte_ranges import open_file
from energon_lite.storage.files.retries import retry_on_exhaustion
from energon_lite.storage.files.shard_store import ShardIdentity, drop_oldest, head_checksum, shared_store

_log = logging.getLogger(__name__)

T = TypeVar("T")

#: log2 of the bytes of a block.
_SHIFT = BLOCK.bit_length() - 1
#: Most blocks in memory shared by forked processes, of all files together: 64 MiB.
_KEPT = 8192
#: Share of that, 1/16 or 4 MiB, that each process keeps for files without shared memory.
_OWN = 16
#: Least share of wanted rows, 1/4, with which rows are read together with their gaps.
_DENSE = 4

Int64 = NDArray[np.int64]

#: Blocks by number of the file and of the block in it; the oldest comes first.
_kept: dict[int, bytes] = {}
_numbers = count()
#: Memory shared by forked processes, by path and identity of the file.
_shared: WeakValueDictionary[tuple[Any, ...], mmap.mmap] = WeakValueDictionary()
#: Bytes of each piece of shared memory, by its number; there are some thousand pieces at most.
_taken: dict[int, int] = {}


class MemoryArray(np.ndarray):
    """A numpy array with the look-ups of a stored array."""

    def stretches(self, first: Int64, count: int) -> NDArray[Any]:
        return self.take(first[:, None] + np.arange(count), 0)

    def raw(self, start: int, stop: int) -> bytes:
        return self[start:stop].tobytes()

    def raw_each(self, places: Int64) -> list[bytes]:
        return [self.raw(start, stop) for start, stop in places.tolist()]


def open_arrays(path: str, kind: FileKind) -> tuple[dict[str, StoredArray], Any]:
    """Open the arrays of a file, which are read on demand; return them with the stored plain data.

    Raises:
        DataIndexError: it is damaged (the body is verified later), incomplete, or of another kind or version.
        FileNotFoundError: there is no such file.

    Example:
        >>> arrays, meta = open_arrays("a.idx", KIND)
        >>> arrays["values"][2:4], meta
        (array([2, 3]), {'name': 'a'})
    """
    with retry_on_exhaustion(lambda: open(path, "rb", opener=open_file), path) as file:
        head = read_head(file, path, kind)
        file.seek(0)
        body = FileBody(head, file.read(head.end) if head.end <= BLOCK else None)
    return {name: StoredArray(body, *place) for name, place in head.places.items()}, head.meta


def whole_or_none(open_file: Callable[[str], T], path: str) -> T | None:
    """Return the contents of a file that can be made again; None if it is missing, or damaged (which is logged).

    Args:
        open_file: opens the file; raises as :func:`open_arrays`.
        path: the file.
    """
    try:
        return open_file(path)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    except DataIndexError as error:
        _log.warning("%s (it will be made again)", error)
        return None


class FileBody:
    """The bytes of an array file, read and verified block by block. It holds no descriptor of its own: it uses the
    shared store.

    Args:
        head: header and table of the file.
        whole: the file up to the end of its body, if that is one block.

    Attributes:
        memory: as long as the body, shared by forked processes; None: the file is too large. It holds verified blocks,
            and zeros elsewhere.
    """

    def __init__(self, head: Head, whole: bytes | None = None):
        self.head = head
        self._end = head.end
        self._store = shared_store()
        self._shard = os.path.abspath(head.path), ShardIdentity(head.size, head_checksum(head.start))
        self._first = next(_numbers) << 40
        #: For each block 1 if this process knows that it is in the shared memory.
        self._there = bytearray(len(head.checksums))
        self.memory: mmap.mmap | bytes | None = None
        if whole is not None:
            with suppress(DataIndexError):  # raised again when the damaged block is read
                head.check(whole, 0)
                self.memory = whole
                self._there = bytearray(b"\1")
        if self.memory is None:
            self.memory = _shared.get(self._shard) or self._shared_memory()

    def _shared_memory(self) -> mmap.mmap | None:
        """Allocate shared memory of the body's length; None: the limit is reached."""
        size = self.head.end
        if size > (_KEPT << _SHIFT) - sum(_taken.copy().values()):
            return None
        try:
            memory = _shared[self._shard] = mmap.mmap(-1, size)
        except OSError:  # read it like a larger file
            return None
        number = next(_numbers)
        _taken[number] = size
        finalize(memory, _taken.pop, number).atexit = False
        return memory

    def read(self, offset: int, size: int) -> bytes:
        """Return ``size`` bytes at ``offset`` of the file, within its body.

        Raises:
            DataIndexError: they are damaged, or do not exist.
        """
        if offset < ALIGN or size <= 0 or offset + size > self._end:
            self.check_range(offset, size)
            return b""
        first, last = offset >> _SHIFT, (offset + size - 1) >> _SHIFT
        if self.memory is not None and last - first <= 1:
            there = self._there
            if not (there[first] and there[last]):
                self._share((first, last))
            return self.memory[offset : offset + size]
        if first == last:
            data = _kept.get(self._first + first) or self._keep(first)
        else:
            data = self._fetch(first, last + 1)
        start = offset - (first << _SHIFT)
        return data[start : start + size]

    def read_each(self, offsets: Int64, sizes: Int64) -> list[bytes]:
        """:meth:`read` for each of these offsets and sizes, ``[n]``."""
        if self.memory is None or not len(sizes) or sizes.max() > BLOCK or sizes.min() < 0:
            return [self.read(offset, size) for offset, size in zip(offsets.tolist(), sizes.tolist(), strict=True)]
        memory, stops = self.memory, offsets + sizes
        self.have(offsets, stops)
        return [memory[start:stop] for start, stop in zip(offsets.tolist(), stops.tolist(), strict=True)]

    def have(self, starts: Int64, stops: Int64) -> None:
        """Load the bytes between these offsets into :attr:`memory`; each stretch has at most the bytes of a block.

        Raises:
            DataIndexError: they are damaged, or do not exist.
        """
        self.check_range(int(starts.min()), int(stops.max() - starts.min()))
        blocks = np.concatenate([starts, stops - 1]) >> _SHIFT
        there = np.frombuffer(self._there, dtype=bool)[blocks]
        if not there.all():
            self._share(np.unique(blocks[~there]).tolist())

    def check_range(self, offset: int, size: int) -> None:
        """Check that the body has ``size`` bytes at ``offset``.

        Raises:
            DataIndexError: it does not.
        """
        if not (offset >= ALIGN and size >= 0 and offset + size <= self._end):
            raise self.head.kind.damaged(self.head.path, f"there are no {size} bytes at byte {offset}")

    def _share(self, blocks: Iterable[int]) -> None:
        """Load blocks into shared memory. Only verified bytes are written there, so processes that do it at the same
        time write the same bytes."""
        assert self.memory is not None
        view = memoryview(self.memory)  # read-only for a file of one block, which is complete
        for block in blocks:
            if not self._there[block]:
                start = block << _SHIFT
                here = view[max(start, ALIGN) : start + BLOCK]
                # Read it unless another process has done so.
                if not any(here[:ALIGN]) or zlib.crc32(here) != self.head.checksums[block]:
                    view[start : start + BLOCK] = self._fetch(block, block + 1)
                self._there[block] = 1

    def _keep(self, block: int) -> bytes:
        """Read a block into this process's own cache."""
        data = _kept[self._first + block] = self._fetch(block, block + 1)
        drop_oldest(_kept, max(1, _KEPT // _OWN))
        return data

    def _fetch(self, first: int, stop: int) -> bytes:
        """Read the neighbouring blocks ``first..stop-1``, verified."""
        try:
            return self._verified(first, stop)
        except DataIndexError:
            # The open file of this name may be an older, damaged one that was replaced.
            self._store.forget(*self._shard)
            return self._verified(first, stop)

    def _verified(self, first: int, stop: int) -> bytes:
        start = first << _SHIFT
        try:
            (data,) = self._store.fetch([(self._shard, start, min(stop << _SHIFT, self._end) - start)])
        except DatasetError as error:
            if isinstance(error, FatalStorageError) and not isinstance(error, ShardChangedError):
                raise
            kind = self.head.kind
            raise DataIndexError(
                f"the {kind.name} cannot be read: it was changed or removed while it was in use, or the storage "
                f"failed ({error.what})",
                where=self._shard[0],
                fix=f"start the run again; if that does not help, {kind.cure}",
            ) from error
        self.head.check(data, first)
        return data


class StoredArray:
    """An array in a file whose rows are read on demand; ``array[a:b]`` is a copy."""

    def __init__(self, body: FileBody, dtype: str, shape: Sequence[int], offset: int):
        self.dtype = np.dtype(dtype)
        self.shape = tuple(shape)
        self._body = body
        self._offset = offset
        self._row = self.dtype.itemsize * math.prod(shape[1:])
        body.check_range(offset, self._row * shape[0])
        self._shared = None if body.memory is None else np.ndarray(self.shape, self.dtype, body.memory, offset)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice, /) -> NDArray[Any]:
        wanted = range(*rows.indices(len(self)))
        low, high = (min(wanted[0], wanted[-1]), max(wanted[0], wanted[-1]) + 1) if wanted else (0, 0)
        block = np.frombuffer(self.raw(low, high), dtype=self.dtype).reshape(high - low, *self.shape[1:])
        return block[:: wanted.step]

    def raw(self, start: int, stop: int) -> bytes:
        """Return the bytes of the rows ``start..stop-1``."""
        return self._body.read(self._offset + start * self._row, (stop - start) * self._row)

    def raw_each(self, places: Int64) -> list[bytes]:
        """:meth:`raw` for each start and stop in ``[n, 2]``."""
        places = places * self._row
        return self._body.read_each(self._offset + places[:, 0], places[:, 1] - places[:, 0])

    def take(self, indices: Int64, axis: Any, /) -> NDArray[Any]:
        """Return the rows with these numbers, which are not negative: ``[*indices.shape, *shape[1:]]``."""
        assert axis == 0
        numbers = np.asarray(indices, dtype=np.int64).reshape(-1)
        shape = (*np.shape(indices), *self.shape[1:])
        low, high = (int(numbers.min()), int(numbers.max()) + 1) if numbers.size else (0, 0)
        if low < 0 or high > len(self):
            raise IndexError(f"rows {low} to {high - 1} of {len(self)} in {self._body.head.path}")
        if self._shared is not None:
            return self.stretches(numbers, 1).reshape(shape)
        if high - low <= _DENSE * len(numbers):
            return self[low:high].take(numbers - low, 0).reshape(shape)
        order = np.argsort(numbers, kind="stable")  # so that each block is read once
        rows = np.empty((len(numbers), *self.shape[1:]), dtype=self.dtype)
        rows[order] = self.stretches(numbers[order], 1)[:, 0]
        return rows.reshape(shape)

    def stretches(self, first: Int64, count: int) -> NDArray[Any]:
        """Return for each row number in ``first`` that row and the next ones: ``[n, count, *shape[1:]]``."""
        size = self._row * count
        starts = first * self._row + self._offset
        if self._shared is not None and size <= BLOCK and len(first):
            self._body.have(starts, starts + size)
            return self._shared.take(first[:, None] + np.arange(count), 0)
        rows = [self._body.read(start, size) for start in starts.tolist()]
        return np.frombuffer(b"".join(rows), dtype=self.dtype).reshape(-1, count, *self.shape[1:])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[:], dtype=dtype)


#: An array with look-ups of rows, in a file or in memory.
Numbers = StoredArray | MemoryArray
