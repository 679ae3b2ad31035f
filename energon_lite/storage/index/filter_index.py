"""Filter indexes: named lists of the samples that are kept, next to a data set.

Their form is that of Megatron-Energon 8, so either library reads the files of the other: ``filter_<name>.json`` (number
of kept samples of each shard) and ``filter_<name>.idx`` (their numbers over all shards, ascending, as unsigned 64-bit
numbers, little endian), both in ``.nv-meta``; for a file such as ``chats.jsonl``, ``chats.jsonl.<name>.json`` and
``chats.jsonl.<name>.idx`` next to it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from energon_lite.documents import load_yaml
from energon_lite.errors import DataIndexError, UsageError
from energon_lite.storage.files.atomic_file import write_bytes
from energon_lite.storage.index.columns import check_column_name
from energon_lite.storage.index.index_cache import open_index
from energon_lite.storage.index.jsonl import is_jsonl
from energon_lite.storage.index.nv_meta import meta_path
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.tar.tar_scan import Int64

__all__ = ["build_filter_index", "build_filter_index_from_shard_indexes", "read_filter_index"]

_VERSION = 1


def filter_paths(root: str, name: str) -> tuple[str, str]:
    """Paths of the two files of a filter index: the counts and the numbers."""
    stem = f"{root}.{name}" if is_jsonl(root) else meta_path(root, f"filter_{name}")
    return f"{stem}.json", f"{stem}.idx"


def build_filter_index(
    dataset_path: str | os.PathLike[str], filter_name: str, indexes: Iterable[int], *, overwrite: bool = False
) -> None:
    """Store a list of kept samples of a prepared data set under a name, for ``filter:`` in a metadataset.

    Args:
        dataset_path: the prepared folder, or a JSONL file.
        filter_name: such as ``quality_v1``.
        indexes: numbers of the samples, ascending, counted over all shards in the order of ``.nv-meta/.info.json``.
        overwrite: replace an existing index of that name.

    Raises:
        UsageError: the numbers do not ascend, or exceed the samples; or the index exists already.
        DatasetError: the path is no prepared data set.

    Example:
        >>> lengths = source.column("length")
        >>> build_filter_index("data/coco", "short", np.flatnonzero(lengths[:] <= 4096))
    """
    root = os.path.abspath(os.fspath(dataset_path))
    json_path, index_path = filter_paths(root, check_column_name(filter_name))
    index, _ = open_index(root)
    kept = np.asarray(indexes if isinstance(indexes, (Sequence, np.ndarray)) else list(indexes))
    kept = kept.astype(np.int64) if kept.size and kept.dtype.kind in "iu" else np.zeros(0, dtype=np.int64)
    given = len(indexes) if isinstance(indexes, (Sequence, np.ndarray)) else len(kept)
    if len(kept) != given or (len(kept) and not (kept[0] >= 0 and kept[-1] < len(index) and (np.diff(kept) > 0).all())):
        raise UsageError(
            f"the numbers for the filter {filter_name!r} are not those of samples, each once and in order",
            where=root,
            fix=f"give ascending integers from 0 to {len(index) - 1}",
        )
    if not overwrite and (os.path.exists(json_path) or os.path.exists(index_path)):
        raise UsageError(
            f"there is a filter {filter_name!r} already",
            where=json_path,
            fix="give overwrite=True, or --force-overwrite",
        )
    bounds = index.shards[:, 3].astype(np.int64)
    counts = np.diff(np.searchsorted(kept, bounds))
    document = {
        "version": _VERSION,
        "filtered_shard_counts": dict(zip(index.shard_names, counts.tolist(), strict=True)),
    }
    write_bytes(index_path, kept.astype("<u8").tobytes())
    write_bytes(json_path, json.dumps(document, indent=2, sort_keys=True).encode() + b"\n")


def build_filter_index_from_shard_indexes(
    dataset_path: str | os.PathLike[str],
    filter_name: str,
    indexes_by_shard: Mapping[str, Iterable[int]],
    *,
    overwrite: bool = False,
) -> None:
    """Store a filter index from numbers that are counted within each shard; see :func:`build_filter_index`.

    Raises:
        UsageError, DatasetError: as there; or a shard is unknown.
    """
    root = os.path.abspath(os.fspath(dataset_path))
    index, _ = open_index(root)
    unknown = indexes_by_shard.keys() - set(index.shard_names)
    if unknown:
        raise UsageError(f"the data set has no shard {sorted(unknown)[0]!r}", where=root, fix="correct its name")
    starts, kept = index.shards[:, 3].tolist(), list[int]()
    for name, (start, stop) in zip(index.shard_names, pairwise(starts), strict=True):
        numbers = [int(number) for number in indexes_by_shard.get(name, ())]
        if any(not 0 <= number < stop - start for number in numbers):
            raise UsageError(
                f"a number beyond the {stop - start} samples of {name}", where=root, fix="count in the shard, from 0"
            )
        kept += [start + number for number in numbers]
    build_filter_index(dataset_path, filter_name, kept, overwrite=overwrite)


def read_filter_index(root: str, index: PackedIndex, name: str) -> Int64:
    """Read the numbers of the samples that a filter index keeps, ascending.

    Raises:
        DataIndexError: the index does not exist, is damaged, or belongs to another data set.
    """
    json_path, index_path = filter_paths(root, name)
    if not (os.path.isfile(json_path) and os.path.isfile(index_path)):
        raise DataIndexError(
            f"the data set has no filter index {name!r}",
            where=json_path,
            fix="make it with energon_lite.storage.build_filter_index, correct the name, or write a comparison of "
            "columns (tokens <= 4096)",
        )
    counts = _counts(json_path)
    kept = np.fromfile(index_path, dtype="<u8")
    bounds = index.shards[:, 3].astype(np.int64)
    names = index.shard_names
    wanted = [0, *accumulate(counts.get(shard, 0) for shard in names)]
    good = counts.keys() <= set(names) and len(kept) == wanted[-1] == sum(counts.values())
    if good and len(kept):
        good = bool(kept[-1] < len(index)) and bool((kept[1:] > kept[:-1]).all())
    numbers = kept.astype(np.int64) if good else np.zeros(0, dtype=np.int64)
    if not good or np.searchsorted(numbers, bounds).tolist() != wanted:
        raise DataIndexError(
            f"the filter index {name!r} is damaged, or was made for another state of the data set",
            where=index_path,
            fix="make it again: energon_lite.storage.build_filter_index(..., overwrite=True)",
        )
    return numbers


def _counts(path: str) -> dict[str, int]:
    """Number of kept samples of each shard."""
    document: Any = load_yaml(path).plain()
    counts = document.get("filtered_shard_counts") if isinstance(document, dict) else None
    if not isinstance(counts, dict) or document.get("version") != _VERSION:
        raise DataIndexError(
            f"this is no filter index of version {_VERSION}", where=path, fix="make it again with build_filter_index"
        )
    good = all(isinstance(count, int) and not isinstance(count, bool) and count >= 0 for count in counts.values())
    if not good:
        raise DataIndexError("the counts of a filter index are damaged", where=path, fix="make it again")
    return counts
