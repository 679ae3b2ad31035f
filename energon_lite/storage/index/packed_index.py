"""The index file of a whole data set: the place of every part of every sample.

Opening takes nearly the same time for a thousand samples as for a billion: entries of samples are read on demand.
A sample is found with three small look-ups, without parsing tar headers. The file is an array file
(:mod:`energon_lite.storage.files.array_file`): its contents are verified before they are used.

======================  ======================  ===================================================================
array                   shape                   contents
======================  ======================  ===================================================================
``shard_names``         bytes                   names relative to the data set, separated by NUL
``shards``              int64 [shards + 1, 5]   file size, head checksum, end of the last member, first sample, 0
``samples``             int64 [samples + 1, 3]  first part, start of the key, byte of the first tar header
``parts``               int64 [parts, 3]        payload offset, payload size, number of the part name
``keys``                bytes                   keys in UTF-8, without separator
``shard_times``         int64 [shards]          time of each file's last change in ns, 0 if unknown
======================  ======================  ===================================================================

The last rows of ``shards`` and ``samples`` close the last ranges. The file also holds ``part_names``; ``uuid``, the
text of ``index.uuid`` at the time of writing, by which an index is recognised as stale after another tool has prepared
the data set; ``digest``, a hash of all arrays but times; ``notes``, remarks on odd shards; and ``rules``, the version
of the rules by which samples were found, so that the next preparation can take unchanged shards from here. Values per
sample, such as lengths, have files of their own (:mod:`energon_lite.storage.index.columns`): measuring does not change
the index.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon_lite.storage.files.array_file import FileKind, write_arrays
from energon_lite.storage.files.stored_array import MemoryArray, Numbers, open_arrays
from energon_lite.storage.tar_members import Int64
from energon_lite.storage.tar_scan import SCAN_RULES, ShardScan

INDEX_FILE = FileKind(
    b"ENRGLIDX",
    3,
    "packed index",
    "remove the file (it is made again when the data set is opened) or run `energon-lite prepare` again",
)

#: Least share of wanted samples in a range, 1/4, with which they are looked up in one read.
_DENSE = 4
#: Rows of ``samples`` for a sample and the next one.
_TWO_ROWS = struct.Struct("<6q")


class PackedIndex:
    """The packed index: in memory, freshly made (:meth:`from_scans`), or in its file (:meth:`open`).

    Attributes:
        shard_names: relative paths, in the order of the data set.
        shards: ``[shards + 1, 5]``; see the module's table for the columns of the arrays.
        samples: ``[samples + 1, 3]``.
        parts: ``[parts, 3]``.
        part_names: the names of the parts, by their number.
        shard_times: ``[shards]``, time of each file's last change in ns, 0 if unknown.
        uuid: the ``index.uuid`` this index belongs to.
        digest: hash of the contents; equal data give an equal digest on every machine.
        notes: remarks on odd shards, by shard.
        rules: version of the rules by which samples were found.
    """

    def __init__(
        self,
        arrays: Mapping[str, Numbers],
        part_names: Sequence[str],
        uuid: str,
        digest: str,
        notes: Mapping[str, Sequence[str]],
        rules: int = SCAN_RULES,
    ):
        self._arrays = dict(arrays)
        self.shards: Int64 = arrays["shards"][:]
        self.shard_times: Int64 = arrays["shard_times"][:]
        self.samples = arrays["samples"]
        self.parts = arrays["parts"]
        self._keys = arrays["keys"]
        self.part_names = tuple(part_names)
        self.notes = dict(notes)
        self.uuid = uuid
        self.digest = digest
        self.rules = rules
        self.shard_names = unpacked_names(arrays["shard_names"][:]) if len(self.shards) > 1 else ()

    def __len__(self) -> int:
        return len(self.samples) - 1

    @cached_property
    def shard_rows(self) -> dict[str, int]:
        """Number of each shard, by its name."""
        return {name: row for row, name in enumerate(self.shard_names)}

    @property
    def shard_counts(self) -> dict[str, int]:
        """Number of samples of each shard, in order."""
        return dict(zip(self.shard_names, np.diff(self.shards[:, 3]).tolist(), strict=True))

    def key(self, sample: int) -> str:
        """The key of a sample by its number over the whole data set."""
        return self.key_and_part_rows(sample)[0]

    def keys(self, first: int, stop: int) -> Iterator[str]:
        """The keys of the samples ``first..stop-1``."""
        return (self.key(sample) for sample in range(first, stop))

    def key_between(self, start: int, stop: int) -> str:
        """The key between two offsets in the array of keys."""
        return str(self._keys.raw(start, stop), "utf-8", "surrogateescape")

    def keys_between(self, places: Int64) -> list[str]:
        """:meth:`key_between` for each start and stop in ``[n, 2]``."""
        return [str(key, "utf-8", "surrogateescape") for key in self._keys.raw_each(places)]

    def key_places(self, samples: Int64) -> Int64:
        """Start and stop of the keys of samples in the array of keys: ``[n, 2]``."""
        first, last = (int(samples.min()), int(samples.max())) if len(samples) else (0, -1)
        if last - first < _DENSE * len(samples):  # read as a whole
            starts = self.samples[first : last + 2][:, 1]
            return np.stack([starts[samples - first], starts[samples - first + 1]], axis=1)
        return self.samples.stretches(samples, 2)[:, :, 1]

    def key_bytes(self, start: int, stop: int) -> NDArray[np.uint8]:
        """The bytes between two offsets in the array of keys."""
        return self._keys[start:stop]

    def key_and_part_rows(self, sample: int) -> tuple[str, list[int]]:
        """The key of a sample; and offset, size and name number of each of its parts, as one flat list."""
        part, key, _, next_part, next_key, _ = _TWO_ROWS.unpack(self.samples.raw(sample, sample + 2))
        return self.key_between(key, next_key), memoryview(self.parts.raw(part, next_part)).cast("q").tolist()

    def key_and_parts(self, sample: int) -> tuple[str, list[tuple[str, int, int]]]:
        """The key of a sample; and name, offset and size of each of its parts."""
        key, flat = self.key_and_part_rows(sample)
        rows = zip(flat[::3], flat[1::3], flat[2::3], strict=True)
        return key, [(self.part_names[name], offset, size) for offset, size, name in rows]

    @classmethod
    def from_scans(cls, scans: Sequence[ShardScan], *, uuid: str = "") -> PackedIndex:
        """Combine the scans of all shards, in the given order.

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
            shard_parts[:, 2] = renumber[shard_parts[:, 2]]
            parts.append(shard_parts)
            part_count, key_bytes = part_count + len(scan.parts), key_bytes + len(scan.keys)
            sample_count += scan.samples
        shards[-1, 3] = sample_count
        samples.append(np.array([[part_count, key_bytes, 0]], dtype=np.int64))
        parts.append(np.zeros((0, 3), dtype=np.int64))
        arrays: dict[str, NDArray[Any]] = {
            "shard_names": packed_names(scan.name for scan in scans),
            "shards": shards,
            "samples": np.concatenate(samples),
            "parts": np.concatenate(parts),
            "keys": np.frombuffer(b"".join(scan.keys for scan in scans), dtype=np.uint8),
            "shard_times": np.array([scan.mtime_ns for scan in scans], dtype=np.int64),
        }
        notes = {scan.name: scan.notes for scan in scans if scan.notes}
        held = {name: array.view(MemoryArray) for name, array in arrays.items()}
        return cls(held, tuple(numbers), uuid, _digest(arrays, tuple(numbers)), notes)

    def scan(self, row: int) -> ShardScan:
        """The scan of the ``row``-th shard, equal to the one that the index was made from."""
        (size, head, end, first, _), stop = self.shards[row].tolist(), int(self.shards[row + 1, 3])
        samples = self.samples[first : stop + 1]
        parts = self.parts[samples[0, 0] : samples[-1, 0]].copy()
        # In a scan, part names are numbered in order of appearance.
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
            keys=self._keys[samples[0, 1] : samples[-1, 1]].tobytes(),
            notes=tuple(self.notes.get(name, ())),
            mtime_ns=int(self.shard_times[row]),
        )

    def write(self, path: str) -> None:
        """Write the index as the file ``path``, atomically."""
        names = ("uuid", "digest", "part_names", "rules", "notes")
        meta = {name: getattr(self, name) for name in names}
        write_arrays(path, INDEX_FILE, {name: array[:] for name, array in self._arrays.items()}, meta)

    @classmethod
    def open(cls, path: str) -> PackedIndex:
        """Open the index file ``path``. Damage in its body is found, and raised, at the look-up of the damaged block.

        Raises:
            DataIndexError: the file is damaged, incomplete, or of an unknown version.
            FileNotFoundError: there is no such file.
        """
        arrays, meta = open_arrays(path, INDEX_FILE)
        try:
            index = cls(arrays, **meta)
            first_part, first_key, _ = index.samples[len(index) :][0].tolist()
            ends = (len(index), len(index.parts), len(arrays["keys"]))
            fits = ends == (index.shards[-1, 3], first_part, first_key)
            fits = fits and len(index.shard_names) == len(index.shards) - 1 == len(index.shard_times)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError):
            fits = False
        if not fits:
            raise INDEX_FILE.damaged(path, "its tables do not fit together")
        return index


def packed_names(names: Iterable[str]) -> NDArray[np.uint8]:
    """Return the bytes of names, separated by NUL."""
    return np.frombuffer("\0".join(names).encode("utf-8", "surrogateescape"), dtype=np.uint8)


def unpacked_names(data: NDArray[np.uint8]) -> tuple[str, ...]:
    """Invert :func:`packed_names` for at least one name."""
    return tuple(data.tobytes().decode("utf-8", "surrogateescape").split("\0"))


def _digest(arrays: Mapping[str, NDArray[Any]], part_names: tuple[str, ...]) -> str:
    digest = hashlib.blake2b(json.dumps(part_names).encode(), digest_size=16)
    for name, array in arrays.items():
        if name != "shard_times":
            digest.update(name.encode())
            digest.update(np.ascontiguousarray(array).reshape(-1).data)
    return digest.hexdigest()
