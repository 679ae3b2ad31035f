"""Checks that the shards of a data set exist and have the indexed sizes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from energon_lite.errors import EmptyDatasetError, MissingShardError, did_you_mean
from energon_lite.storage.files.file_versions import file_version, numbers_of
from energon_lite.storage.files.remote_files import Listing, file_info
from energon_lite.storage.files.shard_store import changed_shard
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.read.remote import shard_sizes

__all__ = ["check_files", "check_known", "split_words"]

#: Shards whose sizes are checked when a data set is opened, at most.
_SIZES_CHECKED = 1000
#: Requests for records of shards at the same time.
_TOGETHER = 32


def split_words(split_part: str) -> str:
    """Return the name of a split for messages."""
    return f"split {split_part!r}" if split_part else "the data set"


def check_known(root: str, shards: Sequence[str], counts: dict[str, int], split_part: str) -> None:
    """Check that at least one shard is chosen, and that the data set has all of them.

    Args:
        counts: number of samples of each shard of the data set.

    Raises:
        EmptyDatasetError, MissingShardError: a check failed.
    """
    if not shards:
        raise EmptyDatasetError(
            f"there are no shards in {split_words(split_part)}",
            where=root,
            fix="check split_parts and exclude in .nv-meta/split.yaml, or give --split-ratio another division",
        )
    for name in shards:
        if name not in counts:
            correct = f"correct .nv-meta/split.yaml, or run `energon-lite prepare --force-overwrite {root}`"
            raise MissingShardError(
                f"{split_words(split_part)} lists shard {name!r}, which the data set does not have",
                where=root,
                fix=did_you_mean(name, counts, correct, always=True),
            )


def check_files(root: str, shards: Sequence[str], index: PackedIndex, there: Listing | None = None) -> tuple[int, ...]:
    """Check that every shard exists and has the indexed size. If there are very many shards, only some sizes are
    checked now, the others when they are read. Return the versions of the shards; those of unchecked local ones are the
    times of change in the index, and unchecked remote ones have none.

    Args:
        there: the store's listing of the files, for a remote data set.

    Raises:
        MissingShardError, ShardChangedError: a check failed.
    """
    if there is None and len(shards) > _SIZES_CHECKED:
        _check_there(root, shards)
    known = zip(index.shard_names, index.shards[:-1, 0].tolist(), index.shard_times.tolist(), strict=True)
    rows = {name: (size, time) for name, size, time in known}
    versions = [rows[name][1] for name in shards]
    if there is not None:
        there = _with_records(root, shards, there)
    there_sizes = {} if there is None else shard_sizes(there)
    for place in range(0, len(shards), -(-len(shards) // _SIZES_CHECKED) if there is None else 1):
        name = shards[place]
        path, (expected, time) = os.path.join(root, name), rows[name]
        try:
            status = os.stat(path) if there is None else there[name]
        except (FileNotFoundError, KeyError):
            raise _missing(root, name) from None
        size = status.st_size if isinstance(status, os.stat_result) else there_sizes[name]
        if size is not None and size != expected:
            raise changed_shard(path, expected, size)
        versions[place] = file_version(status, time)
    return tuple(versions)


def _with_records(root: str, shards: Sequence[str], there: Listing) -> Listing:
    """A listing with the records of shards of which it names no version, as listings of web servers; of many shards,
    those of some."""

    def record(name: str) -> Mapping[str, Any]:
        with suppress(FileNotFoundError):  # such as a server that answers to reads only
            return file_info(f"{root}/{name}")
        return there[name]

    bare = [name for name in shards if name in there and not numbers_of(there[name])]
    bare = bare[:: max(1, -(-len(bare) // _SIZES_CHECKED))]
    if not bare:
        return there
    with ThreadPoolExecutor(_TOGETHER, "energon-lite-records") as pool:
        return {**there, **dict(zip(bare, pool.map(record, bare), strict=True))}


def _check_there(root: str, shards: Sequence[str]) -> None:
    """Check that every shard exists, by listing folders: that takes a few requests instead of one for each file."""
    listed: dict[str, set[str]] = {}
    for name in shards:
        folder, _, file = name.rpartition("/")
        if folder not in listed:
            try:
                listed[folder] = set(os.listdir(os.path.join(root, folder)))
            except (FileNotFoundError, NotADirectoryError):
                listed[folder] = set()
        if file not in listed[folder]:
            raise _missing(root, name)


def _missing(root: str, shard: str) -> MissingShardError:
    return MissingShardError(
        "a shard of the data set does not exist",
        where=os.path.join(root, shard),
        fix=f"put it back, or leave it out with `energon-lite prepare --force-overwrite {root}`",
    )
