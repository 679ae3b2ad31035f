"""MDS folders of MosaicML's ``streaming``, read only: ``index.json``, and shards of samples.

A shard: u32 number n of samples, u32 [n + 1] start of each sample and end of the last, a JSON text that repeats the
columns, and the samples. A sample: u32 sizes of the columns without a fixed size, and the values. Compressed shards are
unpacked into the cache (``$ENERGON_LITE_CACHE``) when they are first read, once for each machine.
"""

from __future__ import annotations

import bz2
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from glob import escape, glob
from typing import Any

import numpy as np

from energon_lite.documents.paths import is_url
from energon_lite.errors import (
    EmptyDatasetError,
    FatalSampleError,
    MissingShardError,
    ShardFormatError,
    UsageError,
    listed,
)
from energon_lite.extras.formats.held_files import damaged, fetch, held_tables, shard_of
from energon_lite.extras.formats.mds_values import EXTENSIONS, decoder_of
from energon_lite.imports import optional_imports
from energon_lite.storage.files.atomic_file import only_one, write_bytes
from energon_lite.storage.files.byte_ranges import file_version, found_at, read_bytes, size_of
from energon_lite.storage.files.shard_store import Shard
from energon_lite.storage.index.index_cache import cache_folder

#: Compressions with pyarrow's names for them.
_ARROW = {"zstd": "zstd", "br": "brotli", "snappy": "snappy", "lz4": "lz4"}


def unpacked(data: bytes, how: str, size: int, path: str) -> bytes:
    """Return the contents of a compressed file.

    Args:
        data: bytes of the file.
        how: ``gz``, ``bz2``, ``zstd``, ``br`` or ``snappy``; a level behind a colon is ignored.
        size: size that the contents must have in bytes. No more is unpacked.
        path: path of the file, for messages.

    Raises:
        ShardFormatError: the file is damaged.
        UsageError: the compression is unknown.
        FatalSampleError: its package is not installed.
    """
    how = how.partition(":")[0]
    try:
        if how == "gz":
            contents = zlib.decompressobj(wbits=31).decompress(data, size + 1)
        elif how == "bz2":
            contents = bz2.BZ2Decompressor().decompress(data, size + 1)
        elif how in _ARROW:
            contents = _by_arrow(data, _ARROW[how], size, path)
        else:
            raise UsageError(f"compression {how!r} is unknown", where=path, fix="unpack the shards, or convert them")
    except (UsageError, FatalSampleError):
        raise
    except Exception as error:  # each decompressor raises its own exceptions
        raise damaged(path, f"{type(error).__name__}: {error}") from error
    if len(contents) != size:
        raise damaged(path, f"it unpacks to other than {size} bytes")
    return contents


def _by_arrow(data: bytes, codec: str, size: int, path: str) -> bytes:
    what = f"shards compressed by {codec} are unpacked by the package pyarrow"
    with optional_imports("parquet", what, path, FatalSampleError):
        import pyarrow
    contents: Any = pyarrow.Codec(codec).decompress(data, decompressed_size=size, asbytes=True)
    return bytes(contents)


_INDEX = "index.json"
#: Other common names of the folders of splits.
_SPLITS = {"val": ("val", "validation", "valid", "dev", "eval")}


#: Extensions of images; a name with one of them gets no further extension.
_PICTURES = frozenset(["jpg", "jpeg", "png", "webp", "gif", "bmp"])
_ALIKE = {"jpg": _PICTURES, "png": _PICTURES, "pkl": frozenset(["pkl", "pickle", "pyd"])}


#: Columns with their encodings and sizes in bytes (None: variable).
_Columns = list[tuple[str, str, int | None]]


def open_source(path: str, split_part: str) -> MdsSource:
    """Open the samples of a folder that has an ``index.json``; or, if it has folders for splits, of the split's
    folder. An empty name of a split stands for all of them."""
    folder = path.removeprefix("mds://").removesuffix(_INDEX).rstrip("/") or "."
    if not is_url(folder) and not os.path.isfile(os.path.join(folder, _INDEX)):
        known = [os.path.basename(os.path.dirname(path)) for path in sorted(glob(f"{escape(folder)}/*/{_INDEX}"))]
        wanted = _SPLITS.get(split_part, (split_part,))
        there = known if not split_part else [name for name in wanted if name in known][:1]
        if not there:
            raise EmptyDatasetError(
                f"the MDS folder has no {_INDEX}, nor a folder for split {split_part!r} that has one",
                where=folder,
                fix=f"there are {listed(known)}: set split_part" if known else "name the folder that has it",
            )
        if len(there) > 1:
            return MdsSource(folder, splits=[f"{name}/" for name in there])
        folder = os.path.join(folder, there[0])
    return MdsSource(folder)


