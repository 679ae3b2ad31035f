"""Reading of the samples to convert: those of a data set of any format, in order, in portions; and conversion of
their values."""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from energon_lite.config.dataset import load_split_config
from energon_lite.documents.paths import absolute_path
from energon_lite.errors import UsageError
from energon_lite.storage.index.index_cache import local_meta
from energon_lite.storage.index.nv_meta import META_FOLDER, SPLIT_YAML, is_jsonl
from energon_lite.storage.read.opened_source import OpenedSource, SingleSource
from energon_lite.storage.read.sample_reader import SampleReader
from energon_lite.storage.read.source import source_opener
from energon_lite.storage.read.webdataset import WebdatasetSource
from energon_lite.storage.samples.decoding import SampleDecoder
from energon_lite.storage.samples.part_decoder import guess_extension

#: A key, and the parts by name: bytes of files, or values.
Sample = tuple[str, dict[str, Any]]

#: Most samples that are read together.
_PORTION = 512
#: Most bytes of samples that are read together, approximately.
_PORTION_BYTES = 1 << 26


def open_samples(path: str, split: str | None) -> SingleSource:
    """Open a data set, or a split of it.

    Args:
        path: a prepared folder, a JSONL file, or another path of a single data set.
        split: name of the split; None: the whole data set.

    Raises:
        DatasetError, ConfigError: the data set cannot be opened.
        UsageError: the path is a metadataset.
    """
    root = absolute_path(path)
    if root.endswith((".yaml", ".yml")):
        raise UsageError("a blend is converted data set by data set", where=path, fix="name one of its data sets")
    opener = None if is_jsonl(root) else source_opener(root)
    if opener is not None:
        return OpenedSource(root, opener, split or "")
    if split is None or is_jsonl(root):
        return WebdatasetSource.open(root)
    chosen = load_split_config(os.path.join(local_meta(root), META_FOLDER, SPLIT_YAML))
    return WebdatasetSource.open(
        root, shards=chosen.shards(split), excluded_samples=chosen.excluded_samples, split_part=split
    )


def read_samples(source: SingleSource, start: int, stop: int) -> Iterator[Sample]:
    """Read the samples from ``start`` to ``stop`` - 1; for a JSONL file the fields of its objects are the parts.

    Raises:
        DatasetError: a sample cannot be read.
    """
    reader = source if isinstance(source, OpenedSource) else SampleReader(source)
    portion = min(_PORTION, math.ceil(_PORTION_BYTES / max(1.0, source.mean_bytes)))
    lines = is_jsonl(source.path)
    for first in range(start, stop, portion):
        indices = range(first, min(stop, first + portion))
        columns = reader.read(indices)
        for place, index in enumerate(indices):
            if columns is None:
                key, parts, _ = reader.sample(index)
            else:
                key = columns.keys[place]
                parts = {name: column[place] for name, column in columns.parts.items()}
            yield key, _fields(parts["json"], source.path, index) if lines else parts


def _fields(line: bytes, path: str, number: int) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"line {number} is not JSON: {error}", where=path, fix="correct or remove the line") from None
    if not isinstance(fields, dict):
        raise UsageError(f"line {number} is not a JSON object", where=path, fix="correct or remove the line")
    return fields


# A part is the bytes of a file, whose kind is given by its name (``jpg``, ``txt``, ``json``), or a value. In tables and
# MDS, text and numbers should be readable by other programs, so ``txt`` becomes text there, and ``cls`` a number; in a
# tar, a value becomes a file whose decoding gives the value back.

#: Extensions of text. Parts of these and the next are decoded if values are wanted; others stay bytes.
_TEXTS = frozenset(["txt", "text", "transcript"])
_NUMBERS = frozenset(["cls", "cls2", "index", "inx", "id"])
_DECODED = _TEXTS | _NUMBERS | {"npy"}
_JSON = frozenset(["json", "jsn"])
_DECODER = SampleDecoder(image_decode=None)


def extension_of(name: str) -> str:
    """Return the extension of a part's name, which selects its decoder."""
    return name.rpartition(".")[2]


