"""Writers of shards in each format, from a sequence of samples."""

from __future__ import annotations

import io
import json
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, BinaryIO

import numpy as np

from energon_lite.errors import UsageError
from energon_lite.extras.formats.arrow_files import import_arrow
from energon_lite.extras.formats.convert_samples import (
    Sample,
    as_file,
    as_json,
    as_value,
    extension_of,
    is_file_struct,
)
from energon_lite.extras.formats.mds_values import fixed_size, ndarray_bytes
from energon_lite.extras.formats.tables import BYTES_MARK

#: Most bytes of a row group, before compression; but at least one row.
_GROUP_BYTES = 1 << 24
#: Most rows of a row group.
_GROUP_ROWS = 10_000


class ShardWriter(ABC):
    """Writer of shards of a format.

    Args:
        first: samples at the beginning of the data set, which decide the columns and their types.
        where: the data set, for messages.
    """

    extension = ""

    def __init__(self, first: Sequence[Sample], where: str):
        self.where = where

    @abstractmethod
    def write(self, file: BinaryIO, samples: Iterable[Sample]) -> int:
        """Write a shard into an empty file; return the number of samples.

        Raises:
            UsageError: the format does not support a part, or a part differs from those at the beginning.
        """

    def _unlike(self, key: str, what: str) -> UsageError:
        return UsageError(
            f"sample {key!r} differs from the first samples: {what}",
            where=self.where,
            fix="look at more of them (--look 100000), or leave the part out (--without NAME)",
        )


