"""Digests of data sets, which differ even if the shards have the same names, sizes and numbers of samples."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

from energon_lite.storage.files.remote_files import is_remote
from energon_lite.storage.files.shard_store import Range, Shard, ShardStore
from energon_lite.storage.read.opened_source import AnySource
from energon_lite.storage.read.webdataset import WebdatasetSource

__all__ = ["data_digest", "data_digests"]

#: Evenly spread places in the data set that are read.
_PLACES = 4
#: Bytes that are read at each place.
_BYTES = 1 << 16
#: Shards that the bytes of a place may come from.
_SHARDS = 2
#: Data sets in a store that are read at the same time.
_TOGETHER = 16


def data_digests(sources: Sequence[AnySource]) -> list[str]:
    """:func:`data_digest` of each source; those in a store are read at the same time."""
    if not any(is_remote(source.path) for source in sources):
        return [data_digest(source) for source in sources]
    with ThreadPoolExecutor(_TOGETHER) as pool:
        return list(pool.map(data_digest, sources))


def data_digest(source: AnySource) -> str:
    """Return a digest of the samples that a source reads, independent of its folder's place: of its fingerprint and of
    some of their bytes (up to 256 KiB, in a few shards; all bytes of small data sets).

    Two data sets that were made in the same way, of records of one size, have equal fingerprints. Their samples differ
    nearly everywhere, so four reads are enough. Copies, and shards that were written again, have the same digest.

    Raises:
        MissingShardError, ShardChangedError, DatasetError: a shard cannot be read.
    """
    if not isinstance(source, WebdatasetSource):  # its fingerprint and its members distinguish it from others
        every = [source.fingerprint, *map(data_digest, source.members)]
        return hashlib.sha256("\n".join(every).encode()).hexdigest()
    choice, store = source.choice, ShardStore()  # a store of its own, which leaves no file open
    digest = hashlib.sha256(source.fingerprint.encode())
    firsts = sorted({len(source) * place // _PLACES for place in range(_PLACES)})
    for number, stop in pairwise([*firsts, len(source)]):
        left, shards = _BYTES, set[Shard]()
        while number < stop and left > 0:
            group: list[Range] = []
            while number < stop:  # samples that fit into one read
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
