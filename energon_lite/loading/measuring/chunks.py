"""Chunks of neighbouring samples of a shard, as units of work of measuring, and their results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from energon_lite.loading.measuring.measured_columns import Maker
from energon_lite.loading.measuring.values import Values
from energon_lite.storage.index.column_file import Ragged, shard_table
from energon_lite.storage.index.columns import FAILED
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.sharded_job.work import Arrays, Table, Work

__all__ = ["CHUNK", "Chunk", "ChunkWork", "Measured", "chunks_of"]

#: Samples in a chunk: the work that each worker loses, at most, when a run is killed.
CHUNK = 256
#: Largest number of result files of a measuring, apart from a few per shard: large data sets have larger chunks.
_MOST_FILES = 1 << 16
#: Version of the format of the results.
_FORMAT = 1


@dataclass(frozen=True)
class Chunk:
    """Neighbouring samples of a shard, from ``start`` to ``stop``, counted over the whole data set."""

    row: int
    start: int
    stop: int


def chunks_of(index: PackedIndex, rows: Sequence[int], least: int | None = None) -> list[Chunk]:
    """Return the chunks of some shards of an index, of at least ``least`` samples (256). No chunk crosses shards.

    Example:
        >>> chunks_of(index, [0, 1])            # of two shards with 300 and 10 samples
        [Chunk(row=0, start=0, stop=256), Chunk(row=0, start=256, stop=300), Chunk(row=1, start=300, stop=310)]
    """
    size = max(CHUNK if least is None else least, -(-len(index) // _MOST_FILES))
    bounds = index.shards[:, 3].tolist()
    return [
        Chunk(row, start, min(start + size, bounds[row + 1]))
        for row in rows
        for start in range(bounds[row], bounds[row + 1], size)
    ]


@dataclass
class Measured:
    """Results of measuring a chunk.

    Args:
        values: values of its samples.
        reasons: ``[stage, reason, skipped, key]`` of each sample that was skipped or failed.
    """

    values: Values
    reasons: list[list[Any]] = field(default_factory=list)


class ChunkWork(Work[Chunk, Measured]):
    """Measuring of chunks of a data set by one maker, in the workers of the loader. Tables have the number of failed
    samples."""

    def __init__(self, folder: str, index: PackedIndex, maker: Maker):
        super().__init__(folder)
        self._maker = maker
        self._shards = index.shard_names
        self._identities = shard_table(index)[:, :4].tolist()
        self._bounds = index.shards[:, 3].tolist()

    def name(self, unit: Chunk) -> str:
        first = self._bounds[unit.row]
        return f"{self._shards[unit.row]}[{unit.start - first}:{unit.stop - first}]"

    def inputs(self, unit: Chunk) -> list[Any]:
        return [dict(self._maker.settings), self._maker.code, self._identities[unit.row], _FORMAT]

    def belongs(self, unit: Chunk, inputs: list[Any]) -> bool:
        return self._maker.made(inputs[0], inputs[1]) and bool(inputs[2:] == [self._identities[unit.row], _FORMAT])

    def pack(self, result: Measured) -> tuple[dict[str, Any], Arrays]:
        values = result.values
        reasons = np.frombuffer(json.dumps(result.reasons).encode(), dtype=np.uint8)
        arrays = {"lengths": values.lengths, "flags": values.flags, "reasons": reasons}
        arrays |= {f"column {name}": column for name, column in values.columns.items()}
        for name, rows in values.ragged.items():
            arrays |= {f"counts {name}": rows.counts, f"values {name}": rows.values}
        return {"failed": int((values.flags == FAILED).sum()), "shapes": values.shapes()}, arrays

    def unpack(self, table: Table, arrays: Arrays) -> Measured:
        values = Values(arrays["lengths"], arrays["flags"])
        for name, width in table["shapes"].items():
            if width:
                values.ragged[name] = Ragged(arrays[f"counts {name}"], arrays[f"values {name}"])
            else:
                values.columns[name] = arrays[f"column {name}"]
        return Measured(values, json.loads(arrays["reasons"].tobytes()))
