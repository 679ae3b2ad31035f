"""Columns made of the stored parts of samples: sizes of parts, values in them, checksums, and columns of guests."""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from energon_lite.errors import SampleError, UsageError, did_you_mean, listed
from energon_lite.loading.measuring.values import Values
from energon_lite.storage.index.column_file import Ragged
from energon_lite.storage.index.columns import CHECKSUMS
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.read.sample_reader import SampleReader
from energon_lite.storage.read.webdataset import WebdatasetSource
from energon_lite.storage.samples.decoding import SampleDecoder
from energon_lite.storage.samples.field_map import Access

__all__ = ["ALL_PARTS", "ColumnReader", "PartColumns", "PartField", "RequestedColumns", "part_sizes"]

#: Stands for all parts in place of a part's name.
ALL_PARTS = "*"

#: Bytes that contain the header of a .npy file, unless it has hundreds of fields.
_NPY_HEADER = 4096
#: A step into a part, in brackets.
_STEP = re.compile(r"\[([^\[\]]+)\]")


class PartField:
    """A number that is stored in a part of each sample, or the part's size.

    Args:
        source: the whole data set.
        text: see the table of :mod:`energon_lite.loading.measuring.part_lengths`; or ``*``, the bytes of all parts.
        option: command line option of the text, for messages.

    Attributes:
        by_index: the number is in the index, so nothing is read.

    Raises:
        UsageError: no sample has such a part.
    """

    def __init__(self, source: WebdatasetSource, text: str, option: str):
        part, steps = (text, ()) if text == ALL_PARTS else _split_field(text, source, option)
        self._source = source
        self._access = Access(part, steps)
        self._decoder = SampleDecoder(image_decode=None)
        self._reader = SampleReader(source, frozenset({part}))
        self.by_index = not steps and part.rpartition(".")[2] != "npy"

    def __str__(self) -> str:
        return ".".join([self._access.part, *self._access.steps])

    @property
    def part(self) -> str:
        return self._access.part

    def of(self, index: int) -> int:
        """Return the number of one sample.

        Raises:
            SampleError: the sample has no such part, or no number or length there.
        """
        part = self._access.part
        steps = self._access.steps
        if self.by_index:
            sizes, there = part_sizes(self._source.index, part, index, index + 1)
            if not there[0]:
                raise SampleError(f"there is no part {part!r}")
            return int(sizes[0])
        data = self._reader.sample(index).parts.get(part) if steps else self._reader.peek(index, part, _NPY_HEADER)
        if data is None:
            raise SampleError(f"there is no part {part!r}")
        if not steps:
            return _first_dimension(data)
        return _length(self._access.follow({part: self._decoder.decode(part, data)}), self._access)


class ColumnReader(Protocol):
    """Reader of columns of one data set. Workers have copies of it."""

    def add(self, first: int, stop: int, values: Values, broken: dict[int, Exception]) -> None:
        """Add the columns of samples ``first`` to ``stop - 1``, all in one shard.

        Args:
            values: get the columns: int64 ``[stop - first]``, or ragged ones.
            broken: gets the error of each sample without values, by its place among them, unless it has one.
        """


class RequestedColumns(Protocol):
    """Columns of a guest (:class:`energon_lite.entry_points.Columns`), as they were requested."""

    @property
    def names(self) -> Sequence[str]:
        """Names that ``--column`` cannot use."""

    @property
    def settings(self) -> Mapping[str, object]:
        """All settings that affect the values, as plain data; the keys are unique among guests."""

    def open(self, source: WebdatasetSource) -> ColumnReader:
        """Return the reader of a whole data set.

        Raises:
            UsageError: it has no parts of which such columns are made.
        """


