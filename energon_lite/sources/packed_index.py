"""One memory-mapped index file for a whole data set: where every part of every sample is.

Opening costs the same for a thousand samples as for a billion: nothing per sample is touched until it is read, and all
processes of a machine share the pages. A sample is found with three small look-ups, without parsing tar headers. In a
large index these read the few bytes they need instead of touching the mapping: a touched page brings its neighbours
along, so that a few thousand look-ups would make gigabytes appear in the memory of each worker.

Format (little endian, version 1)::

    bytes 0..39    magic "ENRGLIDX", u32 version, u32 crc32 of the table, u64 offset and u64 length of the table
    sections       each starts at a multiple of 64
    table          JSON: {"uuid", "digest", "part_names", "scan", "notes", "sections": {name: [dtype, shape, offset]}}

======================  ======================  ===================================================================
section                 shape                   contents
======================  ======================  ===================================================================
``shard_names``         bytes                   names relative to the data set, separated by NUL
``shards``              int64 [shards + 1, 5]   file size, head checksum, end of the last member, first sample, 0
``samples``             int64 [samples + 1, 3]  first part, start of the key, byte of the first tar header
``parts``               int64 [parts, 3]        payload offset, payload size, number of the part name
``keys``                bytes                   keys in UTF-8, without separator
``shard_times``         int64 [shards]          time of each file's last change in ns, 0 if unknown
======================  ======================  ===================================================================

The last rows of ``shards`` and ``samples`` close the last ranges. ``uuid`` is the text of ``index.uuid`` at the time
of writing, by which an index that another tool has made stale is recognised; ``digest`` is a hash of what the samples
are: of all sections but times. ``notes`` of the table has what looked odd by shard, and ``scan`` the version of the
rules by which samples were found, so that the next preparation can take unchanged shards from here. Values per sample,
such as lengths, stand in files of their own (:mod:`energon_lite.sources.columns`): measuring leaves the index alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon_lite.errors import DataIndexError
from energon_lite.sources.atomic_file import write_bytes
from energon_lite.sources.file_mapping import map_file
from energon_lite.sources.tar_headers import BLOCK
from energon_lite.sources.tar_scan import SCAN_RULES, Int64, ShardScan, head_checksum

__all__ = ["PackedIndex"]

_HEADER = struct.Struct("<8sIIQQ")
_MAGIC = b"ENRGLIDX"
_VERSION = 1
_ALIGN = 64
#: Bytes of an index whose rows are looked up in the mapping, a few times faster than by reading.
_LARGEST_MAPPED = 128 << 20
_CURE = "remove the file (it is made again when the data set is opened) or run `energon-lite prepare` again"


class PackedIndex:
    """The index in memory, freshly made (:meth:`from_scans`) or mapped from its file (:meth:`open`).

    Attributes:
        shard_names: relative paths, in the order of the data set.
        shards: ``[shards + 1, 5]``, see the module's table.
        samples: ``[samples + 1, 3]``.
        parts: ``[parts, 3]``.
        part_names: what the part numbers stand for.
        shard_times: ``[shards]``, time of each file's last change in ns, 0 if unknown.
        uuid: the ``index.uuid`` this index belongs to.
        digest: hash of the contents; equal data give an equal digest on every machine.
        notes: what looked odd, by shard.
        rules: version of the rules by which samples were found, 0 if unknown.
    """

    def __init__(
        self,
        sections: Mapping[str, NDArray[Any]],
        part_names: Sequence[str],
        uuid: str,
        digest: str,
        notes: Mapping[str, Sequence[str]] | None = None,
        rules: int = SCAN_RULES,
    ):
        self._sections = dict(sections)
        self.shards: Int64 = sections["shards"]
        self.samples: Int64 = sections["samples"]
        self.parts: Int64 = sections["parts"]
        self.part_names = tuple(part_names)
        self.uuid, self.digest = uuid, digest
        self.notes, self.rules = dict(notes or {}), rules
        names = sections["shard_names"].tobytes().decode("utf-8", "surrogateescape")
        self.shard_names: tuple[str, ...] = tuple(names.split("\0")) if len(self.shards) > 1 else ()
        times = sections.get("shard_times")
        self.shard_times: Int64 = np.zeros(len(self.shards) - 1, dtype=np.int64) if times is None else times
        # Memoryviews give Python ints several times faster than numpy gives scalars.
        self._samples, self._parts = _flat(self.samples), _flat(self.parts)
        self._keys = _flat(sections["keys"])

    def __len__(self) -> int:
        return len(self.samples) - 1

    @property
    def shard_counts(self) -> dict[str, int]:
        """Samples per shard, in order."""
        return dict(zip(self.shard_names, np.diff(self.shards[:, 3]).tolist(), strict=True))

    def key(self, sample: int) -> str:
        """The key of a sample, counted over the whole data set."""
        samples = self._samples
        return str(self._keys[samples[3 * sample + 1] : samples[3 * sample + 4]], "utf-8", "surrogateescape")

    def key_between(self, start: int, stop: int) -> str:
        """The key whose bytes lie between two places of the section of keys."""
        return str(self._keys[start:stop], "utf-8", "surrogateescape")

    def part_rows(self, sample: int) -> list[int]:
        """Offset, size and name number of each part of a sample, one after the other in one flat list."""
        samples = self._samples
        return self._parts[3 * samples[3 * sample] : 3 * samples[3 * sample + 3]].tolist()

    def keys(self, first: int, stop: int) -> Iterator[str]:
        """The keys of a range of samples."""
        return (self.key(sample) for sample in range(first, stop))

    @classmethod
    def from_scans(cls, scans: Sequence[ShardScan], *, uuid: str = "") -> PackedIndex:
        """Put the scans of all shards together, in the order given.

        Args:
            scans: one per shard.
            uuid: the text of the data set's ``index.uuid``.
        """
        numbers: dict[str, int] = {}
        shards = np.zeros((len(scans) + 1, 5), dtype=np.int64)
        samples, parts = [], []
        part_count = key_bytes = sample_count = 0
        for row, scan in enumerate(scans):
            shards[row] = (scan.size, scan.head, scan.end, sample_count, 0)
            block = np.stack([scan.first_part[:-1] + part_count, scan.key_offsets[:-1] + key_bytes, scan.headers], 1)
            samples.append(block)
            renumber = np.array([numbers.setdefault(name, len(numbers)) for name in scan.part_names], dtype=np.int64)
            shard_parts = scan.parts.copy()
            shard_parts[:, 2] = renumber[shard_parts[:, 2]] if len(renumber) else 0
            parts.append(shard_parts)
            part_count, key_bytes = part_count + len(scan.parts), key_bytes + len(scan.keys)
            sample_count += scan.samples
        shards[-1, 3] = sample_count
        samples.append(np.array([[part_count, key_bytes, 0]], dtype=np.int64))
        parts.append(np.zeros((0, 3), dtype=np.int64))
        names = "\0".join(scan.name for scan in scans)
        sections: dict[str, NDArray[Any]] = {
            "shard_names": _bytes(names.encode("utf-8", "surrogateescape")),
            "shards": shards,
            "samples": np.concatenate(samples),
            "parts": np.concatenate(parts),
            "keys": _bytes(b"".join(scan.keys for scan in scans)),
            "shard_times": np.array([scan.mtime_ns for scan in scans], dtype=np.int64),
        }
        notes = {scan.name: scan.notes for scan in scans if scan.notes}
        return cls(sections, tuple(numbers), uuid, _digest(sections, tuple(numbers)), notes)

    def scan(self, row: int) -> ShardScan:
        """The scan of the ``row``-th shard, as it was put in."""
        (size, head, end, first, _), stop = self.shards[row].tolist(), int(self.shards[row + 1, 3])
        samples = self.samples[first : stop + 1]
        parts = self.parts[samples[0, 0] : samples[-1, 0]].copy()
        # In a scan part names are numbered in the order in which they come.
        numbers, places, renumbered = np.unique(parts[:, 2], return_index=True, return_inverse=True)
        order = np.argsort(places)
        parts[:, 2] = np.argsort(order)[renumbered.reshape(-1)]
        name = self.shard_names[row]
        return ShardScan(
            name=name,
            size=size,
            head=head,
            end=end,
            headers=samples[:-1, 2].copy(),
            first_part=samples[:, 0] - samples[0, 0],
            parts=parts,
            part_names=tuple(self.part_names[number] for number in numbers[order].tolist()),
            key_offsets=samples[:, 1] - samples[0, 1],
            keys=self._sections["keys"][samples[0, 1] : samples[-1, 1]].tobytes(),
            notes=tuple(self.notes.get(name, ())),
            mtime_ns=int(self.shard_times[row]),
        )

    def write(self, path: str) -> None:
        """Write the index as the file ``path``, atomically."""
        position, places, chunks = _ALIGN, {}, list[bytes | memoryview]()
        for name, array in self._sections.items():
            places[name] = [array.dtype.str, list(array.shape), position]
            padding = -array.nbytes % _ALIGN
            chunks += [_raw(array), bytes(padding)]
            position += array.nbytes + padding
        contents = {
            "uuid": self.uuid,
            "digest": self.digest,
            "part_names": self.part_names,
            "scan": self.rules,
            "notes": self.notes,
            "sections": places,
        }
        table = json.dumps(contents).encode()
        header = _HEADER.pack(_MAGIC, _VERSION, zlib.crc32(table), position, len(table))
        write_bytes(path, header.ljust(_ALIGN, b"\0"), *chunks, table)

    @classmethod
    def open(cls, path: str) -> PackedIndex:
        """Map the index file ``path``.

        Raises:
            DataIndexError: the file is damaged, incomplete, or of a version that is not known here.
            FileNotFoundError: there is no such file.
        """
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(_HEADER.size)
            if len(head) < _HEADER.size or head[:8] != _MAGIC:
                raise DataIndexError("this is not a packed index", where=path, fix=_CURE)
            _, version, checksum, offset, length = _HEADER.unpack(head)
            if version != _VERSION:
                raise DataIndexError(
                    f"the packed index has format {version}, this library reads format {_VERSION}",
                    where=path,
                    fix="update energon_lite, or " + _CURE,
                )
            if offset + length != size:
                raise DataIndexError(
                    f"the packed index is cut off or overlong: {size} bytes instead of {offset + length}",
                    where=path,
                    fix=_CURE,
                )
            mapping = map_file(file.fileno())
            table, sections = _read_table(path, mapping, offset, checksum)
            kind = cls if size <= _LARGEST_MAPPED else _LargeIndex
            notes, rules = table.get("notes"), table.get("scan", 0)
            index = kind(sections, table["part_names"], table["uuid"], table["digest"], notes, rules)
            if isinstance(index, _LargeIndex):
                block = head_checksum(bytes(mapping[:BLOCK]))
                index.read_rows_from(path, size, block, {name: at for name, (*_, at) in table["sections"].items()})
        return index


class _LargeIndex(PackedIndex):
    """An index whose rows are read from the file, which is one of the open files that all data sets share."""

    def read_rows_from(self, path: str, size: int, head: int, offsets: Mapping[str, int]) -> None:
        """Look up in a file of this size and checksum of the first block, whose sections start at ``offsets``."""
        from energon_lite.sources.shard_store import ShardIdentity, shared_store  # it can read indexes, too

        self._path, self._identity, self._store = os.path.abspath(path), ShardIdentity(size, head), shared_store()
        self._first_sample, self._first_part, self._first_key = (offsets[n] for n in ("samples", "parts", "keys"))

    def key(self, sample: int) -> str:
        row = self._read(self._first_sample + 24 * sample + 8, 32)
        start, stop = int.from_bytes(row[:8], "little"), int.from_bytes(row[24:], "little")
        return str(self._read(self._first_key + start, stop - start), "utf-8", "surrogateescape")

    def part_rows(self, sample: int) -> list[int]:
        row = self._read(self._first_sample + 24 * sample, 32)
        start, stop = int.from_bytes(row[:8], "little"), int.from_bytes(row[24:], "little")
        return memoryview(self._read(self._first_part + 24 * start, 24 * (stop - start))).cast("q").tolist()

    def _read(self, offset: int, size: int) -> bytes:
        return self._store.read(self._path, self._identity, offset, size)


def _read_table(
    path: str, mapping: memoryview, offset: int, checksum: int
) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """The table at the end of the file, and the sections that it lists."""
    raw = bytes(mapping[offset:])
    if zlib.crc32(raw) != checksum:
        raise DataIndexError("the packed index is damaged (its table has a wrong checksum)", where=path, fix=_CURE)
    table = json.loads(raw)
    sections = {name: _section(mapping, *place) for name, place in table["sections"].items()}
    samples, shards = sections["samples"], sections["shards"]
    ends = (len(samples) - 1, len(sections["parts"]), len(sections["keys"]))
    if ends != (shards[-1, 3], samples[-1, 0], samples[-1, 1]):
        raise DataIndexError("the packed index is damaged (its tables do not fit together)", where=path, fix=_CURE)
    return table, sections


def _section(mapping: memoryview, dtype: str, shape: list[int], offset: int) -> NDArray[Any]:
    count = int(np.prod(shape))
    if count == 0:  # numpy refuses to make an empty view at the end of a buffer
        return np.zeros(shape, dtype=dtype)
    return np.frombuffer(mapping, dtype=dtype, count=count, offset=offset).reshape(shape)


def _flat(array: NDArray[Any]) -> memoryview:
    return memoryview(np.ascontiguousarray(array).reshape(-1))  # type: ignore[arg-type]


def _raw(array: NDArray[Any]) -> memoryview:
    return _flat(array).cast("B") if array.size else memoryview(b"")


def _bytes(data: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(data, dtype=np.uint8)


def _digest(sections: Mapping[str, NDArray[Any]], part_names: tuple[str, ...]) -> str:
    digest = hashlib.blake2b(json.dumps(part_names).encode(), digest_size=16)
    for name, array in sections.items():
        if name == "shard_times":
            continue
        digest.update(name.encode())
        digest.update(_raw(array))
    return digest.hexdigest()
