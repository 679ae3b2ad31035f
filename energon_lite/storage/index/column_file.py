"""Files of columns: one value per sample of a data set, next to the packed index.

A column stores the digest of the index that it was made for, and the time of each shard's last change. So a column that
is older than its data is recognised (:meth:`ColumnFile.fits`), and the next measuring takes the values of unchanged
shards from it.

The file is an array file (:mod:`energon_lite.storage.files.array_file`) with three arrays::

    values         one number for each sample of the index, in its order
    shards         int64 [shards, 6]: size, head checksum, time of change in ns, samples, number of the maker of its
                   values (0: unknown, the values are 0), crc32 of its values
    shard_names    bytes: names relative to the data set, separated by NUL

A ragged column has any number of values for each sample, such as the sizes of its images. Its ``values`` are those of
all samples one after the other, with a width, ``[values, width]``, and there is a fourth array::

    ends           int64: the end of each sample's values in ``values``
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shlex
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from glob import glob
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from energon_lite import entry_points
from energon_lite.errors import DataIndexError, UsageError, counted
from energon_lite.storage.files.array_file import FileKind, writing
from energon_lite.storage.files.atomic_file import remove_leftovers
from energon_lite.storage.files.stored_array import open_arrays
from energon_lite.storage.index.index_cache import first_writable, index_places
from energon_lite.storage.index.nv_meta import meta_path
from energon_lite.storage.index.packed_index import PackedIndex, packed_names, unpacked_names
from energon_lite.storage.tar_members import Int64

#: The measured length of a sample in tokens (0 if it has none).
LENGTH = "length"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\Z")
_CURE = "remove the file, and measure again"
_COLUMN_FILE = FileKind(b"ENRGLCOL", 3, "column of a data set", _CURE)
_RAGGED_FILE = FileKind(b"ENRGLRAG", 1, "ragged column of a data set", _CURE)

#: The table of shards: the first 4 columns identify a shard.
_IDENTITY = 4
#: Column with the number of the maker.
_KNOWN = 4
#: Column with the crc32 of the values.
_CHECKSUM = 5
#: Number of columns.
_WIDTH = 6

#: The maker of values: plain data that describes it, and the hash of its code.
Made = tuple[Mapping[str, Any], str]


class Ragged(NamedTuple):
    """Values of some samples, any number for each.

    Attributes:
        counts: int64 ``[samples]``, number of values of each sample.
        values: ``[sum of counts, width]``, those of the first sample first.
    """

    counts: Int64
    values: NDArray[Any]


class ColumnFile:
    """A column on disk. Damaged values are found, and raised, when they are read.

    Args:
        path: the file.

    Attributes:
        path: the file.
        name: name of the column.
        digest: digest of the index that its values belong to.
        values: ``[samples]``, over all shards of the data set; read on demand.
        shards: ``[shards, 6]``, see the module's text.
        shard_names: names of the shards, in the order of the values.
        maker: plain data that describes the maker of the values; equal makers give equal values.
        code: hash of the maker's code, empty if there is none.
        makers: that maker, with its code, and the makers of shards that it has not measured, such as another split's.
        command: the command line that makes the column again.

    Raises:
        DataIndexError: it is damaged, or of an unknown format.
        FileNotFoundError: there is no such file.
    """

    kind: ClassVar[FileKind] = _COLUMN_FILE
    suffix: ClassVar[str] = ".col"
    noun: ClassVar[str] = "column"

    def __init__(self, path: str):
        arrays, meta = open_arrays(path, self.kind)
        try:
            self.values = arrays["values"]
            self.shards = arrays["shards"][:]
            #: One row for each sample.
            self.rows = arrays.get("ends", self.values)
            names = unpacked_names(arrays["shard_names"][:])
            self.name, self.digest, self.maker, self.code, self.command = (
                meta[name] for name in ("name", "digest", "maker", "code", "command")
            )
            self.makers: list[Made] = [
                (self.maker, self.code),
                *((made, code) for made, code in meta.get("others", ())),
            ]
            if (self.shards[:, _KNOWN] > len(self.makers)).any():
                raise KeyError("others")
        except (KeyError, TypeError, ValueError):
            raise self.kind.damaged(path, "its table is incomplete") from None
        self.path = path
        self.shard_names = names if len(self.shards) else ()

    @classmethod
    def stored(cls, root: str, name: str) -> list[Self]:
        """Open the readable files of a column, the one next to the data first; they may be older than the data."""
        files = []
        for folder in column_folders(root):
            try:
                files.append(cls(column_path(folder, name, cls.suffix)))
            except (FileNotFoundError, NotADirectoryError, PermissionError):
                continue
        return files

    @classmethod
    def find(cls, root: str, index: PackedIndex, name: str, rows: Sequence[int], *, asked: Sequence[str] = ()) -> Self:
        """Find the column that belongs to ``index`` and has values for the shards in these rows of it.

        Args:
            asked: the data that is read, as arguments of ``energon-lite measure``, for messages; empty: all of
                ``root``.

        Raises:
            DataIndexError: the column does not exist, is older than the data, or lacks values for some shards.
        """
        stored = cls.stored(root, name)
        for file in stored:
            if file.fits(index):
                missing = [index.shard_names[row] for row in rows if not file.shards[row, _KNOWN]]
                if not missing:
                    return file
                raise DataIndexError(
                    f"the column {name!r} has no values for {len(missing)} of {counted(len(rows), 'shard')}, "
                    f"such as {missing[0]!r}",
                    where=file.path,
                    fix=f"measure these as well: {_again(file.command, root, asked)}",
                )
        if stored:
            raise DataIndexError(
                f"the column {name!r} is older than the data set: shards have changed, come or gone since it was made",
                where=stored[0].path,
                fix=f"make it again, only changed shards are read: {_again(stored[0].command, root, asked)}",
            )
        folders, suffix = column_folders(root), cls.suffix
        names = {path.removesuffix(suffix) for folder in folders for path in glob("*" + suffix, root_dir=folder)}
        there = f"; it has {', '.join(sorted(names))}" if names else ""
        raise DataIndexError(f"the data set has no {cls.noun} {name!r}{there}", where=root, fix=_cure(root, name))

    def fits(self, index: PackedIndex) -> bool:
        """Return True if each value belongs to the sample of the same number in ``index``."""
        if self.digest != index.digest or len(self.rows) != len(index):
            return False
        return bool(np.array_equal(self.shards[:, :_IDENTITY], shard_table(index)[:, :_IDENTITY]))

    def fingerprint(self, rows: Sequence[int]) -> str:
        """Hash of the values of the shards in these rows."""
        text = " ".join(map(str, self.shards[rows, _CHECKSUM].tolist()))
        return hashlib.blake2b(f"{self.values.dtype.kind} {text}".encode(), digest_size=16).hexdigest()

    def unchanged(self, index: PackedIndex) -> dict[int, tuple[Any, Made]]:
        """Return the known values of shards that ``index`` has unchanged, with their maker, by their row in
        ``index``."""
        identities = shard_table(index)[:, :_IDENTITY].tolist()
        unchanged: dict[int, tuple[Any, Made]] = {}
        stop = 0
        for name, shard in zip(self.shard_names, self.shards.tolist(), strict=True):
            start, stop = stop, stop + shard[3]
            row = index.shard_rows.get(name)
            # A shard without a time of change may have changed unnoticed.
            if row is not None and identities[row] == shard[:_IDENTITY] and shard[_KNOWN] and shard[2]:
                unchanged[row] = self.block(start, stop), self.makers[shard[_KNOWN] - 1]
        return unchanged

    def block(self, start: int, stop: int) -> Any:
        """The values of the samples ``start..stop-1``."""
        return self.values[start:stop]


class RaggedFile(ColumnFile):
    """A ragged column on disk: a :class:`ColumnFile` with any number of values for each sample.

    Attributes:
        values: ``[values, width]``, those of all samples one after the other.
    """

    kind = _RAGGED_FILE
    suffix = ".ragged"
    noun = "ragged column"

    def block(self, start: int, stop: int) -> Ragged:
        """The values of the samples ``start..stop-1``."""
        ends = self.rows[max(0, start - 1) : stop]
        ends = ends if start else np.concatenate([[0], ends])
        counts, first = np.diff(ends), int(ends[0])
        return Ragged(counts, self.values[first : int(ends[-1])])

    def take(self, samples: Int64) -> Ragged:
        """The values of the samples with these numbers, ``[n]``."""
        starts = np.where(samples > 0, self.rows.take(np.maximum(samples - 1, 0), 0), 0)
        counts = self.rows.take(samples, 0) - starts
        before = np.cumsum(counts) - counts
        places = np.repeat(starts - before, counts) + np.arange(int(counts.sum()))
        return Ragged(counts, self.values.take(places, 0))


def shard_table(index: PackedIndex) -> Int64:
    """The table of shards of a column for ``index``; the values of all shards are marked as unknown."""
    table = np.zeros((len(index.shard_names), _WIDTH), dtype=np.int64)
    table[:, :2] = index.shards[:-1, :2]
    table[:, 2] = index.shard_times
    table[:, 3] = np.diff(index.shards[:, 3])
    return table


def write_column_file(
    path: str,
    name: str,
    index: PackedIndex,
    blocks: Callable[[], Iterable[Any]],
    *,
    dtype: str,
    maker: Mapping[str, Any],
    width: int = 0,
    code: str = "",
    command: str = "",
    others: Mapping[int, Made] = MappingProxyType({}),
) -> None:
    """Write a column atomically, with one shard in memory at a time.

    Args:
        path: the file.
        name: name of the column.
        index: the index that the values belong to.
        blocks: gives for each shard its values: an array, or a :class:`Ragged`; None: they are unknown. It is called
            twice for a ragged column.
        dtype: such as ``"<i4"``; the values must fit.
        maker, code, command: see :class:`ColumnFile`.
        width: width of the values of a ragged column; 0: each sample has one value.
        others: by row, the maker of shards whose values another maker made.
    """
    table = shard_table(index)
    samples = table[:, 3].tolist()
    plain = {row: [dict(settings), code] for row, (settings, code) in others.items()}
    makers = [made for number, made in enumerate(plain.values()) if made not in list(plain.values())[:number]]
    #: Number of the maker of each shard; number 1 is the column's own maker.
    numbers = [2 + makers.index(plain[row]) if row in plain else 1 for row in range(len(table))]

    def values() -> Iterator[memoryview]:
        for row, block in enumerate(blocks()):
            if block is None and width:
                continue
            stored = np.zeros(samples[row]) if block is None else block.values if width else block
            data = np.ascontiguousarray(stored, dtype=dtype).reshape(-1).view(np.uint8).data
            count = int(block.counts.sum()) * width if width else samples[row]
            # Otherwise all later values would belong to the wrong samples.
            assert len(data) == count * np.dtype(dtype).itemsize
            table[row, _KNOWN], table[row, _CHECKSUM] = numbers[row] * (block is not None), zlib.crc32(data)
            yield data

    def ends() -> Iterator[memoryview]:
        end = 0
        for row, block in enumerate(blocks()):
            counts = np.zeros(samples[row], dtype=np.int64) if block is None else block.counts
            assert len(counts) == samples[row]
            if block is not None:  # the same values with other counts would belong to other samples
                table[row, _CHECKSUM] = zlib.crc32(counts.astype("<i8").data, int(table[row, _CHECKSUM]))
            sums = end + np.cumsum(counts, dtype="<i8")
            end = int(sums[-1]) if len(sums) else end
            yield sums.view(np.uint8).data

    meta: dict[str, Any] = {
        "name": name,
        "digest": index.digest,
        "maker": dict(maker),
        "code": code,
        "command": command,
    }
    meta |= {"others": makers} if makers else {}
    remove_leftovers(os.path.dirname(path))
    with writing(path, _RAGGED_FILE if width else _COLUMN_FILE, meta) as file:
        file.stream("values", dtype, (width,) if width else (), values())
        if width:
            file.stream("ends", "<i8", (), ends())
        file.add("shards", table)
        file.add("shard_names", packed_names(index.shard_names))


# -- names and places of files ---------------------------------------------------------------------------------------


def check_column_name(name: str) -> str:
    """Return ``name`` if it is a valid name of a column.

    Raises:
        UsageError: it is not valid.
    """
    if not _NAME.match(name) or len(name) > 100:
        raise UsageError(
            f"a column cannot be called {name!r}", fix="use up to 100 letters, digits, '_', '.' and '-', such as length"
        )
    return name


def column_folders(root: str) -> tuple[str, str]:
    """The folders that may hold columns of a data set: one next to the data, one in the user's cache."""
    cached = os.path.splitext(index_places(root)[1])[0]
    return meta_path(root, "energon_lite.columns"), cached + ".columns"


