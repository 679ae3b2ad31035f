"""What is in a folder of shards, before it is prepared, and what is to be decided about it."""

from __future__ import annotations

import logging
import os
import re
import uuid
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from energon_lite.errors import EmptyDatasetError, ShardFormatError, UsageError, counted
from energon_lite.storage.index.nv_meta import DATASET_YAML
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.prepare.shard_scans import ShardScans
from energon_lite.storage.read.sample_choice import SampleChoice
from energon_lite.storage.read.sample_reader import SampleReader
from energon_lite.storage.read.webdataset import RawSample, WebdatasetSource
from energon_lite.storage.tar.tar_scan import ShardScan, check_is_file

__all__ = ["Choice", "DatasetScan", "chosen_shards", "count_parts", "dataset_scan", "find_shards", "merge_scans"]

_log = logging.getLogger(__name__)

#: More part names than this in one data set usually mean that file names have dots in their keys.
_MANY_PART_NAMES = 100


@dataclass(frozen=True)
class DatasetScan:
    """What is in a folder of shards.

    Attributes:
        root: the folder, absolute, or a URL.
        scans: shards that hold samples, in order.
        index: the packed index over them.
        parts: number of parts by part name, the most frequent first.
        notes: what looked odd, in words.
    """

    root: str
    scans: tuple[ShardScan, ...]
    index: PackedIndex
    parts: Mapping[str, int]
    notes: tuple[str, ...] = ()

    @property
    def shard_names(self) -> tuple[str, ...]:
        """Names of the shards, in order."""
        return self.index.shard_names

    @property
    def samples(self) -> int:
        """Number of samples."""
        return len(self.index)

    def read(self, indices: Sequence[int]) -> list[RawSample]:
        """Read some samples."""
        nothing = np.zeros(0, dtype=np.int64)
        reader = SampleReader(WebdatasetSource(SampleChoice(self.index, self.root, self.shard_names, nothing)))
        return [reader.sample(index) for index in indices]


@dataclass(frozen=True)
class Choice:
    """What is to be decided about a folder whose shards are known.

    Args:
        splits: shard names by split.
        may_be_empty: splits without shards that are no surprise.
        dataset_document: contents of ``dataset.yaml``; None leaves that file as it is, or missing.
        dataset_yaml_name: its name.
        files: contents of other files in ``.nv-meta``, by name; those that are there already stay.
    """

    splits: Mapping[str, Sequence[str]]
    may_be_empty: Collection[str] = ()
    dataset_document: Mapping[str, Any] | None = None
    dataset_yaml_name: str = DATASET_YAML
    files: Mapping[str, str] = field(default_factory=dict)


def find_shards(root: str, exclude: str | None = None) -> list[str]:
    """Names of all tar files below ``root``, with forward slashes, sorted.

    Links are followed, to each folder once.

    Args:
        root: the folder; hidden folders in it are not searched.
        exclude: regular expression; shards in whose name it is found are left out.

    Raises:
        UsageError: the expression is invalid, or a name cannot be written into ``split.yaml``.
        ShardFormatError: a shard is a pipe or the like, or all are compressed.
        EmptyDatasetError: there is no tar file.
    """
    if not os.path.isdir(root):
        raise UsageError("there is no such folder", where=root, fix="give the folder that holds the tar files")
    found = (os.path.join(folder, file) for folder, files in _folders(root) for file in files)
    chosen = chosen_shards(root, [os.path.relpath(path, root).replace(os.sep, "/") for path in found], exclude)
    for name in chosen:
        check_is_file(os.path.join(root, name))
    return chosen


