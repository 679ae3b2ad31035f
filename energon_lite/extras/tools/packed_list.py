"""A list of Python objects in one block of bytes, shared by processes.

A plain list of a million dicts costs a loader with workers several times its memory. Each object has a reference count
in its own memory, so a forked worker that reads an item writes to its page, and gets a private copy of the page; after
some time, each worker holds a copy of everything. Spawned workers get such a copy at once. Bytes in a mapped file have
no reference counts: all processes share the same pages, and an item becomes an object when it is accessed.

The observation, and the solution by one buffer with offsets, are from Yuxin Wu, "Demystify RAM Usage in Multi-Process
Data Loaders" (ppwwyyxx.com, 2022), and detectron2's serialised list. Here the items are msgpack rather than pickles, so
that reading a file runs no code, and the buffer is a mapped file, so that it may be larger than memory.

The file is an array file (:mod:`energon_lite.storage.files.array_file`) with two arrays: ``items``, the concatenated
msgpack of all items, and ``offsets``, u64 ``[items + 1]``, the start of each item in ``items``. Its metadata records
whether any item contains a pickle. A block of the file is verified when it is first accessed.
"""

from __future__ import annotations

import glob
import os
import pickle
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, BinaryIO, TypeVar, overload

import msgpack
import numpy as np

from energon_lite.errors import DatasetError, EnergonLiteError, TrustError, UsageError
from energon_lite.storage.files.array_file import BLOCK, ArrayWriter, FileKind, Head, read_head
from energon_lite.storage.files.atomic_file import lock, remove_leftovers, replacing
from energon_lite.storage.files.byte_ranges import map_file, open_file

T = TypeVar("T")

_LIST_FILE = FileKind(b"ENRGLPKL", 2, "packed list", "make it again: PackedList.from_iterable writes such files")
#: Codes of msgpack extension types: arrays, numpy scalars, tuples, pickles.
_ARRAY = 1
_SCALAR = 2
_TUPLE = 3
_PICKLE = 100
#: Largest depth at which an unpackable value is searched for.
_DEPTH = 50
#: Prefix and suffix of names of temporary files.
_PREFIX = "energon_lite-"
_SUFFIX = ".pack"
#: Seconds to wait for the lock of a new file.
_PATIENCE = 10.0
#: Folders in which temporary files of dead processes were removed.
_cleaned: set[str] = set()