def column_path(folder: str, name: str, suffix: str = ColumnFile.suffix) -> str:
    """Path of the file of a column."""
    return os.path.join(folder, check_column_name(name) + suffix)


def writable_folder(root: str) -> str:
    """Return the first of :func:`column_folders` that can be written, and make it if necessary.

    Raises:
        DataIndexError: neither can be written.
    """

    def made(folder: str) -> str:
        os.makedirs(folder, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "no permission")
        return folder

    return first_writable(root, "columns", column_folders(root), "measure", made)


def _again(command: str, root: str, asked: Sequence[str]) -> str:
    """The command that made a column, changed to the data that is read now (perhaps another split, or a blend)."""
    program, words = shlex.split(command)[:2], shlex.split(command)[3:]  # between them is the data that was measured
    if program != ["energon-lite", "measure"]:
        return command or "see energon-lite measure -h"
    if not asked or "--task-encoder" not in words:  # without an encoder, a whole folder is measured
        asked, replaced = [root], ["--split-parts"]
    else:
        replaced = ["--split-parts", "--dataset-config", "--split-config", "--subflavors"]
    kept = [word for at, word in enumerate(words) if word not in replaced and (not at or words[at - 1] not in replaced)]
    return shlex.join([*program, *asked, *kept])


def _cure(root: str, name: str) -> str:
    """The command that makes a column of that name."""
    for guest in entry_points.columns().values():
        if name in guest.names:
            options = (f"--{option} {form.metavar}".strip() for option, form in guest.options.items())
            return f"run `energon-lite measure {root}` with {' or '.join(options)}"
    if name == LENGTH or name.endswith(f".{LENGTH}"):
        return (
            f"run `energon-lite measure {root} --task-encoder module:Class`, or, for lengths that need no encoder, "
            f"`energon-lite measure {root} --length-field PART`"
        )
    return (
        f"run `energon-lite measure {root} --task-encoder module:Class` with an encoder whose sample_costs returns it, "
        f"or, if it is in a part, `energon-lite measure {root} --column {name}=PART`"
    )
