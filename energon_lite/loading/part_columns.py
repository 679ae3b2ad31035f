"""Columns that are made of the stored parts of samples, without a task encoder: lengths, sizes of parts, values in
them, checksums, and columns of guests.

==========================  ==========================================================================================
``--length-field``          the length of a sample
==========================  ==========================================================================================
``txt``, any part's name    bytes of the part, as the index knows them; nothing is read
``npy``                     first dimension of the array; only its header is read
``json.meta.tokens``        a value inside a decoded part: a whole number is the length, a list has as many as it has
                            items, a text as many as it has characters
==========================  ==========================================================================================

Other columns (``--column name=...``) are made in the same way; ``*`` stands for the bytes of all parts.
"""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from energon_lite.errors import SampleError, UsageError, did_you_mean, listed
from energon_lite.hooks import TaskEncoder
from energon_lite.loading.makers.leaf import Leaf
from energon_lite.loading.measured_columns import Maker, MeasureReport
from energon_lite.loading.measuring import measure
from energon_lite.loading.measuring_runner import ColumnReader, MeasuringRunner, Values
from energon_lite.order.hashing import hash_text
from energon_lite.storage.index.column_file import LENGTH, Ragged, check_column_name
from energon_lite.storage.index.columns import CHECKSUMS, SKIP
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.read.sample_reader import SampleReader
from energon_lite.storage.read.webdataset import WebdatasetSource
from energon_lite.storage.samples.decoding import SampleDecoder
from energon_lite.storage.samples.field_map import Access, SampleLoader
from energon_lite.storage.sharded_job import Progress, Ranks

#: Stands for all parts in place of a part's name.
ALL_PARTS = "*"

#: Bytes that contain the header of a .npy file, unless it has hundreds of fields.
_NPY_HEADER = 4096
#: A step into a part, in brackets.
_STEP = re.compile(r"\[([^\[\]]+)\]")
#: Field of the column of checksums.
CRC32 = "crc32"
#: Samples whose headers are read together.
_TOGETHER = 2048


def measure_parts(
    root: str,
    field: str | None,
    *,
    columns: Mapping[str, str] | None = None,
    others: Sequence[RequestedColumns] = (),
    name: str = "",
    by: str = "prepare",
    command: str = "",
    ranks: Ranks | None = None,
    workers: int | None = None,
    again: bool = False,
    progress: Progress | None = None,
) -> MeasureReport:
    """Store columns of a prepared folder, made of the stored parts.

    A sample without the part of its length, or with a part that cannot be read, counts as failed, and has length 0.

    Args:
        root: the folder.
        field: field of the column ``length``, see the module's table; ``json[meta][tokens]`` means the same as
            ``json.meta.tokens``. None: there is no such column.
        columns: further columns: name, and field; ``checksums`` is ``crc32``, of each part.
        others: columns of guests.
        name: prefix of the columns' names, before a dot.
        by: name of the command that stores them.
        command: command line that stores them again.
        ranks, workers, again, progress: see :func:`~energon_lite.loading.measuring.measure`.

    Raises:
        UsageError: no sample has such a part, or the name of a column is not allowed.
    """
    source = WebdatasetSource.open(root, verified=False)
    length = None if field is None else PartField(source, field, "--length-field")
    settings = {"by": by, **({} if length is None else {"length": str(length)})}
    parts = part_columns(source, columns or {}, others, length)
    maker = Maker({**settings, **part_settings(columns or {}, others)}, command=command)
    leaf = Leaf(root, source, SampleLoader(), hash_text(source.fingerprint))
    encoder: TaskEncoder = TaskEncoder()
    if length is not None and length.by_index:
        encoder.failure_tolerance = 0  # nothing is read, so no file can be damaged: the samples have no such part
    return measure(
        MeasuringRunner(leaf, encoder, None, parts),
        maker,
        name=name,
        flags=False,
        lengths=length is not None,
        ranks=ranks,
        workers=workers,
        again=again,
        progress=progress,
        together=_TOGETHER if length is None or length.by_index else None,
    )


def part_settings(columns: Mapping[str, str], others: Sequence[RequestedColumns]) -> dict[str, object]:
    """Return the settings that decide the columns of :func:`part_columns`, as plain data."""
    settings: dict[str, object] = {"columns": dict(columns)} if columns else {}
    for requested in others:
        settings |= requested.settings
    return settings