def is_file_struct(value: Any) -> bool:
    """Return True if a value is a file in the form of Hugging Face's data sets: its bytes and its path."""
    return isinstance(value, dict) and value.keys() == {"bytes", "path"} and isinstance(value["bytes"], bytes)


def as_value(name: str, value: Any) -> Any:
    """Return a part as text, number or array if its name says that it is one; otherwise unchanged.

    Raises:
        DecodeError: the bytes do not fit the name.
    """
    if isinstance(value, bytes) and extension_of(name) in _DECODED:
        return _DECODER.decode(name, value)
    return value


def as_json(name: str, value: Any, where: str) -> Any:
    """Return a part as a JSON value: bytes of text and JSON are decoded, arrays become lists.

    Raises:
        UsageError: JSON cannot hold the value.
    """
    if isinstance(value, bytes):
        if extension_of(name) not in _DECODED | _JSON:
            raise UsageError(
                f"part {name!r} is bytes, which JSON cannot hold",
                where=where,
                fix=f"leave it out (--without {name}), or convert to tar, mds or parquet",
            )
        value = _DECODER.decode(name, value)
    if isinstance(value, dict):
        return {key: as_json(str(key), element, where) for key, element in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(name, element, where) for element in value]
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else _plain(name, value, where)


def _plain(name: str, value: Any, where: str) -> Any:
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if type(value).__name__ in ("Decimal", "datetime", "date", "time", "timedelta", "UUID"):
        return str(value)
    raise UsageError(
        f"part {name!r} is a {type(value).__name__}, which the format cannot hold",
        where=where,
        fix=f"leave it out: --without {name}",
    )


def as_file(name: str, value: Any, where: str) -> tuple[str, bytes]:
    """Return name and bytes of the file that a part becomes in a tar.

    Raises:
        UsageError: no kind of file can hold the value.
    """
    if isinstance(value, bytes):
        return name, value
    if is_file_struct(value):
        ending = os.path.splitext(value["path"] or "")[1].lower() or _sniffed(value["bytes"])
        return _with_extension(name, {ending[1:]}, ending[1:]) if ending else name, value["bytes"]
    if isinstance(value, str):
        return _with_extension(name, _TEXTS, "txt"), _utf8(value, name, where)
    if isinstance(value, np.ndarray):
        stream = io.BytesIO()
        np.save(stream, value, allow_pickle=False)
        return _with_extension(name, {"npy"}, "npy"), stream.getvalue()
    if isinstance(value, int) and not isinstance(value, bool) and extension_of(name) in _NUMBERS:
        return name, str(value).encode()
    if hasattr(value, "getbands"):  # an image of Pillow
        stream = io.BytesIO()
        value.save(stream, format="PNG")
        return _with_extension(name, {"png"}, "png"), stream.getvalue()
    if _has_bytes(value):
        import msgpack

        return _with_extension(name, {"mp", "msg", "msgpack"}, "mp"), msgpack.packb(value)
    text = json.dumps(as_json(name, value, where), ensure_ascii=False)
    # Unpaired surrogates, which UTF-8 cannot encode, are written as JSON escapes.
    return _with_extension(name, _JSON, "json"), text.encode(errors="backslashreplace")


def _utf8(text: str, name: str, where: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"part {name!r} has {error.object[error.start]!r}, which no file of text can have",
            where=where,
            fix=f"repair the sample, or leave the part out: --without {name}",
        ) from None


def _with_extension(name: str, known: frozenset[str] | set[str], extension: str) -> str:
    return name if extension_of(name) in known else f"{name}.{extension}"


def _has_bytes(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_bytes, value.values()))
    return any(map(_has_bytes, value)) if isinstance(value, (list, tuple)) else isinstance(value, bytes)


def _sniffed(data: bytes) -> str:
    """The extension of an image or a RIFF file, by its first bytes; empty: the format is unknown."""
    known = data.startswith((b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"RIFF"))
    extension = guess_extension(data) if known else None
    return f".{extension}" if extension else ""
