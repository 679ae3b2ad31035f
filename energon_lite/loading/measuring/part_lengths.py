"""Lengths that need no task encoder: of a part as it is stored.

==========================  ==========================================================================================
``--length-field``          the length of a sample
==========================  ==========================================================================================
``txt``, any part's name    bytes of the part, as the index knows them; nothing is read
``npy``                     first dimension of the array; only its header is read
``json.meta.tokens``        a value inside a decoded part: a whole number is the length, a list has as many as it has
                            items, a text as many as it has characters
==========================  ==========================================================================================
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from energon_lite.errors import SampleError, UsageError, did_you_mean, listed
from energon_lite.hooks import HookContext, TaskEncoder
from energon_lite.loading.makers.leaf import Leaf
from energon_lite.loading.makers.outcomes import Address, Rejected
from energon_lite.loading.makers.sample_length import SampleLength
from energon_lite.loading.measuring.measured_columns import Block, MeasuredColumns
from energon_lite.loading.measuring.pipeline import MeasuringPipeline
from energon_lite.loading.measuring.report import Maker, MeasureReport
from energon_lite.loading.measuring.run import measure
from energon_lite.order.hashing import hash_text
from energon_lite.storage.index.columns import FAILED
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.read.sample_reader import SampleReader
from energon_lite.storage.read.webdataset import WebdatasetSource
from energon_lite.storage.samples.decoding import SampleDecoder
from energon_lite.storage.samples.field_map import Access
from energon_lite.storage.samples.sample_loader import SampleLoader
from energon_lite.storage.sharded_job.job import Progress

__all__ = ["measure_parts"]

#: The header of a .npy file is smaller than this, unless it has hundreds of fields.
_NPY_HEADER = 4096
_STEP = re.compile(r"\[([^\[\]]+)\]")


def measure_parts(
    root: str,
    field: str,
    *,
    command: str = "",
    workers: int | None = None,
    progress: Progress | None = None,
) -> MeasureReport:
    """Store the column ``length`` of a prepared folder, by what is stored in its shards.

    A sample without the part, or whose part cannot be read, has length 0, and counts as failed.

    Args:
        root: the folder.
        field: see the module's table; ``json[meta][tokens]`` means the same as ``json.meta.tokens``.
        command: what the user runs to do this again.
        workers: processes, where parts are read; None: one per core.
        progress: called with the number of samples that are done, of all, and a few words, where parts are read.

    Raises:
        UsageError: no sample has such a part.
    """
    source = WebdatasetSource.open(root)
    part, steps = _split_field(field, source)
    maker = Maker({"by": "prepare", "length": ".".join([part, *steps])}, command=command)
    if steps or part.rpartition(".")[2] == "npy":
        pipeline = _PartPipeline(Leaf(root, source, SampleLoader(), hash_text(source.fingerprint)), part, steps)
        return measure(pipeline, maker, flags=False, workers=workers, progress=progress)
    return _store_sizes(source, part, maker)


def _split_field(field: str, source: WebdatasetSource) -> tuple[str, tuple[str, ...]]:
    """Part and steps into it. Part names may have dots: the longest name that fits is meant."""
    words = [word for word in _STEP.sub(r".\1", field).split(".") if word]
    for length in range(len(words), 0, -1):
        name = ".".join(words[:length])
        if name in source.part_names:
            return name, tuple(words[length:])
    names = sorted(source.part_names)
    raise UsageError(
        f"--length-field {field}: no sample has such a part, so no lengths are stored",
        where=source.path,
        fix=did_you_mean(words[0] if words else field, names, f"the parts are: {listed(names, 20)}", always=True),
    )


def _store_sizes(source: WebdatasetSource, part: str, maker: Maker) -> MeasureReport:
    columns, blocks = MeasuredColumns(source, maker, flags=False), partial(_sizes, source.index, part)
    report = MeasureReport(source.path, len(source.index.shard_names), written=columns.paths)
    for block in blocks():
        report.add(*block)
    if report.failed:
        report.reasons = ((report.failed, "read", f"there is no part {part!r}", False),)
    columns.write(blocks, report.longest)
    return report


def _sizes(index: PackedIndex, part: str) -> Iterator[Block]:
    """For each shard the sizes of one part, and the flags: a sample without it counts as failed."""
    number = index.part_names.index(part)
    for first, stop in pairwise(index.shards[:, 3].tolist()):
        rows = index.samples[first : stop + 1][:, 0]
        parts = index.parts[rows[0] : rows[-1]]
        owner = np.repeat(np.arange(stop - first), np.diff(rows))
        chosen = parts[:, 2] == number
        sizes, flags = np.zeros(stop - first, dtype=np.int64), np.full(stop - first, FAILED, dtype=np.uint8)
        sizes[owner[chosen]], flags[owner[chosen]] = parts[chosen, 1], 0
        yield sizes, flags


class _PartPipeline(MeasuringPipeline):
    """Reads one part of each sample, as little of it as will do."""

    def __init__(self, leaf: Leaf, part: str, steps: tuple[str, ...]):
        encoder = TaskEncoder()
        super().__init__(leaf, encoder, SampleLength(encoder, "value"))
        self._access, self._decoder = Access(part, steps), SampleDecoder(image_decode=None)
        assert isinstance(leaf.source, WebdatasetSource)  # others have no parts to be looked for
        self._reader = SampleReader(leaf.source, frozenset({part}))

    def _lengths(self, addresses: Sequence[Address], context: HookContext) -> Iterator[int | Rejected]:
        (leaf,) = self.leaves
        for _, index, _ in addresses:
            key = leaf.source.key(index)
            try:
                yield self.samples.guarded("read", leaf.name, key, None, self._length_of, index)
            except Rejected as rejected:
                yield rejected

    def _length_of(self, index: int) -> int:
        part, steps = self._access.part, self._access.steps
        data = self._reader.sample(index).parts.get(part) if steps else self._reader.peek(index, part, _NPY_HEADER)
        if data is None:
            raise SampleError(f"there is no part {part!r}")
        if not steps:
            return _first_dimension(data)
        return _length(self._access.follow({part: self._decoder.decode(part, data)}), self._access)


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
