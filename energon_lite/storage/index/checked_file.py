"""Files of numbers in which every byte is verified before it is used: the packed index and columns.

The body is divided into blocks, and the file has a checksum of each. A block is read when something in it is asked for,
verified, and kept. So opening does not depend on the size; a bit that has flipped, or a file that was cut off, is an
error and never another number.

Verified blocks are kept in one of two ways. Files of up to 64 MiB together have memory of their own length, which takes
room as blocks come in, and which forked workers share: a block is read once, and stays right whatever happens to its
file. All others share 4 MiB in each process, where the oldest block gives way. So memory is bounded, too. A look-up in
no order takes a fraction of a microsecond in files that fit, and some five in others, which are read again and again.

Blocks are read, not mapped: to touch a mapped file that somebody cuts short ends the process, what the system reads
again after it let a page go is not verified, and a touched page brings its neighbours along, so that a few thousand
look-ups would make gigabytes appear in the memory of each worker.

Their format is that of :mod:`energon_lite.storage.files.checked_writer`.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import zlib
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from typing import Any, Protocol
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from energon_lite.errors import DataIndexError, DatasetError, FatalStorageError
from energon_lite.storage.files.checked_writer import ALIGN, BLOCK, HEADER, START, FileKind, writing_checked
from energon_lite.storage.files.open_file import open_file
from energon_lite.storage.files.shard_store import ShardIdentity, head_checksum, shared_store
from energon_lite.storage.files.shortage import patiently

__all__ = ["ALIGN", "BLOCK", "CheckedFile", "FileKind", "Numbers", "StoredArray", "writing_checked"]

_SHIFT = BLOCK.bit_length() - 1
#: Blocks that are kept in memory that forked processes share, of all files together: 64 MiB.
_KEPT = 8192
#: A process by itself keeps this part of it, of the files for which no shared memory was left: 4 MiB.
_OWN = 16
#: Blocks that are read, and not kept, at a time where more than a few are asked for.
_SPAN = 128
#: Rows are taken one by one if they are few, or fewer than this in a block; else block by block.
_FEW, _DENSE = 128, 32

Int64 = NDArray[np.int64]

#: By number of the file and of the block in it; the oldest stands first.
_kept: dict[int, bytes] = {}
_numbers = count()
#: Memory that forked processes share, by path and identity of the file.
_shared: WeakValueDictionary[tuple[Any, ...], mmap.mmap] = WeakValueDictionary()


class Numbers(Protocol):
    """What numpy arrays and :class:`StoredArray` have in common."""

    @property
    def dtype(self) -> np.dtype[Any]: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice, /) -> NDArray[Any]: ...

    def take(self, indices: NDArray[np.int64], axis: Any, /) -> NDArray[Any]: ...


class CheckedFile:
    """A checked file that was opened by :meth:`open`. It holds no descriptor: that is one of the shared store.

    Attributes:
        path: the file, absolute.
        kind: what it is.
        table: what :meth:`CheckedWriter.finish` was given.
        memory: as long as the body, shared by forked processes; None: the file is too large. Holds verified blocks, and
            zeros.
    """

    def __init__(self, path: str, kind: FileKind, table: Any, end: int, size: int, head: int, checksums: memoryview):
        self.path, self.kind, self.table = os.path.abspath(path), kind, table
        self._end, self._checksums = end, checksums
        self._identity, self._store = ShardIdentity(size, head), shared_store()
        self._first = next(_numbers) << 40
        #: Which blocks this process knows to be in the shared memory.
        self._there = bytearray(len(checksums))
        self.memory = _shared.get((self.path, self._identity))
        if self.memory is None and 0 < end <= (_KEPT << _SHIFT) - sum(map(len, list(_shared.values()))):
            with suppress(OSError):  # no memory is left: then it is read as a larger one
                self.memory = _shared[self.path, self._identity] = mmap.mmap(-1, end)

    @classmethod
    def open(cls, path: str, kind: FileKind) -> CheckedFile:
        """Open the file ``path`` and verify all but its body.

        Raises:
            DataIndexError: it is damaged, incomplete, or of another kind or version.
            FileNotFoundError: there is no such file.
        """
        with patiently(lambda: open(path, "rb", opener=open_file), path) as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(max(ALIGN, 512))
            if len(start) < ALIGN or start[:8] != kind.magic:
                raise DataIndexError(f"this is not a {kind.name}", where=path, fix=kind.cure)
            version, end, length, checksum = HEADER.unpack_from(start, START.size)
            if version != kind.version:
                raise DataIndexError(
                    f"the {kind.name} has format {version}, this library reads format {kind.version}",
                    where=path,
                    fix=f"update energon_lite, or {kind.cure}",
                )
            if start[: START.size] != START.pack(kind.magic, zlib.crc32(start[START.size : ALIGN])):
                raise _damaged(path, kind, "its header has a wrong checksum")
            sums = 4 * _blocks(end)
            if end + sums + length != size:
                raise DataIndexError(
                    f"the {kind.name} is cut off or overlong: {size} bytes instead of {end + sums + length}",
                    where=path,
                    fix=kind.cure,
                )
            file.seek(end)
            rest = file.read(sums + length)
        if zlib.crc32(rest) != checksum:
            raise _damaged(path, kind, "its table has a wrong checksum")
        values = np.frombuffer(rest, dtype="<u4", count=sums // 4)
        checksums = memoryview(values.astype(np.uint32, copy=False))  # type: ignore[arg-type]
        return cls(path, kind, json.loads(rest[sums:]), end, size, head_checksum(start), checksums)

    def read(self, offset: int, size: int) -> bytes:
        """``size`` bytes of the body at ``offset`` of the file.

        Raises:
            DataIndexError: they are damaged, or not there.
        """
        block = offset >> _SHIFT
        if self.memory is not None and 0 < size <= BLOCK:
            self.check_range(offset, size)
            last, there = (offset + size - 1) >> _SHIFT, self._there
            if not (there[block] and there[last]):
                self._share([block, last])
            return self.memory[offset : offset + size]
        data = _kept.get(self._first + block)
        if data is None:
            if not size:
                return b""
            data = self._bring(block)
        start = offset - (block << _SHIFT)
        found = data[start : start + size]
        return found if len(found) == size else self._read_on(offset, size)

    def read_each(self, offsets: Int64, sizes: Int64) -> list[bytes]:
        """:meth:`read` for each of these places."""
        if self.memory is None or not len(sizes) or sizes.max() > BLOCK or sizes.min() <= 0:
            return [self.read(offset, size) for offset, size in zip(offsets.tolist(), sizes.tolist(), strict=True)]
        memory, stops = self.memory, offsets + sizes
        self.have(offsets, stops)
        return [memory[start:stop] for start, stop in zip(offsets.tolist(), stops.tolist(), strict=True)]

    def have(self, starts: Int64, stops: Int64) -> None:
        """Have in :attr:`memory` what is between these places of the body, each time at most the bytes of a block.

        Raises:
            DataIndexError: it is damaged, or not there.
        """
        self.check_range(int(starts.min()), int(stops.max() - starts.min()))
        blocks = np.concatenate([starts, stops - 1]) >> _SHIFT
        there = np.frombuffer(self._there, dtype=bool)[blocks]
        if not there.all():
            self._share(np.unique(blocks[~there]).tolist())

    def _share(self, blocks: Sequence[int]) -> None:
        """Have these blocks in shared memory. Only what was verified is written there, so processes that do it at the
        same time write the same."""
        assert self.memory is not None
        view = memoryview(self.memory)
        for block in blocks:
            if not self._there[block]:
                start = block << _SHIFT
                here = view[max(start, ALIGN) : start + BLOCK]
                if not any(here[:ALIGN]) or zlib.crc32(here) != self._checksums[block]:  # no other process had it
                    view[start : start + BLOCK] = self._one(block)
                self._there[block] = 1

    def array(self, dtype: str, shape: Sequence[int], offset: int) -> StoredArray:
        """The array that starts at ``offset``.

        Raises:
            DataIndexError: the file is too short for it.
        """
        return StoredArray(self, np.dtype(dtype), tuple(shape), offset)

    def check_range(self, offset: int, size: int) -> None:
        """Whether there are so many bytes.

        Raises:
            DataIndexError: it is not so.
        """
        if not (offset >= ALIGN and size >= 0 and offset + size <= self._end):
            raise _damaged(self.path, self.kind, f"there are no {size} bytes at byte {offset}")

    def _read_on(self, offset: int, size: int) -> bytes:
        """What is in more than one block."""
        self.check_range(offset, size)
        first, last = offset >> _SHIFT, (offset + size - 1) >> _SHIFT
        if last - first < 3:
            found = b"".join([_kept.get(self._first + block) or self._bring(block) for block in range(first, last + 1)])
            start = offset - (first << _SHIFT)
            return found[start : start + size]
        chunks = []
        for block in range(first, last + 1, _SPAN):
            data = memoryview(self._fetch(block, min(block + _SPAN, last + 1)))
            low = max(offset - (block << _SHIFT), 0)
            chunks.append(data[low : offset + size - (block << _SHIFT)])
        return b"".join(chunks)

    def _bring(self, block: int) -> bytes:
        data = _kept[self._first + block] = self._one(block)
        while len(_kept) > max(1, _KEPT // _OWN):
            with suppress(KeyError, RuntimeError, StopIteration):  # another thread was faster
                del _kept[next(iter(_kept))]
        return data

    def _one(self, block: int) -> bytes:
        """A block, verified."""
        self.check_range(max(block << _SHIFT, ALIGN), 1)
        start = block << _SHIFT
        try:  # where all is well, this is what look-ups in no order spend their time with
            data = self._store.open(self.path, self._identity).read(min(BLOCK, self._end - start), start)
        except (DatasetError, OSError):
            data = b""
        if zlib.crc32(data if block else data[ALIGN:]) != self._checksums[block] or not data:
            data = self._fetch(block, block + 1)
        return data

    def _fetch(self, first: int, stop: int) -> bytes:
        """Some neighbouring blocks, verified."""
        try:
            return self._verified(first, stop)
        except DataIndexError:
            # What is open under this name may be an older file, which was damaged and has been made again.
            self._store.forget(self.path, self._identity)
            return self._verified(first, stop)

    def _verified(self, first: int, stop: int) -> bytes:
        start = first << _SHIFT
        try:
            data = self._store.read(self.path, self._identity, start, min(stop << _SHIFT, self._end) - start)
        except FatalStorageError:
            raise
        except DatasetError as error:
            raise DataIndexError(
                f"the {self.kind.name} cannot be read: it was changed or removed while it was in use, or the storage "
                f"failed ({error.what})",
                where=self.path,
                fix=f"start the run again; if that does not help, {self.kind.cure}",
            ) from error
        view = memoryview(data)
        for block in range(first, stop):
            low = (block << _SHIFT) - start
            if zlib.crc32(view[max(low, ALIGN - start) : low + BLOCK]) != self._checksums[block]:
                raise _damaged(self.path, self.kind, f"the block at byte {block << _SHIFT} has a wrong checksum")
        return data


class StoredArray:
    """Numbers in a checked file, which are read as they are asked for: by slices, and by :meth:`take`.

    Behaves like a read-only numpy array in what :class:`Numbers` has; ``array[a:b]`` is a copy.
    """

    def __init__(self, file: CheckedFile, dtype: np.dtype[Any], shape: tuple[int, ...], offset: int):
        self.dtype, self.shape = dtype, shape
        self._file, self._offset, self._row = file, offset, dtype.itemsize * math.prod(shape[1:])
        file.check_range(offset, self._row * shape[0])
        self._shared = None if file.memory is None else np.ndarray(shape, dtype, file.memory, offset)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice, /) -> NDArray[Any]:
        wanted = range(*rows.indices(len(self)))
        low, high = (min(wanted[0], wanted[-1]), max(wanted[0], wanted[-1]) + 1) if wanted else (0, 0)
        return self._rows(low, high)[:: wanted.step]

    def take(self, indices: NDArray[np.int64], axis: Any, /) -> NDArray[Any]:
        """The rows with these numbers, none of them negative: ``[*indices.shape, *shape[1:]]``."""
        assert axis == 0
        numbers = np.asarray(indices, dtype=np.int64).reshape(-1)
        shape = (*np.shape(indices), *self.shape[1:])
        if numbers.size and not (numbers.min() >= 0 and numbers.max() < len(self)):
            raise IndexError(f"rows {numbers.min()} to {numbers.max()} of {len(self)} in {self._file.path}")
        if len(numbers) <= _FEW or self._shared is not None:
            return self.stretches(numbers, 1).reshape(shape)
        order = np.argsort(numbers, kind="stable")
        numbers = numbers[order]
        ends = np.flatnonzero(np.diff((numbers * self._row + self._offset) >> _SHIFT)) + 1
        found = np.empty((len(numbers), *self.shape[1:]), dtype=self.dtype)
        if _DENSE * len(ends) > len(numbers):
            found[order] = self.stretches(numbers, 1)[:, 0]
            return found.reshape(shape)
        start = 0
        for end in (*ends.tolist(), len(numbers)):
            part = numbers[start:end]
            found[order[start:end]] = self._rows(int(part[0]), int(part[-1]) + 1)[part - part[0]]
            start = end
        return found.reshape(shape)

    def stretches(self, first: NDArray[np.int64], count: int) -> NDArray[Any]:
        """Of each of the rows ``first`` it and those behind it, ``count`` together: ``[n, count, *shape[1:]]``."""
        read, size = self._file.read, self._row * count
        if self._shared is not None and size <= BLOCK and len(first):
            starts = first * self._row + self._offset
            self._file.have(starts, starts + size)
            return self._shared.take(first[:, None] + np.arange(count), 0)
        rows = [read(place, size) for place in (first * self._row + self._offset).tolist()]
        return np.frombuffer(b"".join(rows), dtype=self.dtype).reshape(-1, count, *self.shape[1:])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[:], dtype=dtype)

    def _rows(self, start: int, stop: int) -> NDArray[Any]:
        data = self._file.read(self._offset + start * self._row, (stop - start) * self._row) if stop > start else b""
        return np.frombuffer(data, dtype=self.dtype).reshape(stop - start, *self.shape[1:])


def _blocks(end: int) -> int:
    return (end + BLOCK - 1) >> _SHIFT


def _damaged(path: str, kind: FileKind, how: str) -> DataIndexError:
    return DataIndexError(f"the {kind.name} is damaged ({how})", where=path, fix=kind.cure)
