"""The table of samples that belong together across data sets: made once from their keys, kept in the user's cache.

A row stands for a sample of the first data set (the primary one): its number among the samples that are read, and for
each other data set the number of the sample with the same key, or -1. The table is a function of the keys of the
samples that are read, so the digests of the indexes and of the choices of shards and samples identify it. An edited
``split.yaml``, another split, or data that were prepared anew have another table.

Matching takes seconds for millions of keys. Two hashes of each key are kept. Keys are read once, in their order, and
numbers are sorted. Keys of one data set with the same first hash are compared as texts.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from energon_lite.config.leaf_spec import Nonmatch
from energon_lite.errors import DatasetError
from energon_lite.storage.files.array_file import FileKind, write_arrays
from energon_lite.storage.files.stored_array import Numbers, open_arrays, whole_or_none
from energon_lite.storage.index.index_cache import cache_folder, first_writable, made_once
from energon_lite.storage.index.key_index import hash_keys
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.read.webdataset import WebdatasetSource
from energon_lite.storage.tar_members import Int64

_TABLE = FileKind(b"ENRGLJOI", 1, "join table", "remove the file: it is made again when the data set is opened")


class JoinTable(NamedTuple):
    """The rows of a join, with their file and digest.

    Attributes:
        path: the file of the table.
        rows: ``[n, data sets]``, int64 sample numbers; -1: no match.
        digest: digest of the rows.
        left_out: skipped samples of the first data set, for want of a match.
    """

    path: str
    rows: Numbers
    digest: str
    left_out: int

    @classmethod
    def open(cls, path: str) -> JoinTable:
        """Open the file of a join table.

        Raises:
            DataIndexError: it is damaged, or of another kind.
            FileNotFoundError: there is no such file.
        """
        arrays, meta = open_arrays(path, _TABLE)
        try:
            return cls(path, arrays["rows"], str(meta["digest"]), int(meta["left_out"]))
        except (KeyError, TypeError, ValueError):
            raise _TABLE.damaged(path, "its tables do not fit together") from None


def join_table(sources: Sequence[WebdatasetSource], nonmatch: Sequence[Nonmatch]) -> JoinTable:
    """Return the table of some data sets, from the cache or made now; one of several processes makes it.

    Args:
        sources: the samples that are read; the first is the primary one.
        nonmatch: the treatment of missing matches for each source; ignored for the first.

    Raises:
        DatasetError: a joined data set has a key twice; or a sample has no match where ``nonmatch`` is ``"error"``.
        DataIndexError: no folder for the table can be written.
    """
    path = _place(sources, nonmatch)
    found = partial(whole_or_none, JoinTable.open)

    def made_at(path: str) -> JoinTable:
        return made_once(path, found, lambda: _write(path, *_make(sources, nonmatch)))

    return found(path) or first_writable(sources[0].path, "the join table", [path], "write there", made_at)


def _place(sources: Sequence[WebdatasetSource], nonmatch: Sequence[Nonmatch]) -> str:
    parts = [f"{source.index.digest} {source.fingerprint} {how}" for source, how in zip(sources, nonmatch, strict=True)]
    name = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
    first = os.path.basename(sources[0].path.rstrip("/")) or "data"
    return os.path.join(cache_folder(), "joins", f"{first}-{name}.join")


def _write(path: str, rows: Int64, left_out: int) -> None:
    digest = hashlib.blake2b(np.ascontiguousarray(rows).data, digest_size=16).hexdigest()
    write_arrays(path, _TABLE, {"rows": rows}, {"digest": digest, "left_out": left_out})


def _make(sources: Sequence[WebdatasetSource], nonmatch: Sequence[Nonmatch]) -> tuple[Int64, int]:
    """Match the keys: the rows, and the number of skipped samples of the first data set."""
    keys = [SampleKeys(source.index, source.choice.locate_many(np.arange(len(source)))[1]) for source in sources]
    first, kept = keys[0], np.ones(len(sources[0]), dtype=bool)
    columns = [np.arange(len(sources[0]))]
    for source, mine, how in list(zip(sources, keys, nonmatch, strict=True))[1:]:
        if twice := mine.twice():
            raise DatasetError(
                f"a data set with repeated keys cannot be joined; repeated is {twice[0]!r}",
                where=str(source),
                fix="give each sample a key of its own, or exclude all but one of them in .nv-meta/split.yaml",
            )
        matches = match_keys(first, mine)
        missing = np.flatnonzero(matches < 0)
        if len(missing) and how == "error":
            what = (
                f"{len(missing)} of {len(sources[0])} samples of {sources[0].path} have no sample of the same key here"
            )
            raise DatasetError(
                f"{what}, such as {first.key(int(missing[0]))!r}",
                where=str(source),
                fix="write 'nonmatch: skip' to leave such samples out, or 'nonmatch: none' to join them with None",
            )
        if how == "skip":
            kept[missing] = False
        columns.append(matches)
    rows = np.stack(columns, axis=1)[kept]
    return rows.astype("<i8"), int(len(kept) - kept.sum())


# -- keys -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class SampleKeys:
    """The keys of some samples of an index, as hashes.

    Args:
        index: the packed index.
        samples: their numbers over all shards of the data set, in the order of the match.
    """

    index: PackedIndex
    samples: Int64

    def __len__(self) -> int:
        return len(self.samples)

    def key(self, place: int) -> str:
        """The key at a place of ``samples``."""
        return self.index.key(int(self.samples[place]))

    def twice(self) -> list[str]:
        """Keys that appear more than once; at most some of them."""
        return sorted({name for name, count in Counter(map(self.key, self._alike)).items() if count > 1})

    @cached_property
    def hashes(self) -> NDArray[np.uint64]:
        """Two hashes of each key, ``[2, n]``."""
        return hash_keys(self.index, self.samples, words=2)

    @cached_property
    def order(self) -> Int64:
        """The places, sorted by the first hash of their keys."""
        return np.argsort(self.hashes[0], kind="stable")

    @cached_property
    def _alike(self) -> list[int]:
        """Places of keys that share their first hash with another key; at most some of them."""
        ordered = self.hashes[0][self.order]
        same = np.flatnonzero(ordered[1:] == ordered[:-1])[:1000]
        return self.order[np.unique(np.concatenate([same, same + 1]))].tolist()


def match_keys(wanted: SampleKeys, there: SampleKeys) -> Int64:
    """Return for each wanted key its place among ``there``, whose keys are unique; -1: the key is not there.

    Example:
        >>> match_keys(SampleKeys(images, np.arange(3)), SampleKeys(captions, np.arange(2)))
        array([ 1, -1,  0])
    """
    if not len(there):
        return np.full(len(wanted), -1, dtype=np.int64)
    if there._alike:  # different keys have equal hashes
        known = {there.key(place): place for place in range(len(there))}
        return np.array([known.get(wanted.key(place), -1) for place in range(len(wanted))], dtype=np.int64)
    if wanted.hashes.shape == there.hashes.shape and (wanted.hashes == there.hashes).all():
        return np.arange(len(wanted))  # the same keys in the same order, as in data sets that were made together
    at = np.empty(len(wanted), dtype=np.int64)
    at[wanted.order] = np.searchsorted(there.hashes[0][there.order], wanted.hashes[0][wanted.order])
    near = there.order[np.minimum(at, len(there) - 1)]
    return np.where((there.hashes[:, near] == wanted.hashes).all(axis=0), near, -1)
