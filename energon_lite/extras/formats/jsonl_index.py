"""The index of a JSONL file: each line that is not blank is a sample with one part, ``json``."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from energon_lite.documents.paths import is_url
from energon_lite.errors import DatasetError, MissingShardError, NotPreparedError, ShardChangedError, counted
from energon_lite.storage.files.byte_ranges import RangedFile, file_version, found_at, read_bytes, size_of, url_files
from energon_lite.storage.files.shard_store import head_checksum
from energon_lite.storage.index.nv_meta import BOM, JSONL_PART, folder_and_name
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.tar_headers import BLOCK
from energon_lite.storage.tar_members import Int64
from energon_lite.storage.tar_scan import ShardScan, unchanged_file

_log = logging.getLogger(__name__)

#: Bytes of a buffer.
_CHUNK = 16 << 20
#: Codes of single bytes.
_LINE_END = ord("\n")
_RETURN = ord("\r")
_OPEN = ord("{")
_CLOSE = ord("}")


class Stream(Protocol):
    """A binary stream that is read from beginning to end."""

    def read(self, size: int, /) -> bytes: ...


@dataclass(frozen=True)
class JsonlIndex:
    """Maker of the index of a file.

    Args:
        path: path or URL of the file.
        scan: finds its lines.
        version: its version at opening, of a file behind a URL.
    """

    path: str
    scan: Callable[[str], ShardScan]
    version: str = ""

    def fits(self, index: PackedIndex) -> bool:
        """Return True if an index belongs to the file in its current state; behind a URL, to that at opening."""
        if self.version:
            return index.uuid == self.version
        try:
            now = os.stat(self.path)
        except OSError:
            return False  # reading the file will raise the error
        then = index.shard_names, index.shards[:-1, 0].tolist(), index.shard_times.tolist()
        return then == ((os.path.basename(self.path),), [now.st_size], [now.st_mtime_ns])

    def make(self) -> PackedIndex:
        """Make the index."""
        scan = self.scan(self.path)
        for note in scan.notes:
            _log.warning("%s: %s", self.path, note)
        return PackedIndex.from_scans([scan], uuid=self.version)


def index_of(path: str) -> JsonlIndex:
    """Return the maker of the index of a file.

    Raises:
        NotPreparedError: there is no such file.
        DatasetError: the store does not answer.
    """
    if is_url(path):
        found = _found(path)
        return JsonlIndex(path, scan_remote_jsonl, f"{size_of(path, found)} {file_version(found)}")
    _check_there(path)
    return JsonlIndex(path, scan_jsonl)


def _check_there(path: str) -> None:
    if not os.path.isfile(path):
        raise NotPreparedError("there is no such JSONL file", where=path, fix="check the path")


def _found(url: str) -> Any:
    """The store's record of a file, whose version is expected from now on."""
    try:
        return found_at(url)
    except MissingShardError:
        raise NotPreparedError("there is no such JSONL file", where=url, fix="check the path") from None


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
    _check_there(path)
    try:
        with open(path, "rb") as file, unchanged_file(file.fileno(), path) as identity:
            return _scan_stream(file, os.path.basename(path), identity)
    except OSError as error:
        raise DatasetError(
            f"the JSONL file cannot be read: {error.strerror or error}", where=path, fix="check permissions and storage"
        ) from error


def _scan_stream(file: Stream, name: str, found: Mapping[str, Any]) -> ShardScan:
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
    notes = (f"{counted(many_odd, 'line')} without a JSON object, such as line {odd[0]}",) if odd else ()
    return _scan(name, headers, rows, found, notes)


def _scan(name: str, headers: Int64, rows: Int64, found: Mapping[str, Any], notes: tuple[str, ...] = ()) -> ShardScan:
    """The scan of lines that start at ``headers``, with texts at ``rows``; keys are the numbers of the lines."""
    keys = [b"%d" % number for number in range(len(rows))]
    return ShardScan(
        name=name,
        end=found["size"],
        headers=headers,
        first_part=np.arange(len(rows) + 1, dtype=np.int64),
        parts=rows,
        part_names=(JSONL_PART,),
        key_offsets=np.cumsum([0, *map(len, keys)], dtype=np.int64),
        keys=b"".join(keys),
        notes=notes,
        **found,
    )


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
    texts, ends, strange = starts.copy(), stops - (data[stops - 1] == _RETURN), []
    # Ordinary lines, without white space around them, need no second look.
    usual = (data[texts] == _OPEN) & (data[ends - 1] == _CLOSE)
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


# -- files behind a URL ---------------------------------------------------------------------------------------------


def scan_remote_jsonl(url: str) -> ShardScan:
    """Scan the lines of a file behind a URL by its ``.idx``, which either library writes; if there is none that fits,
    the file is read once from beginning to end.

    Raises:
        NotPreparedError: there is no such file.
        ShardChangedError: it was written to during the scan.
        DatasetError: the store failed.
    """
    info = _found(url)
    size = size_of(url, info)
    head = read_bytes(url, 0, min(size, BLOCK))
    identity = {"size": size, "head": head_checksum(head), "mtime_ns": 0}
    name = folder_and_name(url)[1]
    starts = _starts(url, size)
    if starts is None:
        _log.warning("%s has no .idx that fits: reading all of its %.0f MiB, once", url, size / 2**20)
        stream = RangedFile(size, partial(read_bytes, url))
        scan = _scan_stream(stream, name, identity)
    else:
        scan = _indexed(url, name, starts, head, identity)
    if _found(url) != info:
        raise ShardChangedError(
            "the file was written to while it was read", where=url, fix="run again when its writer has finished"
        )
    return scan


def _starts(url: str, size: int) -> Int64 | None:
    """Start of each line, and the end of the file; None: there is no ``.idx``, or it belongs to another file."""
    try:
        data = url_files(url).read_file(f"{url}.idx")
    except FileNotFoundError:
        return None
    starts = np.frombuffer(data[: len(data) // 8 * 8], dtype="<u8").astype(np.int64)
    if len(data) % 8 or not len(starts) or starts[-1] != size or starts[0] < 0 or (np.diff(starts) <= 0).any():
        _log.warning("%s.idx does not belong to the file as it is", url)
        return None
    return starts


def _indexed(url: str, name: str, starts: Int64, head: bytes, found: Mapping[str, Any]) -> ShardScan:
    """Make the scan from an ``.idx``. A line ends with a line feed; the last one may lack it."""
    size = int(found["size"])
    texts, sizes = starts[:-1].copy(), np.diff(starts) - 1
    if len(texts):
        sizes[-1] += read_bytes(url, size - 1, 1) != b"\n"
        if head[starts[0] :].startswith(BOM):
            texts[0] += len(BOM)
            sizes[0] -= len(BOM)
    rows = np.stack([texts, np.maximum(sizes, 0), np.zeros_like(sizes)], axis=1)
    return _scan(name, starts[:-1], rows, found)