@dataclass(frozen=True)
class _Shard:
    """A shard according to ``index.json``.

    Args:
        name, size: name and bytes of the unpacked file with the samples.
        packed: name, size and compression of the compressed file; None: the shard is not compressed.
        samples: number of samples.
    """

    name: str
    size: int
    packed: tuple[str, int, str] | None
    samples: int


class MdsSource:
    """The samples of an MDS folder.

    Args:
        folder: the folder of ``index.json``, or its URL.
        names: the parts that are read; None: all. A column that holds a file (``jpeg``, ``png``, ``pkl``) gets the
            file's extension, ``image.jpg``, so that it is decoded, or refused, as in a tar.
        splits: the folders in it that have an ``index.json`` each, with a slash; their samples follow each other.

    Raises:
        ShardFormatError: ``index.json`` is damaged, of another version, or has an unknown encoding.
        MissingShardError: there is no ``index.json``.

    Example:
        >>> source = MdsSource("data/mds")
        >>> source.read(0)
        {'text': 'a red bicycle', 'tokens': array([1, 7])}
    """

    portable = True

    def __init__(self, folder: str, names: frozenset[str] | None = None, splits: Sequence[str] = ("",)):
        self.folder, self._splits = folder, splits
        shards: list[_Shard] = []
        columns: _Columns = []
        digest = hashlib.sha256()
        for split in splits:
            self._path = f"{folder}/{split}{_INDEX}"
            data = read_bytes(self._path, 0, size_of(self._path))
            digest.update(data)
            try:
                columns = _parse(json.loads(data), split, shards, columns)
            except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
                raise damaged(self._path, f"{type(error).__name__}: {error}", f"the {_INDEX}") from error
        self.shards = shards
        self._columns = columns
        self._decoders = [self._decoder(name, encoding) for name, encoding, _ in columns]
        self._parts = [_part_of(name, encoding) for name, encoding, _ in columns]
        self.part_names = frozenset(self._parts if names is None else (part for part in self._parts if part in names))
        self._starts = np.concatenate([[0], np.cumsum([shard.samples for shard in shards], dtype=np.int64)])
        self.identity = digest.hexdigest()
        self.mean_bytes = sum(shard.size for shard in shards) / max(1, len(self))
        self.shard_names = tuple(shard.name for shard in shards)
        self._opened: dict[int, Shard] = {}

    def __len__(self) -> int:
        return int(self._starts[-1])

    def select(self, names: frozenset[str]) -> MdsSource:
        """Return the same samples with these parts only."""
        return MdsSource(self.folder, names, self._splits)

    def locate(self, index: int) -> tuple[int, int]:
        """Return the number of a sample's shard, and its number in that shard."""
        shard = int(np.searchsorted(self._starts, index, side="right")) - 1
        return shard, index - int(self._starts[shard])

    def read(self, index: int) -> Mapping[str, Any]:
        return {name: values[0] for name, values in self.read_many([index]).items()}

    def read_many(self, indices: Sequence[int]) -> dict[str, list[Any]]:
        """Read samples by parts."""
        places = [self.locate(index) for index in indices]
        ranges = []
        for number, row in places:
            shard, offsets = self._opened_shard(number), self._offsets(number)
            ranges.append((shard, int(offsets[row]), int(offsets[row + 1]) - int(offsets[row])))
        columns: dict[str, list[Any]] = {name: [] for name in self._parts if name in self.part_names}
        for data, (number, row) in zip(fetch(ranges), places, strict=True):
            for name, value in self._values(data, number, row):
                columns[name].append(value)
        return columns

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_opened": {}}

    def _values(self, data: bytes, number: int, row: int) -> list[tuple[str, Any]]:
        sizes, at = [], 0
        try:
            for _, _, size in self._columns:
                if not size:
                    size, at = int.from_bytes(data[at : at + 4], "little"), at + 4
                sizes.append(size)
            if at + sum(sizes) != len(data):
                raise ValueError(f"{len(data)} bytes where {at + sum(sizes)} were expected")
            values = []
            for name, size, decode in zip(self._parts, sizes, self._decoders, strict=True):
                if name in self.part_names:
                    values.append((name, decode(data[at : at + size])))
                at += size
        except ImportError as error:
            raise FatalSampleError(
                f"a column needs a package that is not installed: {error}",
                where=self._path,
                fix="pip install 'energon-lite[image]'",
            ) from error
        except Exception as error:  # decoders raise exceptions of all kinds; the message names the sample
            raise ShardFormatError(
                f"sample {row} cannot be read: {type(error).__name__}: {error}",
                where=f"{self.folder}/{self.shards[number].name}",
                fix="restore or download the shard again",
            ) from error
        return values

    def _offsets(self, number: int) -> Any:
        """Offsets of the samples of a shard, and the end of the last one, ``[samples + 1]``."""
        shard = self.shards[number]

        def read() -> Any:
            [data] = fetch([(self._opened_shard(number), 0, 8 + 4 * shard.samples)])
            offsets = np.frombuffer(data, "<u4", offset=4).copy()
            count = int.from_bytes(data[:4], "little")
            first = 8 + 4 * shard.samples
            if count != shard.samples or offsets[0] < first or (offsets[1:] < offsets[:-1]).any():
                what = f"its head does not fit {_INDEX}"
            elif int(offsets[-1]) != shard.size:
                what = f"its samples end at byte {offsets[-1]}, not {shard.size}"
            else:
                return offsets
            raise damaged(f"{self.folder}/{shard.name}", what, "the shard")

        return held_tables().get((self, number), read)

    def _opened_shard(self, number: int) -> Shard:
        if number not in self._opened:
            shard = self.shards[number]
            raw = f"{self.folder}/{shard.name}"
            path = raw if shard.packed is None else self._unpacked(shard)
            opened = shard_of(path)
            if opened[1].size != shard.size:
                raise ShardFormatError(
                    f"the shard has {opened[1].size} bytes instead of {shard.size}",
                    where=raw,
                    fix="restore or download it again",
                )
            self._opened[number] = opened
        return self._opened[number]

    def _unpacked(self, shard: _Shard) -> str:
        """Path of an unpacked shard: a file that ``streaming`` left next to the packed one, or a file in the cache."""
        assert shard.packed is not None
        name, size, how = shard.packed
        beside, packed = f"{self.folder}/{shard.name}", f"{self.folder}/{name}"
        folder = os.path.join(cache_folder(), "mds", self.identity[:16])
        file = shard.name.replace("/", "_")
        try:
            status = found_at(packed)
        except MissingShardError:  # only the unpacked files are left: take the newest
            left = sorted(glob(os.path.join(escape(folder), "*", escape(file))), key=os.path.getmtime)
            path, packed_at = left[-1] if left else os.path.join(folder, file), 0
        else:
            path = os.path.join(folder, f"{file_version(status):016x}", file)
            packed_at = status.st_mtime_ns if isinstance(status, os.stat_result) else 0
        for candidate in [path] if is_url(beside) else [beside, path]:
            there = os.stat(candidate) if os.path.isfile(candidate) else None
            if (
                there is not None
                and there.st_size == shard.size
                and (candidate == path or there.st_mtime_ns >= packed_at)
            ):
                return candidate
        with only_one(path):
            if not os.path.isfile(path) or os.path.getsize(path) != shard.size:
                write_bytes(path, unpacked(read_bytes(packed, 0, size), how, shard.size, packed), flush=False)
        return path

    def _decoder(self, name: str, encoding: str) -> Callable[[bytes], Any]:
        decode = decoder_of(encoding)
        if decode is None:
            raise damaged(self._path, f"column {name!r} has an unknown encoding {encoding!r}", f"the {_INDEX}")
        return decode


