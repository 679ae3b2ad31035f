"""Which samples of the chosen shards are read: without those that ``split.yaml`` excludes or a column skips."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from energon_lite.storage.files.shard_store import ShardIdentity
from energon_lite.storage.index.column_file import ColumnFile
from energon_lite.storage.index.columns import SKIPPED
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.read.kept_samples import DenseExclusion
from energon_lite.storage.tar.tar_scan import Int64

__all__ = ["choice_fingerprint", "contents_fingerprint", "excluded_positions", "without_skips"]

_log = logging.getLogger(__name__)


def excluded_positions(index: PackedIndex, shards: Sequence[str], excluded: Sequence[tuple[str, str]]) -> Int64:
    """Positions, among the samples of ``shards``, of the samples to leave out."""
    wanted: dict[str, set[str]] = {}
    for shard, key in excluded:
        wanted.setdefault(shard, set()).add(key)
    rows = {name: number for number, name in enumerate(index.shard_names)}
    for shard in wanted.keys() - rows.keys():
        _log.warning("exclude names samples of shard %r, which the data set does not have", shard)
    positions: list[int] = []
    start = 0
    for name in shards:
        first, stop = index.shards[rows[name], 3], index.shards[rows[name] + 1, 3]
        keys = wanted.get(name)
        if keys:
            hits = [number for number, key in enumerate(index.keys(first, stop)) if key in keys]
            positions += [start + number for number in hits]
            for key in keys - {index.key(int(first) + number) for number in hits}:
                _log.warning("exclude names sample %r of shard %r, which is not there", key, name)
        start += int(stop - first)
    return np.array(positions, dtype=np.int64)


def without_skips(
    file: ColumnFile, first: Sequence[int], starts: Sequence[int], span: tuple[int, int], excluded: Int64
) -> DenseExclusion | None:
    """What a column of skips leaves of a run of samples; None if it leaves all that are not excluded.

    Args:
        file: the column.
        first: where each chosen shard starts in the column.
        starts: where each starts among the chosen samples, and where the last one ends.
        span: the run, in positions among the chosen samples.
        excluded: ascending positions in it that are left out anyway.
    """
    found = False

    def kept() -> Iterator[NDArray[np.bool_]]:
        nonlocal found
        for start, (begin, end) in zip(first, pairwise(starts), strict=True):
            low, high = max(begin, span[0]), min(end, span[1])
            if low >= high:
                continue
            left = file.values[start + low - begin : start + high - begin] != SKIPPED
            out = excluded[np.searchsorted(excluded, low) : np.searchsorted(excluded, high)] - low
            left[out] = True
            found = found or not left.all()
            left[out] = False
            yield left

    many = DenseExclusion(span[1] - span[0], kept())
    return many if found else None


def choice_fingerprint(
    names: Sequence[str],
    identities: Sequence[ShardIdentity],
    counts: Sequence[int],
    excluded: Int64,
    span: tuple[int, int],
    kept: str,
) -> str:
    """Identifies the samples that are read, wherever their folder is.

    Args:
        names, identities, counts: of the shards, in their order.
        excluded: positions that ``split.yaml`` leaves out.
        span: the run of samples that is read.
        kept: digest of what is left by a column of skips; empty if it leaves all.
    """
    digest = hashlib.sha256()
    for name, identity, count in zip(names, identities, counts, strict=True):
        digest.update(f"{name}\0{identity.size}\0{count}\n".encode("utf-8", "surrogateescape"))
    digest.update(("excluded " + " ".join(map(str, excluded.tolist()))).encode())
    if span != (0, sum(counts)):
        digest.update(f"\nsubset {span[0]} {span[1]}".encode())
    if kept:
        digest.update(f"\nkept {kept}".encode())
    return digest.hexdigest()


def contents_fingerprint(choice: str, identities: Sequence[ShardIdentity]) -> str:
    """Identifies the data themselves: shards that have the same names, sizes and counts differ in their first blocks.

    Args:
        choice: the :func:`choice_fingerprint`, from which the order is derived.
        identities: of the shards, in their order.
    """
    digest = hashlib.sha256(choice.encode())
    for identity in identities:
        digest.update(identity.head.to_bytes(4, "little"))
    return digest.hexdigest()
