"""Checks that the shards of a data set exist and have the indexed sizes."""

from __future__ import annotations

import os
from collections.abc import Sequence

from energon_lite.errors import EmptyDatasetError, MissingShardError, did_you_mean
from energon_lite.storage.files.byte_ranges import file_version
from energon_lite.storage.files.shard_store import changed_shard
from energon_lite.storage.index.packed_index import PackedIndex

__all__ = ["check_files", "check_known", "missing_shard", "split_words"]

#: Shards whose sizes are checked when a data set is opened, at most.
_SIZES_CHECKED = 1000


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


def check_files(root: str, shards: Sequence[str], index: PackedIndex) -> tuple[int, ...]:
    """Check that every shard exists and has the indexed size. If there are very many shards, only some sizes are
    checked now, the others when they are read. Return the versions of the shards; those of unchecked ones are the times
    of change in the index.

    Raises:
        MissingShardError, ShardChangedError: a check failed.
    """
    if len(shards) > _SIZES_CHECKED:
        _check_there(root, shards)
    known = zip(index.shard_names, index.shards[:-1, 0].tolist(), index.shard_times.tolist(), strict=True)
    rows = {name: (size, time) for name, size, time in known}
    versions = [rows[name][1] for name in shards]
    for place in range(0, len(shards), -(-len(shards) // _SIZES_CHECKED)):
        name = shards[place]
        path, (expected, time) = os.path.join(root, name), rows[name]
        try:
            status = os.stat(path)
        except FileNotFoundError:
            raise missing_shard(root, name) from None
        if status.st_size != expected:
            raise changed_shard(path, expected, status.st_size)
        versions[place] = file_version(status, time)
    return tuple(versions)


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
            raise missing_shard(root, name)


def missing_shard(root: str, shard: str) -> MissingShardError:
    """Return the error for a shard that does not exist."""
    return MissingShardError(
        "a shard of the data set does not exist",
        where=os.path.join(root, shard),
        fix=f"put it back, or leave it out with `energon-lite prepare --force-overwrite {root}`",
    )
