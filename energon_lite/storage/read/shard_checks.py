"""Whether the shards that a data set is said to have are there."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from energon_lite.errors import EmptyDatasetError, MissingShardError, did_you_mean
from energon_lite.storage.files.shard_store import changed_shard
from energon_lite.storage.index.packed_index import PackedIndex

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


def check_files(
    root: str, shards: Sequence[str], index: PackedIndex, there: Mapping[str, int | None] | None = None
) -> None:
    """Every shard is there, and of the right size; of very many, sizes of some (of the others when they are read).

    Args:
        there: sizes of the files of a remote data set.

    Raises:
        MissingShardError, ShardChangedError: it is not so.
    """
    if there is None and len(shards) > _SIZES_CHECKED:
        _check_there(root, shards)
    sizes = dict(zip(index.shard_names, index.shards[:, 0].tolist(), strict=False))
    for name in shards[:: -(-len(shards) // _SIZES_CHECKED)] if there is None else shards:
        path = os.path.join(root, name)
        try:
            size = os.stat(path).st_size if there is None else there[name]
        except (FileNotFoundError, KeyError):
            raise _missing(root, name) from None
        if size is not None and size != sizes[name]:
            raise changed_shard(path, sizes[name], size)


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
