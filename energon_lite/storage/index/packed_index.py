"""One index file for a whole data set: where every part of every sample is.

Opening costs nearly the same for a thousand samples as for a billion: nothing per sample is touched until it is read.
A sample is found with three small look-ups, without parsing tar headers. The file is a checked one
(:mod:`energon_lite.storage.index.checked_file`, version 2): what it says is verified before it is used. Its table is
JSON: ``{"uuid", "digest", "part_names", "scan", "notes", "sections": {name: [dtype, shape, offset]}}``.

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
such as lengths, stand in files of their own (:mod:`energon_lite.storage.index.columns`): measuring leaves the index
alone.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon_lite.errors import DataIndexError
from energon_lite.storage.index.checked_file import CheckedFile, FileKind, Numbers, writing_checked
from energon_lite.storage.tar.tar_scan import SCAN_RULES, Int64, ShardScan

__all__ = ["PackedIndex"]

INDEX_FILE = FileKind(
    b"ENRGLIDX",
    2,
    "packed index",
    "remove the file (it is made again when the data set is opened) or run `energon-lite prepare` again",
)

#: Of a sample and the next one.
_TWO_ROWS = struct.Struct("<6q")


class PackedIndex:
    """The index, freshly made and in memory (:meth:`from_scans`) or in its file (:meth:`open`).

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
        sections: Mapping[str, Numbers],
        part_names: Sequence[str],
        uuid: str,
        digest: str,
        notes: Mapping[str, Sequence[str]] | None = None,
        rules: int = SCAN_RULES,
    ):
        self._sections = dict(sections)
        self.shards: Int64 = sections["shards"][:]
        self.samples, self.parts = sections["samples"], sections["parts"]
        self.part_names = tuple(part_names)
        self.uuid, self.digest = uuid, digest
        self.notes, self.rules = dict(notes or {}), rules
        names = sections["shard_names"][:].tobytes().decode("utf-8", "surrogateescape")
        self.shard_names: tuple[str, ...] = tuple(names.split("\0")) if len(self.shards) > 1 else ()
        times = sections.get("shard_times")
        self.shard_times: Int64 = np.zeros(len(self.shards) - 1, dtype=np.int64) if times is None else times[:]

    @cached_property
    def _views(self) -> tuple[memoryview, memoryview, memoryview]:
        # Memoryviews give Python ints several times faster than numpy gives scalars.
        return _flat(self.samples[:]), _flat(self.parts[:]), _flat(self._sections["keys"][:])

    def __len__(self) -> int:
        return len(self.samples) - 1

    @property
    def shard_counts(self) -> dict[str, int]:
        """Samples per shard, in order."""
        return dict(zip(self.shard_names, np.diff(self.shards[:, 3]).tolist(), strict=True))

    def key(self, sample: int) -> str:
        """The key of a sample, counted over the whole data set."""
        samples, _, keys = self._views
        return str(keys[samples[3 * sample + 1] : samples[3 * sample + 4]], "utf-8", "surrogateescape")

    def key_between(self, start: int, stop: int) -> str:
        """The key whose bytes lie between two places of the section of keys."""
        return str(self._views[2][start:stop], "utf-8", "surrogateescape")

    def part_rows(self, sample: int) -> list[int]:
        """Offset, size and name number of each part of a sample, one after the other in one flat list."""
        samples, parts, _ = self._views
        return parts[3 * samples[3 * sample] : 3 * samples[3 * sample + 3]].tolist()

    def keys_between(self, places: Int64) -> list[str]:
        """:meth:`key_between` for each of these ``[n, 2]`` starts and stops."""
        return [self.key_between(start, stop) for start, stop in places.tolist()]

    def key_and_part_rows(self, sample: int) -> tuple[str, list[int]]:
        """:meth:`key` and :meth:`part_rows`."""
        return self.key(sample), self.part_rows(sample)

    def sample_ends(self, samples: Int64) -> Int64:
        """``[n, 2, 3]``: of each of these samples its row and the next."""
        return self.samples.take(samples[:, None] + np.arange(2), 0)

    def parts_of(self, first: Int64, count: int) -> Int64:
        """``[n, count, 3]``: of samples with so many parts, whose first ones are given, the rows of all of them."""
        return self.parts.take(first[:, None] + np.arange(count), 0)

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
        sections: dict[str, Numbers] = {
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
        places: dict[str, list[Any]] = {}
        with writing_checked(path, INDEX_FILE) as file:
            for name, array in self._sections.items():
                places[name] = [array.dtype.str, list(array.shape), file.align()]
                file.write(_raw(array[:]))
            file.align()
            contents = {
                "uuid": self.uuid,
                "digest": self.digest,
                "part_names": self.part_names,
                "scan": self.rules,
                "notes": self.notes,
                "sections": places,
            }
            file.finish(contents)

    @classmethod
    def open(cls, path: str) -> PackedIndex:
        """Open the index file ``path``. What is damaged in its body is found out, and raised, when it is looked up.

        Raises:
            DataIndexError: the file is damaged, incomplete, or of a version that is not known here.
            FileNotFoundError: there is no such file.
        """
        return _StoredIndex(CheckedFile.open(path, INDEX_FILE))


class _StoredIndex(PackedIndex):
    """An index whose rows are read from its file."""

    def __init__(self, file: CheckedFile):
        table = file.table
        try:
            places = {name: place[2] for name, place in table["sections"].items()}
            sections = {name: file.array(*place) for name, place in table["sections"].items()}
            samples = sections["samples"]
            ends = (len(samples) - 1, len(sections["parts"]), len(sections["keys"]))
            names, uuid, digest = table["part_names"], table["uuid"], table["digest"]
            super().__init__(sections, names, uuid, digest, table.get("notes"), table.get("scan", 0))
            first_part, first_key, _ = samples[ends[0] :][0].tolist()
            fits = ends == (self.shards[-1, 3], first_part, first_key)
            fits = fits and len(self.shard_names) == len(self.shards) - 1 == len(self.shard_times)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError):
            fits = False
        if not fits:
            raise DataIndexError(
                "the packed index is damaged (its tables do not fit together)", where=file.path, fix=INDEX_FILE.cure
            )
        self._file, self._sample_rows, self._part_rows = file, samples, sections["parts"]
        self._first_sample, self._first_part, self._first_key = (places[name] for name in ("samples", "parts", "keys"))

    def key(self, sample: int) -> str:
        return self.key_and_part_rows(sample)[0]

    def part_rows(self, sample: int) -> list[int]:
        return self.key_and_part_rows(sample)[1]

    def key_and_part_rows(self, sample: int) -> tuple[str, list[int]]:
        read = self._file.read
        part, key, _, next_part, next_key, _ = _TWO_ROWS.unpack(read(self._first_sample + 24 * sample, 48))
        rows = read(self._first_part + 24 * part, 24 * (next_part - part))
        return self.key_between(key, next_key), memoryview(rows).cast("q").tolist()

    def key_between(self, start: int, stop: int) -> str:
        return str(self._file.read(self._first_key + start, stop - start), "utf-8", "surrogateescape")

    def keys_between(self, places: Int64) -> list[str]:
        keys = self._file.read_each(self._first_key + places[:, 0], places[:, 1] - places[:, 0])
        return [str(key, "utf-8", "surrogateescape") for key in keys]

    def sample_ends(self, samples: Int64) -> Int64:
        return self._sample_rows.stretches(samples, 2)

    def parts_of(self, first: Int64, count: int) -> Int64:
        return self._part_rows.stretches(first, count)


def _flat(array: NDArray[Any]) -> memoryview:
    return memoryview(np.ascontiguousarray(array).reshape(-1))  # type: ignore[arg-type]


def _raw(array: NDArray[Any]) -> memoryview:
    return _flat(array).cast("B") if array.size else memoryview(b"")


def _bytes(data: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(data, dtype=np.uint8)


def _digest(sections: Mapping[str, Numbers], part_names: tuple[str, ...]) -> str:
    digest = hashlib.blake2b(json.dumps(part_names).encode(), digest_size=16)
    for name, array in sections.items():
        if name == "shard_times":
            continue
        digest.update(name.encode())
        digest.update(_raw(array[:]))
    return digest.hexdigest()
