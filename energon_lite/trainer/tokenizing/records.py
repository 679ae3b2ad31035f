"""Records of JSONL, text and Parquet files, in blocks that processes read independently.

A block is a range of a file (or some small files) with about as many records as a shard should have. The division into
blocks depends on the files alone, so blocks can be processed in any order, on any number of processes, and repeatedly.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from energon_lite.errors import DatasetError, UsageError

#: Most bytes per read.
_CHUNK = 1 << 24
#: Most rows of Parquet that are Python objects at a time; those of a row group may not fit into memory.
_ROWS = 1000
#: Kind of a file by its suffix.
KINDS = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl"),
    **dict.fromkeys((".txt", ".text", ".md", ".py"), "text"),
    ".parquet": "parquet",
}

#: The one field of a text file's record.
TEXT_FIELD = "content"


class Record(NamedTuple):
    """A record: file number, number in the file from 1, and its fields, or the reason why there are none."""

    file: int
    number: int
    fields: dict[str, Any] | None
    problem: str = ""


@dataclass(frozen=True)
class Block:
    """A range of records that one process reads at once.

    Args:
        kind: ``jsonl``, ``text`` (a record is a file), ``lines`` (a record is a line of text) or ``parquet``.
        paths: the file; for ``text``, any number of files.
        file: number of the (first) file among all files.
        start, stop: byte range of the file, or row groups of a Parquet file.
        first: number of the first record in the file, from 1.
    """

    kind: str
    paths: tuple[str, ...]
    file: int
    start: int = 0
    stop: int = 0
    first: int = 1


def find_blocks(paths: Sequence[str], *, records: int, text_records: str = "file", first_file: int = 0) -> list[Block]:
    """Divide files into blocks.

    Args:
        paths: files, in order.
        records: number of records in a block; Parquet files are divided between row groups only.
        text_records: the record of a text file: ``file`` or ``line``.
        first_file: number of the first file.

    Raises:
        UsageError: a file is of an unknown kind.
    """
    blocks: list[Block] = []
    texts: list[tuple[int, str]] = []
    for number, path in enumerate(paths, start=first_file):
        kind = kind_of(path)
        if kind == "text" and text_records == "file":
            texts.append((number, path))
        elif kind == "parquet":
            blocks += _parquet_blocks(path, records, number)
        else:
            blocks += _line_blocks(path, records, number, "lines" if kind == "text" else kind)
    for start in range(0, len(texts), records):
        part = texts[start : start + records]
        blocks.append(Block("text", tuple(path for _, path in part), part[0][0]))
    return blocks


def kind_of(path: str) -> str:
    """Return ``jsonl``, ``text`` or ``parquet``, by the file's name.

    Raises:
        UsageError: the kind is unknown.
    """
    kind = KINDS.get(os.path.splitext(path)[1].lower())
    if kind is None:
        raise UsageError(
            f"{os.path.basename(path)} is not of a kind that is known",
            fix="give files named " + ", ".join(f"*{suffix}" for suffix in KINDS),
        )
    return kind


def read_block(block: Block) -> Iterator[Record]:
    """Yield the records of a block, in order. A line that is no record is yielded with its problem.

    Raises:
        DatasetError: the file has become shorter.
    """
    if block.kind == "parquet":
        yield from _read_parquet(block)
    elif block.kind == "text":
        for offset, path in enumerate(block.paths):
            with open(path, "rb") as file:
                yield _text_record(block.file + offset, 1, file.read())
    else:
        yield from _read_lines(block)


def _line_blocks(path: str, records: int, number: int, kind: str) -> list[Block]:
    """Divide a file at every ``records``-th end of a line."""
    cuts = [0]
    lines = 0
    position = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            ends = np.flatnonzero(np.frombuffer(chunk, dtype=np.uint8) == 10)
            # Ends of the lines with numbers records, 2 * records, ... in this chunk.
            chosen = ends[records - 1 - lines % records :: records]
            cuts += (chosen + (position + 1)).tolist()
            lines, position = lines + len(ends), position + len(chunk)
    if cuts[-1] < position:
        cuts.append(position)
    return [
        Block(kind, (path,), number, start, stop, block * records + 1)
        for block, (start, stop) in enumerate(pairwise(cuts))
    ]


def _read_lines(block: Block) -> Iterator[Record]:
    with open(block.paths[0], "rb") as file:
        file.seek(block.start)
        data = file.read(block.stop - block.start)
    if len(data) < block.stop - block.start:
        raise DatasetError(
            "the file has become shorter", where=block.paths[0], fix="start again with the file as it is"
        )
    record = _text_record if block.kind == "lines" else _json_record
    for number, line in enumerate(data.split(b"\n"), start=block.first):
        if line.strip():
            yield record(block.file, number, line.rstrip(b"\r"))


def _json_record(file: int, number: int, data: bytes) -> Record:
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        return Record(file, number, None, f"not JSON: {error}")
    if not isinstance(fields, dict):
        return Record(file, number, None, f"not an object but a {type(fields).__name__}")
    return Record(file, number, fields)


def _text_record(file: int, number: int, data: bytes) -> Record:
    try:
        return Record(file, number, {TEXT_FIELD: data.decode("utf-8-sig")})
    except UnicodeDecodeError as error:
        return Record(file, number, None, f"not UTF-8: {error.reason} at byte {error.start}")


def _parquet_blocks(path: str, records: int, number: int) -> list[Block]:
    with _parquet(path) as file:
        sizes = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
    blocks = []
    start = 0
    first = 1
    rows = 0
    for group, size in enumerate(sizes, start=1):
        rows += size
        if rows >= records or group == len(sizes):
            blocks.append(Block("parquet", (path,), number, start, group, first))
            start = group
            first = first + rows
            rows = 0
    return blocks


def _read_parquet(block: Block) -> Iterator[Record]:
    with _parquet(block.paths[0]) as file:
        batches = file.iter_batches(batch_size=_ROWS, row_groups=range(block.start, block.stop))
        rows = (fields for batch in batches for fields in batch.to_pylist())
        for number, fields in enumerate(rows, start=block.first):
            yield Record(block.file, number, fields)


def _parquet(path: str) -> Any:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise UsageError(
            "reading Parquet files needs pyarrow", where=path, fix="pip install 'energon-lite[parquet]'"
        ) from None
    try:
        return ParquetFile(path)
    except (ArrowException, OSError) as error:
        raise DatasetError(f"the Parquet file cannot be read: {error}", where=path, fix="check the file") from error
