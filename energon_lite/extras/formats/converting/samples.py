"""Reading of the samples to convert: those of a data set of any format, in order, in portions."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

from energon_lite.config.split import load_split_config
from energon_lite.documents.paths import is_url, local_path
from energon_lite.errors import UsageError
from energon_lite.storage.index.jsonl import is_jsonl
from energon_lite.storage.index.nv_meta import META_FOLDER, SPLIT_YAML
from energon_lite.storage.read.opened_source import OpenedSource, SingleSource
from energon_lite.storage.read.remote import local_meta
from energon_lite.storage.read.sample_reader import SampleReader
from energon_lite.storage.read.source import source_opener
from energon_lite.storage.read.webdataset import WebdatasetSource

__all__ = ["Sample", "open_samples", "read_samples"]

#: A key, and the parts by name: bytes of files, or values.
Sample = tuple[str, dict[str, Any]]

#: Samples that are read together, at most.
_PORTION = 512
#: Bytes of samples that are read together, at most, approximately.
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
    root = local_path(path)
    root = root if is_url(root) else os.path.abspath(os.path.expanduser(root))
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
    portion = max(1, min(_PORTION, int(_PORTION_BYTES / max(1.0, source.mean_bytes))))
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
        raise UsageError(f"line {number} is no JSON: {error}", where=path, fix="correct or remove the line") from None
    if not isinstance(fields, dict):
        raise UsageError(f"line {number} is no JSON object", where=path, fix="correct or remove the line")
    return fields