class PackedList(Sequence[T]):
    """A read-only sequence of Python objects that all processes of a machine share. Made by :meth:`from_iterable`.

    Items consist of None, bool, int (64 bits), float, str, bytes, list, tuple, dict (keys too), numpy arrays and numpy
    scalars, nested to any depth. Each access makes a new object: changing it does not change the list.

    A slice is another list over the same bytes. The object can be pickled (only its path is sent) and used in forked
    and spawned processes.

    Example:
        >>> records = PackedList.from_iterable({"id": n, "text": f"text {n}"} for n in range(1_000_000))
        >>> records[-1], len(records[10:20])
        ({'id': 999999, 'text': 'text 999999'}, 10)
    """

    def __init__(self, path: str, trust_code: bool, chosen: range | None = None):
        self.path = path
        self._trust_code = trust_code
        with open(path, "rb", opener=open_file) as file:
            head = read_head(file, path, _LIST_FILE)
            if head.meta["pickles"] and not trust_code:
                raise _untrusted(path)
            self._body = _Body(map_file(file.fileno()), head)
        self._chosen = range(self._body.count) if chosen is None else chosen

    @classmethod
    def from_iterable(
        cls, items: Iterable[T], path: str | os.PathLike[str] | None = None, *, trust_code: bool = False
    ) -> PackedList[T]:
        """Pack items one by one; only one of them is in memory, so the iterable may be a stream.

        Args:
            items: items of the supported types.
            path: the file to write, atomically; None: a temporary file in ``$TMPDIR``, which is removed when the
                process that made it releases the list and all its slices. The file of a killed process is removed when
                another process makes such a list.
            trust_code: True to pack other objects as pickles, which can run code when they are read. The file can then
                only be opened with ``trust_code=True``.

        Raises:
            UsageError: an item cannot be packed; with its number and the part at fault.

        Example:
            >>> names = PackedList.from_iterable(["a", "b"], "names.pack")
        """
        if path is not None:
            file = os.path.abspath(os.fspath(path))
            with suppress(OSError):
                remove_leftovers(os.path.dirname(file))
            with replacing(file) as temporary:
                _write(temporary, items, trust_code)
            return cls(file, trust_code)
        handle, file = _temporary_file()
        try:
            _write(file, items, trust_code)
            made = cls(file, trust_code)
        except BaseException:
            _remove(file, handle, os.getpid())
            raise
        # All slices share the mapped file, so it exists as long as one of them does.
        weakref.finalize(made._body, _remove, file, handle, os.getpid())
        return made

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, trust_code: bool = False) -> PackedList[Any]:
        """Map a file of :meth:`from_iterable` or :meth:`save`. Nothing is read before an item is accessed.

        Raises:
            DatasetError: the file is not a packed list, or damaged.
            TrustError: the file has pickles, and ``trust_code`` is False.
        """
        return cls(os.path.abspath(os.fspath(path)), trust_code)

    def save(self, path: str | os.PathLike[str]) -> PackedList[T]:
        """Write the list (of a slice, its items only) to a new file; return the list on that file."""
        target = os.path.abspath(os.fspath(path))
        if len(self._chosen) != self._body.count or self._chosen.step != 1:
            return PackedList.from_iterable(self, target, trust_code=self._trust_code)
        with replacing(target) as temporary:
            shutil.copyfile(self.path, temporary)
        return PackedList(target, self._trust_code)

    def __len__(self) -> int:
        return len(self._chosen)

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> PackedList[T]: ...

    def __getitem__(self, index: int | slice) -> T | PackedList[T]:
        if isinstance(index, slice):
            part: PackedList[T] = object.__new__(PackedList)
            part.__dict__.update(self.__dict__)
            part._chosen = self._chosen[index]
            return part
        try:
            number = self._chosen[index]
        except IndexError:
            raise IndexError(f"item {index} of {len(self)} in {self.path}") from None
        try:
            item: T = self._unpack(self._body.item(number))
        except EnergonLiteError:
            raise
        except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
            raise DatasetError(
                f"item {number} cannot be read: {type(error).__name__}: {error}",
                where=self.path,
                fix="the file is damaged: make it again",
            ) from error
        return item

    def __iter__(self) -> Iterator[T]:
        return (self[number] for number in range(len(self)))

    def __reduce__(self) -> tuple[Any, ...]:
        return (PackedList, (self.path, self._trust_code, self._chosen))

    def __repr__(self) -> str:
        return f"PackedList({len(self)} items in {self.path})"

    def _unpack(self, data: memoryview) -> Any:
        return msgpack.unpackb(
            data, ext_hook=self._extension, strict_map_key=False, unicode_errors="surrogatepass", use_list=True
        )

    def _extension(self, code: int, data: bytes) -> Any:
        if code == _TUPLE:
            return tuple(self._unpack(memoryview(data)))
        if code in (_ARRAY, _SCALAR):
            dtype, shape, raw = msgpack.unpackb(data)
            values = np.frombuffer(raw, dtype=dtype).reshape(shape).copy()
            return values if code == _ARRAY else values[()]
        if code != _PICKLE:
            raise DatasetError(
                f"an item has a value of unknown kind {code}", where=self.path, fix="update energon_lite"
            )
        if not self._trust_code:
            raise _untrusted(self.path)
        return pickle.loads(data)


