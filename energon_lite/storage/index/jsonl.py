"""JSONL files as data sets: each line that is not blank is a sample with one part, ``json``.

Such a file is a data set of one shard, itself, and its lines have what samples of a tar have: a key (their number, from
0), an offset and a size. So all code that reads shards works for it unchanged. Files about it are kept next to it, with
its name as prefix: ``chats.jsonl.energon_lite.idx``, and ``chats.jsonl.idx``, which Megatron-Energon reads.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from energon_lite.errors import DatasetError, NotPreparedError, counted
from energon_lite.storage.tar.tar_scan import Int64, ShardScan, unchanged_file

__all__ = [
    *("BOM", "PART", "check_there", "folder_and_name", "folder_of_shards", "is_jsonl"),
    *("line_keys", "scan_jsonl", "scan_lines"),
]

#: The name of the only part of each sample.
PART = "json"
#: Bytes of a buffer.
_CHUNK = 16 << 20
#: The byte order mark of UTF-8.
BOM = b"\xef\xbb\xbf"
#: Codes of single bytes.
_LINE_END = ord("\n")
_RETURN = ord("\r")
_OPEN = ord("{")
_CLOSE = ord("}")


class Stream(Protocol):
    """A binary stream that is read from beginning to end."""

    def read(self, size: int, /) -> bytes: ...


def is_jsonl(path: str) -> bool:
    """Return True for the path of a JSONL file."""
    return path.endswith(".jsonl")


def folder_of_shards(root: str) -> str:
    """The folder that names of shards are relative to: the data set's own, or the folder of a JSONL file."""
    return folder_and_name(root)[0] if is_jsonl(root) else root


def folder_and_name(path: str) -> tuple[str, str]:
    """Split a path or URL into folder and name, which :func:`os.path.join` joins to the same path again.

    Example:
        >>> folder_and_name("s3://bucket/chats.jsonl"), folder_and_name("memory://chats.jsonl")
        (('s3://bucket', 'chats.jsonl'), ('memory://', 'chats.jsonl'))
    """
    folder, name = os.path.split(path)
    return (f"{folder}//" if folder.endswith(":") else folder), name


def check_there(path: str) -> None:
    """Raise NotPreparedError if there is no such file."""
    if not os.path.isfile(path):
        raise NotPreparedError("there is no such JSONL file", where=path, fix="check the path")


def scan_jsonl(path: str) -> ShardScan:
    """Find the lines of a file; at about 750 MB a second.

    White space around a line does not belong to it, nor does a byte order mark at the start. A line that is no JSON
    object is a sample too, which will fail (and be counted) when it is decoded; the scan notes it.

    Raises:
        NotPreparedError: there is no such file.
        DatasetError: it cannot be read.
        ShardChangedError: it was written to during the scan.

    Example:
        >>> scan = scan_jsonl("chats.jsonl")
        >>> scan.samples, scan.all_keys()[0], scan.part_names
        (200, '0', ('json',))
    """
    check_there(path)
    try:
        with open(path, "rb") as file, unchanged_file(file.fileno(), path) as identity:
            return scan_lines(file, os.path.basename(path), identity)
    except OSError as error:
        raise DatasetError(
            f"the JSONL file cannot be read: {error.strerror or error}", where=path, fix="check permissions and storage"
        ) from error


def scan_lines(file: Stream, name: str, found: Mapping[str, Any]) -> ShardScan:
    """Find the lines of an open file; see :func:`scan_jsonl`.

    Args:
        file: a stream at its beginning.
        name: name of the file, without its folder.
        found: its size, head and time of its last change, as fields of :class:`ShardScan`.
    """
    nothing = np.zeros(0, dtype=np.int64)
    starts = [nothing]
    parts = [nothing.reshape(0, 3)]
    odd = list[int]()
    many_odd = 0
    lines = 0
    for offset, buffer, stops in _buffers(file):
        first, texts, sizes, strange = _lines(buffer, stops, not offset)
        kept = sizes > 0
        starts.append(first[kept] + offset)
        parts.append(np.stack([texts + offset, sizes, np.zeros_like(sizes)], axis=1)[kept])
        odd += [lines + line + 1 for line in strange[:1]]
        many_odd, lines = many_odd + len(strange), lines + len(stops)
    headers, rows = np.concatenate(starts), np.concatenate(parts)
    headers[:1] = 0  # as in Energon's index
    key_offsets, keys = line_keys(len(rows))
    return ShardScan(
        name=name,
        end=found["size"],
        headers=headers,
        first_part=np.arange(len(rows) + 1, dtype=np.int64),
        parts=rows,
        part_names=(PART,),
        key_offsets=key_offsets,
        keys=keys,
        notes=(f"{counted(many_odd, 'line')} without a JSON object, such as line {odd[0]}",) if odd else (),
        **found,
    )


def line_keys(count: int) -> tuple[Int64, bytes]:
    """Return the keys of ``count`` lines, which are their numbers: the offset of each, and the keys as one text."""
    keys = [b"%d" % number for number in range(count)]
    return np.cumsum([0, *map(len, keys)], dtype=np.int64), b"".join(keys)


def _buffers(file: Stream) -> Iterator[tuple[int, bytes, Int64]]:
    """Read the file in buffers of whole lines: the offset of each, its bytes, and the end of each line in it."""
    rest, offset = b"", 0
    while chunk := file.read(max(_CHUNK, len(rest))):
        buffer = rest + chunk
        stops = np.flatnonzero(np.frombuffer(buffer, np.uint8) == _LINE_END)
        end = int(stops[-1]) + 1 if len(stops) else 0
        rest = buffer[end:]
        if end:
            yield offset, buffer[:end], stops
            offset += end
    if rest:
        yield offset, rest, np.array([len(rest)])


def _lines(buffer: bytes, stops: Int64, is_first: bool) -> tuple[Int64, Int64, Int64, list[int]]:
    """Start of each line of a buffer, start and size of its text, and the numbers of lines that are no objects."""
    data = np.frombuffer(buffer, np.uint8)
    starts = np.concatenate([[0], stops[:-1] + 1])
    texts, ends = starts.copy(), stops - (data[stops - 1] == _RETURN) * (stops > starts)
    filled, strange = ends > starts, []
    # Ordinary lines, without white space around them, need no second look.
    usual = filled & (data[texts * filled] == _OPEN) & (data[(ends - 1) * filled] == _CLOSE)
    for line in np.flatnonzero(~usual).tolist():
        start, text = int(starts[line]), buffer[starts[line] : stops[line]]
        if is_first and not line and text.startswith(BOM):
            start, text = start + len(BOM), text[len(BOM) :]
        start += len(text) - len(text.lstrip())
        text = text.strip()
        texts[line], ends[line] = start, start + len(text)
        if text and not (text.startswith(b"{") and text.endswith(b"}")):
            strange.append(line)
    return starts, texts, ends - texts, strange
