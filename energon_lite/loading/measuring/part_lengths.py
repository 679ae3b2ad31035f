"""Lengths and other columns that are made of the stored parts, without a task encoder.

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

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise

import numpy as np

from energon_lite.errors import UsageError
from energon_lite.hooks import HookContext, TaskEncoder
from energon_lite.loading.makers.leaf import Leaf
from energon_lite.loading.makers.outcomes import Address, Rejected
from energon_lite.loading.makers.sample_length import SampleLength
from energon_lite.loading.measuring.measured_columns import Maker, MeasuredColumns, MeasureReport
from energon_lite.loading.measuring.part_columns import PartColumns, PartField, RequestedColumns, part_sizes
from energon_lite.loading.measuring.run import measure
from energon_lite.loading.measuring.runner import MeasuringRunner
from energon_lite.loading.measuring.values import Costs, Values
from energon_lite.order.hashing import hash_text
from energon_lite.storage.index.column_file import check_column_name
from energon_lite.storage.index.columns import CHECKSUMS, FAILED, LENGTH, SKIP
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.read.webdataset import WebdatasetSource
from energon_lite.storage.samples.sample_loader import SampleLoader
from energon_lite.storage.sharded_job.job import Progress
from energon_lite.storage.sharded_job.ranks import Ranks

__all__ = ["CRC32", "measure_parts", "part_columns", "part_settings"]

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
        ranks, workers, again, progress: see :func:`~energon_lite.loading.measuring.run.measure`.

    Raises:
        UsageError: no sample has such a part, or the name of a column is not allowed.
    """
    source = WebdatasetSource.open(root, verified=False)
    length = None if field is None else PartField(source, field, "--length-field")
    settings = {"by": by, **({} if length is None else {"length": str(length)})}
    parts = part_columns(source, columns or {}, others)
    maker = Maker({**settings, **part_settings(columns or {}, others)}, command=command)
    if parts is None and length is not None and length.by_index:
        return _store_sizes(source, length.part, maker, name)
    runner = _PartRunner(Leaf(root, source, SampleLoader(), hash_text(source.fingerprint)), length, parts)
    return measure(
        runner,
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
    source: WebdatasetSource, columns: Mapping[str, str], others: Sequence[RequestedColumns]
) -> PartColumns | None:
    """Return the columns made of parts; None: none are requested.

    Raises:
        UsageError: no sample has such a part, or the name of a column is not allowed.
    """
    if not columns and not others:
        return None
    taken = {LENGTH, SKIP, *(name for requested in others for name in requested.names)}
    for name in columns:
        check_column_name(name)
        if name in taken or "." in name or (name == CHECKSUMS and columns[name] != CRC32):
            raise UsageError(f"--column {name}: a column cannot have this name", fix="use another name, without dots")
    fields = {name: PartField(source, text, f"--column {name}=") for name, text in columns.items() if name != CHECKSUMS}
    readers = [requested.open(source) for requested in others]
    return PartColumns(source, fields, readers, checksums=CHECKSUMS in columns)


def _store_sizes(source: WebdatasetSource, part: str, maker: Maker, name: str) -> MeasureReport:
    columns = MeasuredColumns(source, maker, name, flags=False)
    blocks = partial(_sizes, source.index, part)
    report = MeasureReport(source.path, len(source.index.shard_names), written=columns.paths({}))
    for block in blocks():
        report.add(block)
    if report.failed:
        report.reasons = ((report.failed, "read", f"there is no part {part!r}", False),)
    columns.write(blocks, {LENGTH: report.longest}, {}, range(len(source.index.shard_names)))
    return report


def _sizes(index: PackedIndex, part: str) -> Iterator[Values]:
    """Yield for each shard the sizes of one part, and the flags: a sample without it counts as failed."""
    for first, stop in pairwise(index.shards[:, 3].tolist()):
        sizes, there = part_sizes(index, part, first, stop)
        yield Values(sizes, np.where(there, 0, FAILED).astype(np.uint8))


class _PartRunner(MeasuringRunner):
    """Runner that reads the needed parts of each sample, and no more of them than needed."""

    def __init__(self, leaf: Leaf, length: PartField | None, parts: PartColumns | None):
        encoder = TaskEncoder()
        super().__init__(leaf, encoder, SampleLength(encoder, "value"), parts)
        self._field = length

    def _measured(
        self, addresses: Sequence[Address], context: HookContext
    ) -> Iterator[tuple[int, Costs | None] | Rejected]:
        (leaf,) = self.leaves
        field = self._field
        for _, index, _ in addresses:
            if field is None:
                yield 0, None
                continue
            key = leaf.source.key(index)
            try:
                yield self.guarded("read", leaf.name, key, None, field.of, index), None
            except Rejected as rejected:
                yield rejected