def chosen_shards(root: str, files: Iterable[str], exclude: str | None = None) -> list[str]:
    """:func:`find_shards` of files that are known, by their names relative to ``root``."""
    try:
        unwanted = re.compile(exclude) if exclude else None
    except re.error as error:
        raise UsageError(f"--exclude {exclude!r} is not a regular expression: {error}") from None
    names, compressed = [], []
    for name in files:
        if name.endswith(".tar"):
            names.append(name)
        elif name.endswith((".tgz", ".tar.gz", ".tar.zst", ".tar.xz", ".tar.bz2")):
            compressed.append(name)
    chosen = sorted(name for name in names if not (unwanted and unwanted.search(name)))
    if not chosen and compressed:
        raise ShardFormatError(
            f"all shards are compressed, such as {compressed[0]!r}; their samples cannot be read at random",
            where=root,
            fix="unpack them to .tar (compressed images gain nothing from it)",
        )
    if not chosen:
        left_out = f" that --exclude leaves in ({len(names)} were found)" if names else ""
        raise EmptyDatasetError(f"there are no .tar files in the folder{left_out}", where=root, fix="check the path")
    for name in chosen:
        if "{" in name or "}" in name:
            raise UsageError(
                f"shard {name!r} has a brace in its name, which split.yaml takes for a pattern",
                where=root,
                fix="rename it, or leave it out with --exclude",
            )
    return chosen


def _folders(root: str) -> Iterator[tuple[str, list[str]]]:
    """All folders from ``root`` on with the names of what is in them, each once: those behind links come last, so that
    each goes by its own name, if it has one here."""
    waiting, seen = deque([root]), set()
    while waiting:
        for folder, folders, files in os.walk(waiting.popleft()):
            place = os.path.realpath(folder)
            if place in seen:
                if os.path.islink(folder):
                    _log.warning("%s leads to a folder that is searched already; it is not searched again", folder)
                folders.clear()
                continue
            seen.add(place)
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            waiting.extend(path for name in folders if os.path.islink(path := os.path.join(folder, name)))
            yield folder, files


def count_parts(scans: Sequence[ShardScan]) -> dict[str, int]:
    """Number of parts by part name, the most frequent first."""
    parts: Counter[str] = Counter()
    for scan in scans:
        parts.update(dict(zip(scan.part_names, np.bincount(scan.parts[:, 2]).tolist(), strict=True)))
    return dict(parts.most_common())


def merge_scans(scans: ShardScans, *, skip_broken: bool = False) -> DatasetScan:
    """The scans of all shards, put together.

    Args:
        scans: of all shards.
        skip_broken: leave out shards that cannot be indexed, with a note for each.

    Raises:
        ShardFormatError: shards that cannot be indexed, all of them, each with its reason.
        EmptyDatasetError: no shard holds a sample.
    """
    if not skip_broken:
        fix = "write them again, or leave them out with --exclude or --skip-broken-shards"
        scans.raise_errors(ShardFormatError, "be indexed", fix)
    found = [scans.read(name) for name in scans.units if name not in scans.errors]
    left_out = [f"{name}: left out: {error.what}" for name, error in scans.errors.items()]
    return dataset_scan(os.path.abspath(scans.root), found, left_out)


def dataset_scan(root: str, found: Sequence[ShardScan], notes: Sequence[str] = ()) -> DatasetScan:
    """What is in a folder, or behind a URL, with these shards.

    Args:
        notes: what is to be told of shards that are not among them.

    Raises:
        EmptyDatasetError: none of them holds a sample.
    """
    shards = [scan.name for scan in found]
    notes = [*notes, *(f"{scan.name}: {note}" for scan in found for note in scan.notes)]
    notes += [f"{scan.name}: holds no sample, it is left out" for scan in found if not scan.samples]
    found = [scan for scan in found if scan.samples]
    if not found:
        raise EmptyDatasetError(
            f"none of the {counted(len(shards), 'shard')} holds a sample",
            where=root,
            fix="a sample is made of files named <key>.<part>, such as 0001.jpg and 0001.txt",
        )
    index = PackedIndex.from_scans(found)
    # Made of the contents, so that equal shards give equal files, however often and by how many they were scanned.
    index.uuid = str(uuid.UUID(hex=index.digest, version=4))
    parts = count_parts(found)
    if len(parts) > _MANY_PART_NAMES:
        notes.append(
            f"there are {len(parts)} part names, such as {next(iter(parts))!r}: a key ends at the first dot of a file "
            "name, so keys must not contain dots"
        )
    return DatasetScan(root, tuple(found), index, parts, tuple(notes))