class _Body:
    """Items of a mapped file. Each block is verified when it is first accessed."""

    def __init__(self, mapped: memoryview, head: Head):
        self._mapped = mapped
        self._head = head
        self._there = bytearray(len(head.checksums))
        self._items = head.places["items"][2]
        _, (offsets,), self._place = head.places["offsets"]
        self.count = offsets - 1
        self._offsets = mapped[self._place : self._place + 8 * offsets].cast("Q")

    def item(self, number: int) -> memoryview:
        """Return the bytes of an item."""
        place, offsets = self._place + 8 * number, self._offsets
        self._verify(place // BLOCK, (place + 15) // BLOCK)
        start, stop = self._items + offsets[number], self._items + offsets[number + 1]
        self._verify(start // BLOCK, (stop - 1) // BLOCK)
        return self._mapped[start:stop]

    def _verify(self, first: int, last: int) -> None:
        if self._there.find(0, first, last + 1) >= 0:
            self._head.check(self._mapped[first * BLOCK : min((last + 1) * BLOCK, self._head.end)], first)
            self._there[first : last + 1] = b"\1" * (last + 1 - first)


def _untrusted(path: str) -> TrustError:
    return TrustError(
        "the packed list holds pickles, which can run code when they are read",
        file=path,
        fix="if you trust whoever made it, pass trust_code=True; else have it made of plain values and numpy arrays",
    )


# -- temporary files ------------------------------------------------------------------------------------------------


def _temporary_file() -> tuple[int, str]:
    """Make a temporary file, open and locked as long as it is open in this process or one forked from it."""
    folder = tempfile.gettempdir()
    if folder not in _cleaned:
        _cleaned.add(folder)
        _remove_stale(folder)
    while True:
        handle, file = tempfile.mkstemp(_SUFFIX, _PREFIX, folder)
        lock(handle, _PATIENCE)  # another holder only tests the lock
        if os.fstat(handle).st_nlink:  # else another process removed it as a leftover before the lock
            return handle, file
        os.close(handle)


def _remove_stale(folder: str) -> None:
    """Remove the temporary files of killed processes, whose locks are free."""
    for path in glob.glob(f"{_PREFIX}*{_SUFFIX}", root_dir=folder):
        with suppress(OSError):  # it is no longer there, or may not be opened
            handle = os.open(os.path.join(folder, path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if os.fstat(handle).st_uid == os.getuid() and lock(handle, 0.0):
                    os.unlink(os.path.join(folder, path))
            finally:
                os.close(handle)


def _remove(path: str, handle: int, owner: int) -> None:
    if os.getpid() == owner:  # a forked copy of the owner must leave it
        with suppress(FileNotFoundError):
            os.unlink(path)
    os.close(handle)


# -- packing --------------------------------------------------------------------------------------------------------


def _write(path: str, items: Iterable[Any], trust_code: bool) -> None:
    """Write a packed list; offsets are stored in a second file, so that memory does not grow with their number."""
    packing = _Packing(trust_code)
    with open(path, "wb") as file, tempfile.TemporaryFile(dir=os.path.dirname(path)) as offsets:
        writer = ArrayWriter(file, _LIST_FILE, {})
        writer.stream("items", "|u1", (), _packed(items, packing, offsets))
        offsets.seek(0)
        writer.stream("offsets", "<u8", (), iter(partial(offsets.read, 1 << 20), b""))
        writer.meta["pickles"] = packing.pickles
        writer.finish()


def _packed(items: Iterable[Any], packing: _Packing, offsets: BinaryIO) -> Iterator[bytes]:
    """Yield the bytes of each item; write the start of each, and the end of all, to ``offsets``."""
    end = 0
    for number, item in enumerate(items):
        data = packing.pack(item, number)
        offsets.write(end.to_bytes(8, "little"))
        end += len(data)
        yield data
    offsets.write(end.to_bytes(8, "little"))


class _Packing:
    """Encoder of objects to bytes."""

    def __init__(self, trust_code: bool):
        self._trust_code = trust_code
        self.pickles = False

    def pack(self, item: Any, number: int) -> bytes:
        """Encode an item.

        Raises:
            UsageError: the item cannot be packed.
        """
        try:
            return self._pack(item)
        except (TypeError, ValueError, OverflowError, RecursionError, AttributeError, pickle.PicklingError) as error:
            place, reason = self._culprit(item, error)
            raise UsageError(
                f"item {number} cannot be packed{f', because of {place}' if place else ''}: {reason}",
                fix="make it of None, numbers, text, bytes, lists, tuples, dicts and numpy arrays"
                + ("" if self._trust_code else "; or, if only you read it, pass trust_code=True (then it is pickled)"),
            ) from error

    def _pack(self, item: Any) -> bytes:
        return msgpack.packb(item, default=self._extend, strict_types=True, unicode_errors="surrogatepass")

    def _extend(self, value: Any) -> msgpack.ExtType:
        if type(value) is tuple:
            return msgpack.ExtType(_TUPLE, self._pack(list(value)))
        if isinstance(value, np.generic) and not value.dtype.hasobject and value.dtype.names is None:
            return msgpack.ExtType(_SCALAR, msgpack.packb((value.dtype.str, (), value.tobytes())))
        if type(value) is np.ndarray and not value.dtype.hasobject and value.dtype.names is None:
            return msgpack.ExtType(_ARRAY, msgpack.packb((value.dtype.str, value.shape, value.tobytes())))
        if not self._trust_code:
            raise TypeError(f"a {_name(type(value))} is not one of the kinds that are packed")
        self.pickles = True
        return msgpack.ExtType(_PICKLE, pickle.dumps(value))

    def _culprit(self, item: Any, error: Exception) -> tuple[str, str]:
        """Return the path of the smallest part of an item that cannot be packed, and the reason."""
        place = ""
        for _ in range(_DEPTH):
            is_list = type(item) in (list, tuple)
            for key, value in item.items() if isinstance(item, Mapping) else enumerate(item if is_list else ()):
                try:
                    self._pack(value)
                except Exception as reason:
                    place = f"{place}[{key!r}]"
                    item = value
                    error = reason
                    break
            else:
                return place, str(error)
        return "", "it is nested too deeply"


def _name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