class Tar(ShardWriter):
    """Writer of tar shards, with a member for each part."""

    extension = ".tar"

    def write(self, file: BinaryIO, samples: Iterable[Sample]) -> int:
        count, names = 0, set[str]()
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for key, parts in samples:
                count += 1
                base = key if "." not in key.rpartition("/")[2] else key.replace(".", "_")
                if base in names or not base:
                    raise UsageError(f"two samples have the key {base!r}", where=self.where, fix="rename one of them")
                names.add(base)
                files = [as_file(name, value, self.where) for name, value in parts.items() if value is not None]
                if len({part for part, _ in files}) < max(1, len(files)):
                    what = "two of its parts have one name in a tar" if files else "it has no part with a value"
                    raise UsageError(f"sample {key!r}: {what}", where=self.where, fix="convert to parquet or jsonl")
                for part, data in files:
                    member = tarfile.TarInfo(f"{base}.{part}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
        return count


class JsonLines(ShardWriter):
    """Writer of JSONL, a line for each sample. A sample of one JSON object, as from a JSONL file, is the line."""

    extension = ".jsonl"

    def write(self, file: BinaryIO, samples: Iterable[Sample]) -> int:
        count = 0
        for _, parts in samples:
            value = {name: as_json(name, part, self.where) for name, part in parts.items()}
            if value.keys() == {"json"} and isinstance(value["json"], dict):
                value = value["json"]
            text = json.dumps(value, ensure_ascii=False, separators=(", ", ": "))
            file.write(text.encode(errors="backslashreplace") + b"\n")
            count += 1
        return count


class ParquetRows(ShardWriter):
    """Writer of Parquet, with a row for each sample and a column for each part; pages have checksums."""

    extension = ".parquet"

    def __init__(self, first: Sequence[Sample], where: str):
        super().__init__(first, where)
        pa = import_arrow(where)
        names = list(dict.fromkeys(name for _, parts in first for name in parts))
        self._columns: dict[str, str] = {}
        fields = []
        for name in names:
            values = [_for_table(name, parts.get(name)) for _, parts in first]
            is_file = any(_is_grid(parts.get(name)) for _, parts in first) and extension_of(name) != "npy"
            self._columns[name] = f"{name}.npy" if is_file else name  # the extension by which it is decoded again
            try:
                kind = _array(pa, values, None).type
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
                raise UsageError(
                    f"part {name!r} has no type in Parquet: {error}", where=where, fix=f"leave it out: --without {name}"
                ) from None
            mark = {BYTES_MARK: b"1"} if extension_of(name) in ("json", "jsn") and kind == pa.string() else None
            fields.append(pa.field(self._columns[name], pa.string() if pa.types.is_null(kind) else kind, metadata=mark))
        self.schema = pa.schema(fields)

    def write(self, file: BinaryIO, samples: Iterable[Sample]) -> int:
        pa = import_arrow(self.where)
        count = 0
        size = 0
        rows = list[Sample]()
        options = {"compression": "zstd", "write_page_checksum": True}
        with pa.parquet.ParquetWriter(file, self.schema, **options) as writer:
            for sample in samples:
                rows.append(sample)
                count, size = count + 1, size + sum(map(_size, sample[1].values()))
                if size >= _GROUP_BYTES or len(rows) >= _GROUP_ROWS:
                    writer.write_table(self._table(pa, rows))
                    size, rows = 0, []
            if rows or not count:
                writer.write_table(self._table(pa, rows))
        return count

    def _table(self, pa: Any, rows: Sequence[Sample]) -> Any:
        columns = []
        for key, parts in rows:
            if others := parts.keys() - self._columns.keys():
                raise self._unlike(key, f"it also has {sorted(others)[0]!r}")
        for name, field in zip(self._columns, self.schema, strict=True):
            values = [_for_table(name, parts.get(name)) for _, parts in rows]
            try:
                columns.append(_array(pa, values, field.type))
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
                what = " ".join(str(error).split())[:200]
                raise self._unlike(
                    rows[0][0], f"{field.name!r} of it or of a later sample is not {field.type}: {what}"
                ) from None
        return pa.Table.from_arrays(columns, schema=self.schema)


def _for_table(name: str, value: Any) -> Any:
    if isinstance(value, bytes) and extension_of(name) in ("json", "jsn"):
        with suppress(UnicodeDecodeError):
            return value.decode()
    value = as_value(name, value)
    return as_file(name, value, "")[1] if _is_grid(value) else value


def _is_grid(value: Any) -> bool:
    """Return True for an array that is no list of numbers: a table stores the bytes of its file."""
    return isinstance(value, np.ndarray) and (value.ndim != 1 or value.dtype.kind not in "iuf")


def _array(pa: Any, values: list[Any], kind: Any) -> Any:
    """A column of these values. Lists of numbers keep their type."""
    first = next((value for value in values if value is not None), None)
    if kind is None and isinstance(first, np.ndarray):
        kind = pa.list_(pa.from_numpy_dtype(first.dtype))
    if kind is not None and pa.types.is_list(kind) and any(isinstance(value, np.ndarray) for value in values):
        types = {pa.from_numpy_dtype(value.dtype) for value in values if isinstance(value, np.ndarray)}
        if types != {kind.value_type}:
            raise ValueError("arrays of several types")
    column = pa.array(values, type=kind)
    if not (pa.types.is_string(column.type) or pa.types.is_binary(column.type)):  # other types may have lost precision
        changed = next((pair for pair in zip(values, column.to_pylist(), strict=True) if not _is_kept(*pair)), None)
        if changed is not None:
            raise ValueError(f"{changed[0]!r} would become {changed[1]!r}")
    return column


def _is_kept(value: Any, found: Any) -> bool:
    """Return True if a column gives a value back: an equal number, or a dict with all of its entries."""
    if isinstance(value, dict):
        return all(item is None or (name in found and _is_kept(item, found[name])) for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return len(value) == len(found) and all(map(_is_kept, value, found))
    if isinstance(value, np.ndarray):
        return True  # its type is that of the column
    return bool(value == found or value != value)


def _size(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    return len(value) if isinstance(value, (bytes, str)) else 8


#: Encodings of parts that are files, by extension.
_MDS_FILES = {"jpg": "jpeg", "jpeg": "jpeg", "png": "png", "json": "json", "jsn": "json"}
_MDS_FILES |= dict.fromkeys(("txt", "text", "transcript"), "str")


#: Encodings as text, with the types of the values that they can hold.
_TEXTS: dict[str, tuple[type, ...]] = {"str": (str,), "str_int": (int,), "str_float": (int, float)}


class Mds(ShardWriter):
    """Writer of MDS shards, which MosaicML's ``streaming`` reads. All samples have the same parts."""

    extension = ".mds"

    def __init__(self, first: Sequence[Sample], where: str):
        super().__init__(first, where)
        self.columns: dict[str, str] = {}
        for name in sorted({name for _, parts in first for name in parts}):
            kinds = {self._encoding(name, parts.get(name)) for _, parts in first}
            kinds = {"str_float"} if kinds == {"int", "str_float"} else kinds
            kinds = {"jpeg"} if kinds == {"jpeg", "png"} else kinds  # its decoder opens either
            self.columns[name] = kinds.pop() if len(kinds) == 1 else "bytes" if "bytes" in kinds else "json"

    def config(self) -> dict[str, Any]:
        """Return the description of the columns, for the index and for each shard."""
        return {
            "column_encodings": list(self.columns.values()),
            "column_names": list(self.columns),
            "column_sizes": [fixed_size(encoding) for encoding in self.columns.values()],
            "compression": None,
            "format": "mds",
            "hashes": [],
            "size_limit": None,
            "version": 2,
        }

    def write(self, file: BinaryIO, samples: Iterable[Sample]) -> int:
        sizes = self.config()["column_sizes"]
        made = []
        for key, parts in samples:
            if parts.keys() != self.columns.keys():
                others = sorted(parts.keys() ^ self.columns.keys())
                raise self._unlike(key, f"{others[0]!r} is missing, or new")
            data = [self._encoded(key, name, parts[name]) for name in self.columns]
            head = [len(part) for part, size in zip(data, sizes, strict=True) if not size]
            made.append(np.array(head, "<u4").tobytes() + b"".join(data))
        config = json.dumps(self.config(), sort_keys=True).encode()
        offsets = np.cumsum([8 + 4 * len(made) + len(config), *map(len, made)], dtype=np.int64)
        if offsets[-1] >= 1 << 32:
            raise UsageError("a shard would have more than 4 GiB", where=self.where, fix="give a smaller --shard-size")
        file.write(np.uint32(len(made)).tobytes() + offsets.astype("<u4").tobytes() + config)
        file.writelines(made)
        return len(made)

    def _encoding(self, name: str, value: Any) -> str:
        if is_file_struct(value):
            name, value = as_file(name, value, self.where)
        if isinstance(value, bytes):
            known = _MDS_FILES.get(extension_of(name))
            value = value if known else as_value(name, value)
            if isinstance(value, bytes):
                return known or "bytes"
        if isinstance(value, np.ndarray):
            return "ndarray" if ndarray_bytes(value) else "bytes"
        if isinstance(value, np.generic) and value.dtype.kind in "iuf":
            return str(value.dtype.name)
        if hasattr(value, "getbands"):
            return "png"
        plain = {str: "str", int: "int", float: "str_float"}
        if type(value) is int and not -(2**63) <= value < 2**63:
            return "str_int"
        return plain.get(type(value), "json")

    def _encoded(self, key: str, name: str, value: Any) -> bytes:
        encoding = self.columns[name]
        value = value["bytes"] if is_file_struct(value) else value
        if isinstance(value, bytes) and encoding not in ("int", "ndarray", "str_float", "str_int"):
            return value
        value = as_value(name, value)
        try:
            if encoding in ("bytes", "png", "jpeg"):
                if encoding != "jpeg" and not isinstance(value, (str, int, float, dict, list)):
                    return as_file(name, value, self.where)[1]
            elif encoding == "ndarray":
                if (data := ndarray_bytes(value)) is not None:
                    return data
            elif encoding in _TEXTS:
                fits = encoding != "str_float" or float(value) == value  # a large integer would be rounded
                if isinstance(value, _TEXTS[encoding]) and fits:
                    return str(value).encode()
            elif encoding == "json":
                return json.dumps(as_json(name, value, self.where)).encode()
            elif encoding == "int":
                if type(value) is int:
                    return np.int64(value).tobytes()
            elif np.asarray(value).ndim == 0:
                return np.dtype(encoding).type(value).tobytes()
        except (TypeError, ValueError, AttributeError, OverflowError):
            pass
        raise self._unlike(key, f"{name!r} is a {type(value).__name__}, which is not written as {encoding!r}")

    def entry(self, name: str, size: int, samples: int) -> dict[str, Any]:
        """Return the index entry of a shard."""
        raw = {"basename": name, "bytes": size, "hashes": {}}
        return self.config() | {"raw_data": raw, "samples": samples, "zip_data": None}


#: Writers by the name of their format.
WRITERS: dict[str, type[ShardWriter]] = {"tar": Tar, "mds": Mds, "parquet": ParquetRows, "jsonl": JsonLines}