def part_columns(
    source: WebdatasetSource,
    columns: Mapping[str, str],
    others: Sequence[RequestedColumns],
    length: PartField | None = None,
) -> PartColumns | None:
    """Return the columns made of parts; None: none are requested. ``length``: that of lengths.

    Raises:
        UsageError: no sample has such a part, or the name of a column is not allowed.
    """
    if not columns and not others and length is None:
        return None
    taken = {LENGTH, SKIP, *(name for requested in others for name in requested.names)}
    for name in columns:
        check_column_name(name)
        if name in taken or "." in name or (name == CHECKSUMS and columns[name] != CRC32):
            raise UsageError(f"--column {name}: a column cannot have this name", fix="use another name, without dots")
    fields = {name: PartField(source, text, f"--column {name}=") for name, text in columns.items() if name != CHECKSUMS}
    readers = [requested.open(source) for requested in others]
    return PartColumns(source, fields, readers, checksums=CHECKSUMS in columns, length=length)


class PartField:
    """A number that is stored in a part of each sample, or the part's size.

    Args:
        source: the whole data set.
        text: see the table above; or ``*``, the bytes of all parts.
        option: command line option of the text, for messages.

    Attributes:
        by_index: the number is in the index, so nothing is read.

    Raises:
        UsageError: no sample has such a part.
    """

    def __init__(self, source: WebdatasetSource, text: str, option: str):
        part, steps = (text, ()) if text == ALL_PARTS else _split_field(text, source, option)
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
        """Return the number of one sample, which has the part, and is read.

        Raises:
            SampleError: there is no number or length in it.
        """
        part = self._access.part
        if not self._access.steps:
            return _first_dimension(self._reader.peek(index, part, _NPY_HEADER))
        decoded = self._decoder.decode(part, self._reader.sample(index).parts[part])
        return _length(self._access.follow({part: decoded}), self._access)


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


@dataclass(frozen=True)
class PartColumns:
    """Columns by parts, for any neighbouring samples of a data set: a :class:`ColumnReader`.

    Args:
        source: the whole data set.
        fields: the stored numbers, by name of the column. A sample without the part has 0.
        readers: readers of further columns.
        checksums: make the column of the crc32 of each part, for which all parts are read.
        length: the stored length, if there is a column of lengths. A sample without the part counts as failed.
    """

    source: WebdatasetSource
    fields: Mapping[str, PartField]
    readers: Sequence[ColumnReader] = ()
    checksums: bool = False
    length: PartField | None = None

    def add(self, first: int, stop: int, values: Values, broken: dict[int, Exception]) -> None:
        """See :class:`ColumnReader`."""
        if self.length is not None:
            values.columns[LENGTH], there = self._numbers(self.length, first, stop, broken)
            for place in np.flatnonzero(~there).tolist():
                broken[place] = SampleError(f"there is no part {self.length.part!r}")
        for name, part_field in self.fields.items():
            values.columns[name], _ = self._numbers(part_field, first, stop, broken)
        for reader in self.readers:
            reader.add(first, stop, values, broken)
        if self.checksums:
            values.columns[CHECKSUMS] = self._sums(first, stop)

    def _sums(self, first: int, stop: int) -> Ragged:
        index = self.source.index
        fetch = self.source.store.fetch
        rows = index.samples[first : stop + 1][:, 0]
        shard = self.source.choice.shards[self.source.locate(first)[0]]
        places = index.parts[rows[0] : rows[-1]][:, :2].tolist()
        # One part is in memory at a time.
        sums = [zlib.crc32(fetch([(shard, offset, size)])[0]) for offset, size in places]
        return Ragged(np.diff(rows), np.array(sums, np.uint32).view(np.int32).astype(np.int64)[:, None])

    def _numbers(
        self, one: PartField, first: int, stop: int, broken: dict[int, Exception]
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the number of each sample, or 0, and whether the sample has the part."""
        numbers, there = part_sizes(self.source.index, one.part, first, stop)
        for place in () if one.by_index else np.flatnonzero(there).tolist():
            numbers[place] = 0
            try:
                numbers[place] = one.of(first + place)
            except Exception as error:  # the runner decides what ends the work
                broken.setdefault(place, error)
        return numbers, there


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