class PartColumns:
    """Columns by parts, for any neighbouring samples of a data set: a :class:`ColumnReader`.

    Args:
        source: the whole data set.
        fields: the stored numbers, by name of the column. A sample without the part has 0.
        readers: readers of further columns.
        checksums: make the column of the crc32 of each part, for which all parts are read.
    """

    def __init__(
        self,
        source: WebdatasetSource,
        fields: Mapping[str, PartField],
        readers: Sequence[ColumnReader] = (),
        *,
        checksums: bool = False,
    ):
        self._checksums = checksums
        self._source = source
        self._fields = dict(fields)
        self._readers = readers

    def add(self, first: int, stop: int, values: Values, broken: dict[int, Exception]) -> None:
        """See :class:`ColumnReader`."""
        for name, part_field in self._fields.items():
            if part_field.by_index:
                values.columns[name] = part_sizes(self._source.index, part_field.part, first, stop)[0]
            else:
                values.columns[name] = self._read(part_field, first, stop, broken)
        for reader in self._readers:
            reader.add(first, stop, values, broken)
        if self._checksums:
            values.ragged[CHECKSUMS] = self._sums(first, stop)

    def _sums(self, first: int, stop: int) -> Ragged:
        index = self._source.index
        fetch = self._source.store.fetch
        rows = index.samples[first : stop + 1][:, 0]
        shard = self._source.choice.shards[self._source.locate(first)[0]]
        places = index.parts[rows[0] : rows[-1]][:, :2].tolist()
        # One part is in memory at a time.
        sums = [zlib.crc32(fetch([(shard, offset, size)])[0]) for offset, size in places]
        return Ragged(np.diff(rows), np.array(sums, np.uint32).view(np.int32).astype(np.int64)[:, None])

    def _read(self, one: PartField, first: int, stop: int, broken: dict[int, Exception]) -> NDArray[Any]:
        numbers = np.zeros(stop - first, dtype=np.int64)
        there = part_sizes(self._source.index, one.part, first, stop)[1]
        for place in np.flatnonzero(there).tolist():
            try:
                numbers[place] = one.of(first + place)
            except (SampleError, ValueError, LookupError, TypeError) as error:
                broken.setdefault(place, error)
        return numbers


def part_sizes(index: PackedIndex, part: str, first: int, stop: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the bytes of a part, or of all, for neighbouring samples, int64 ``[n]``, and whether it exists, bool."""
    rows = index.samples[first : stop + 1][:, 0]
    parts = index.parts[rows[0] : rows[-1]]
    owner = np.repeat(np.arange(stop - first), np.diff(rows))
    sizes = np.zeros(stop - first, dtype=np.int64)
    there = np.zeros(stop - first, dtype=bool)
    if part == ALL_PARTS:
        np.add.at(sizes, owner, parts[:, 1])
        return sizes, ~there
    chosen = parts[:, 2] == index.part_names.index(part)
    sizes[owner[chosen]] = parts[chosen, 1]
    there[owner[chosen]] = True
    return sizes, there


def _split_field(text: str, source: WebdatasetSource, option: str) -> tuple[str, tuple[str, ...]]:
    """Split a text into a part and the steps into it. Part names may have dots; the longest matching name is used."""
    words = [word for word in _STEP.sub(r".\1", text).split(".") if word]
    for length in range(len(words), 0, -1):
        name = ".".join(words[:length])
        if name in source.part_names:
            return name, tuple(words[length:])
    names = sorted(source.part_names)
    raise UsageError(
        f"{option} {text}: no sample has such a part, so nothing is stored",
        where=source.path,
        fix=did_you_mean(words[0] if words else text, names, f"the parts are: {listed(names, 20)}", always=True),
    )


def _first_dimension(head: bytes) -> int:
    file = io.BytesIO(head)
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape = read(file)[0]
    if not shape:
        raise SampleError("the array is a single number, which has no first dimension")
    return int(shape[0])


def _length(value: Any, access: Access) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, (list, str, bytes)) or (isinstance(value, np.ndarray) and value.ndim):
        return len(value)
    raise SampleError(f"{access} is a {type(value).__name__}, which has no length")
