"""Whether the shards that a data set is said to have are there."""

from __future__ import annotations

import os
from collections.abc import Sequence

from energon_lite.errors import EmptyDatasetError, MissingShardError, did_you_mean
from energon_lite.storage.files.remote_files import Listing
from energon_lite.storage.files.shard_store import changed_shard, file_version
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.read.remote import shard_sizes

__all__ = ["check_files", "check_known", "split_words"]

#: Shards that are asked for their size when a data set is opened, at most.
_SIZES_CHECKED = 1000


def split_words(split_part: str) -> str:
    """What a split is called in messages."""
    return f"split {split_part!r}" if split_part else "the data set"


def check_known(root: str, shards: Sequence[str], counts: dict[str, int], split_part: str) -> None:
    """Every chosen shard is one of the data set's, and there is one.

    Args:
        counts: samples by shard, of all that the data set has.

    Raises:
        EmptyDatasetError, MissingShardError: it is not so.
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
    """Every shard is there, and of the right size; of very many, sizes of some (of the others when they are read).
    Returns their versions; of the others that is the time of change that the index has.

    Args:
        there: what the store says of the files of a remote data set.

    Raises:
        MissingShardError, ShardChangedError: it is not so.
    """
    if there is None and len(shards) > _SIZES_CHECKED:
        _check_there(root, shards)
    known = zip(index.shard_names, index.shards[:-1, 0].tolist(), index.shard_times.tolist(), strict=True)
    rows = {name: (size, time) for name, size, time in known}
    versions = [rows[name][1] for name in shards]
    there_sizes = {} if there is None else shard_sizes(there)
    for place in range(0, len(shards), -(-len(shards) // _SIZES_CHECKED) if there is None else 1):
        name = shards[place]
        path, (expected, time) = os.path.join(root, name), rows[name]
        try:
            found = os.stat(path) if there is None else there[name]
        except (FileNotFoundError, KeyError):
            raise _missing(root, name) from None
        size = found.st_size if isinstance(found, os.stat_result) else there_sizes[name]
        if size is not None and size != expected:
            raise changed_shard(path, expected, size)
        versions[place] = file_version(found, time)
    return tuple(versions)


def _check_there(root: str, shards: Sequence[str]) -> None:
    """Every shard is there: listing a folder takes a request or two, where asking for each file takes thousands."""
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
