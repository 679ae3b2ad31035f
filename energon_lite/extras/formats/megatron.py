"""Megatron's token data sets: ``text_document.bin`` with the tokens, ``text_document.idx`` with their places.

A sample is a document (or, by the scheme ``megatron_sequences://``, one of its sequences): ``tokens``, an array of the
stored type; ``lengths`` of the document's sequences; and their ``modes``, if the file has them. Lengths are known, so
batches by tokens need no measuring: the column ``length`` always exists.

The ``.idx`` file, little endian: ``MMIDIDX\\0\\0``, u64 version (1), u8 code of the type, u64 sequences S, u64 entries
D of the list of documents; int32 [S] lengths, int64 [S] first bytes in the ``.bin``, int64 [D] first sequence of each
document and the end, and, optionally, int8 [S] modes.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from energon_lite.documents.paths import is_url
from energon_lite.errors import DataIndexError, NotPreparedError, ShardFormatError
from energon_lite.extras.formats.held_files import fetch, replaced, shard_of
from energon_lite.storage.files.byte_ranges import map_file, open_file, read_bytes, size_of

_MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<9sQBQQ")
#: Type of the tokens by the code in the file.
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
#: Places in the ``.bin`` that are part of the identity: data sets of equal lengths differ there.
_PLACES = 4
#: Bytes that are read at each of these places.
_BYTES = 1 << 14


def open_source(path: str, split_part: str) -> MegatronSource:
    """Open the documents of a pair of files by the path of either, or without extension. They have no splits."""
    return MegatronSource(path.removeprefix("megatron://"))


def open_sequences(path: str, split_part: str) -> MegatronSource:
    """Open the sequences of a pair of files; paths as for :func:`open_source`."""
    return MegatronSource(path.removeprefix("megatron_sequences://"), documents=False)


class _Arrays(NamedTuple):
    """The arrays of the ``.idx`` file."""

    lengths: Any
    pointers: Any
    documents: Any
    modes: Any


class MegatronSource:
    """The documents, or the sequences, of a pair of files.

    Args:
        path: path of either file, or their common beginning; on a local disk, or a URL.
        documents: samples are documents; False: they are sequences.

    Raises:
        NotPreparedError: it is a folder.
        MissingShardError: one of the files does not exist.
        ShardFormatError: the ``.idx`` is not such a file, or cut short; or the ``.bin`` is too short for it.

    Example:
        >>> source = MegatronSource("data/text_document")
        >>> source.read(0)["tokens"]
        array([  1, 306, 626], dtype=int32)
    """

    portable = True

    def __init__(self, path: str, *, documents: bool = True):
        self.path = path[:-4] if path.endswith((".idx", ".bin")) else path
        if os.path.isdir(self.path):
            fix = "give the common beginning of the two files, data/text_document; or prepare a folder of tars"
            raise NotPreparedError("a folder, not prepared, and no pair of .bin and .idx", where=self.path, fix=fix)
        self._index_path = f"{self.path}.idx"
        self._by_document = documents
        self._size = size_of(self._index_path)
        head = read_bytes(self._index_path, 0, min(self._size, _HEAD.size))
        if len(head) < _HEAD.size or not head.startswith(_MAGIC):
            raise self._damaged("it does not begin as such a file does")
        _, version, code, self._sequences, self._entries = _HEAD.unpack(head)
        if version != 1 or code not in _DTYPES:
            raise self._damaged(f"version {version} with type {code} is unknown")
        self._dtype = np.dtype(_DTYPES[code])
        least = _HEAD.size + 12 * self._sequences + 8 * self._entries
        if self._size not in (least, least + self._sequences) or not self._entries:
            raise self._damaged(f"it has {self._size} bytes instead of {least}")
        self._shard = shard_of(f"{self.path}.bin")
        self._opened: _Arrays | None = None
        self._check()
        self.identity = self._digest()
        self.part_names = frozenset(["tokens", "lengths", *(["modes"] if self._size > least else [])])
        self.mean_bytes = self._shard[1].size / max(1, len(self))
        self.shard_names = (f"{self.path}.bin".rpartition("/")[2],)

    def __len__(self) -> int:
        return self._entries - 1 if self._by_document else self._sequences

    def read(self, index: int) -> Mapping[str, Any]:
        return {name: values[0] for name, values in self.read_many([index]).items()}

    def read_many(self, indices: Sequence[int]) -> dict[str, list[Any]]:
        """Read samples by parts; each array of tokens has its own memory."""
        arrays, item = self._arrays(), self._dtype.itemsize
        wanted = np.asarray(indices, np.int64)
        firsts, stops = (
            (arrays.documents[wanted], arrays.documents[wanted + 1]) if self._by_document else (wanted, wanted + 1)
        )
        lengths, ranges = [], []
        for first, stop in zip(firsts.tolist(), stops.tolist(), strict=True):
            own = np.array(arrays.lengths[first:stop])
            size = int(own.sum(dtype=np.int64)) * item
            start = int(arrays.pointers[first]) if stop > first else 0
            lengths.append(own)
            ranges.append((self._shard, start, size))
        tokens = [np.frombuffer(bytearray(data), self._dtype) for data in fetch(ranges)]
        columns: dict[str, list[Any]] = {"tokens": tokens, "lengths": lengths}
        if arrays.modes is not None:
            bounds = zip(firsts.tolist(), stops.tolist(), strict=True)
            columns["modes"] = [np.array(arrays.modes[first:stop]) for first, stop in bounds]
        return columns

    def column(self, name: str) -> Any:
        """Return the column ``length``: the number of tokens of each sample.

        Raises:
            DataIndexError: ``name`` is another column.
        """
        if name != "length":
            raise DataIndexError(
                f"the data set has no column {name!r}", where=self.path, fix="length_column='length' counts tokens"
            )
        arrays = self._arrays()
        if not self._by_document:
            return np.asarray(arrays.lengths, np.int64)
        ends = np.concatenate([[0], np.cumsum(arrays.lengths, dtype=np.int64)])
        return np.diff(ends[np.asarray(arrays.documents)])

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_opened": None}

    def _arrays(self) -> _Arrays:
        if self._opened is None:
            if size_of(self._index_path) != self._size:
                raise replaced(self._index_path)
            self._opened = self._map()
        return self._opened

    def _map(self) -> _Arrays:
        if is_url(self.path):
            data: Any = read_bytes(self._index_path, 0, self._size)
        else:
            with open(self._index_path, "rb", opener=open_file) as file:
                data = map_file(file.fileno())
        at, arrays = _HEAD.size, []
        for dtype, count in (("<i4", self._sequences), ("<i8", self._sequences), ("<i8", self._entries)):
            arrays.append(np.frombuffer(data, dtype, count, at))
            at += arrays[-1].nbytes
        modes = np.frombuffer(data, "i1", self._sequences, at) if at < self._size else None
        return _Arrays(arrays[0], arrays[1], arrays[2], modes)

    def _check(self) -> None:
        """Check that the numbers of the ``.idx`` are possible: they decide which bytes, and how many, are read."""
        arrays = self._arrays()
        size, item = self._shard[1].size, self._dtype.itemsize
        documents = arrays.documents
        if self._sequences and (int(arrays.lengths.min()) < 0 or int(arrays.pointers.min()) < 0):
            raise self._damaged("there are negative lengths or offsets")
        if int(documents[0]) < 0 or int(documents[-1]) > self._sequences or (np.diff(documents) < 0).any():
            raise self._damaged("its documents are not in order")
        if self._sequences:
            ends = arrays.pointers + arrays.lengths.astype(np.int64) * item
            if int(ends.max()) > size:
                raise ShardFormatError(
                    f"the file has {size} bytes, but its .idx needs {int(ends.max())}",
                    where=f"{self.path}.bin",
                    fix="restore or download it again",
                )
            if self._by_document and (ends[:-1] != arrays.pointers[1:]).any():
                raise self._damaged("sequences do not follow each other, so documents are not contiguous")

    def _digest(self) -> str:
        arrays, size = self._arrays(), self._shard[1].size
        digest = hashlib.sha256(f"{self._dtype.str} {self._by_document} {self._entries} {size}".encode())
        for array in arrays:
            if array is not None:
                digest.update(np.ascontiguousarray(array).data)
        for place in range(_PLACES):
            start = size * place // _PLACES
            digest.update(read_bytes(f"{self.path}.bin", start, min(_BYTES, size - start)))
        return digest.hexdigest()

    def _damaged(self, what: str) -> ShardFormatError:
        return ShardFormatError(
            f"this is not an .idx file of Megatron: {what}", where=self._index_path, fix="restore or make it again"
        )
