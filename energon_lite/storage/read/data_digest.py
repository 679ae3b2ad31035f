"""Telling data sets apart whose shards have the same names, sizes and numbers of samples."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

from energon_lite.extras.energon.joins.joined_source import JoinedSource
from energon_lite.storage.files.remote_files import is_remote
from energon_lite.storage.files.shard_store import Range, Shard, ShardStore
from energon_lite.storage.read.opened_source import AnySource, OpenedSource

__all__ = ["data_digest", "data_digests"]

#: Places in the data set, evenly spread; bytes that are looked at from each, and shards that they may be in.
_PLACES, _BYTES, _SHARDS = 4, 1 << 16, 2
#: Data sets in a store that are looked at at the same time.
_TOGETHER = 16


def data_digests(sources: Sequence[AnySource]) -> list[str]:
    """:func:`data_digest` of each; of those in a store, many are asked for at the same time."""
    if not any(is_remote(source.path) for source in sources):
        return [data_digest(source) for source in sources]
    with ThreadPoolExecutor(_TOGETHER) as pool:
        return list(pool.map(data_digest, sources))


def data_digest(source: AnySource) -> str:
    """Identifies the samples that a source reads, wherever its folder is: a digest of its fingerprint and of some of
    their bytes, all of them where there are few (256 KiB, in a few shards).

    Two data sets that were made alike, of records of one size, have equal fingerprints. Their samples differ nearly
    everywhere, so four reads are enough. Copies, and shards that were written again at another time, have the same.

    Raises:
        MissingShardError, ShardChangedError, DatasetError: a shard cannot be read.
    """
    if isinstance(source, OpenedSource):  # which says itself what tells it from others
        return hashlib.sha256(source.fingerprint.encode()).hexdigest()
    if isinstance(source, JoinedSource):
        every = [source.fingerprint, *map(data_digest, source.members)]
        return hashlib.sha256("\n".join(every).encode()).hexdigest()
    choice, store = source.choice, ShardStore()  # which leaves no file open
    digest = hashlib.sha256(source.fingerprint.encode())
    firsts = sorted({len(source) * place // _PLACES for place in range(_PLACES)})
    for number, stop in pairwise([*firsts, len(source)]):
        left, shards = _BYTES, set[Shard]()
        while number < stop and left > 0:
            group: list[Range] = []
            while number < stop:  # samples that one read has
                *_, ranges = choice.wanted(number, None)
                if ranges:
                    shard, offset, _ = ranges[0]
                    if group and (shard != group[0][0] or not 0 <= offset - group[0][1] < left):
                        break
                    if len(shards | {shard}) > _SHARDS:
                        break
                    shards.add(shard)
                number, group = number + 1, group + ranges
            if not group:
                break
            start = min(offset for _, offset, _ in group)
            size = min(left, max(offset + size for _, offset, size in group) - start)
            [data] = store.fetch([(group[0][0], start, size)])
            for _, offset, length in group:
                digest.update(f"{length}\n".encode() + data[offset - start : offset - start + length])
            left -= max(size, 1)
    return digest.hexdigest()