def _part_of(name: str, encoding: str) -> str:
    extension = EXTENSIONS.get(encoding)
    if extension is None or name.rpartition(".")[2].lower() in _ALIKE[extension]:
        return name
    return f"{name}.{extension}"


def _parse(document: Any, folder: str, shards: list[_Shard], columns: _Columns) -> _Columns:
    """Add the shards in ``folder``, and return their columns, which are ``columns`` if there are shards before them."""
    if document["version"] != 2:
        raise ValueError(f"version {document['version']}")
    for entry in document["shards"]:
        if entry["format"] != "mds" or entry["version"] != 2:
            raise ValueError(f"a shard of format {entry['format']!r}, version {entry['version']}")
        raw, packed = entry["raw_data"], entry.get("zip_data")
        names = [raw["basename"], *([packed["basename"]] if packed else [])]
        if any(os.path.isabs(name) or ".." in name.split("/") or "://" in name for name in names):
            raise ValueError(f"a shard outside of the folder: {listed(names)}")
        zipped = (folder + packed["basename"], int(packed["bytes"]), str(entry["compression"])) if packed else None
        shards.append(_Shard(folder + raw["basename"], int(raw["bytes"]), zipped, int(entry["samples"])))
        own_columns = list(zip(entry["column_names"], entry["column_encodings"], entry["column_sizes"], strict=True))
        if columns and own_columns != columns:
            raise ValueError("the shards do not have the same columns")
        columns = own_columns
    if any(shard.samples < 0 or shard.size < 0 for shard in shards):
        raise ValueError("negative sizes")
    return columns
