"""The scans of all shards of a data set, as a sharded job whose units are shards.

The result for each shard is kept in a file of its own, in ``.nv-meta/energon_lite.shards``. The finished packed index
has the contents of all these files, so they are removed then, and the next ``prepare`` takes unchanged shards from the
packed index.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from energon_lite.errors import DataIndexError
from energon_lite.storage.files.atomic_file import flush_files, remove_if_there, write_bytes
from energon_lite.storage.files.shard_store import file_state
from energon_lite.storage.index.nv_meta import PACKED_INDEX, meta_path, shard_index_path, write_shard_index
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.sharded_job.job import Progress, Ranks, ShardedJob
from energon_lite.storage.sharded_job.work import Arrays, Table, Work
from energon_lite.storage.tar.tar_scan import SCAN_RULES, ShardScan, scan_shard

#: Seconds of work up to which no helpers are started.
_ALONE = 0.3
#: File that marks a folder whose preparation has not ended.
_UNFINISHED = "energon_lite.unfinished"


class Shards(Work[str, ShardScan]):
    """The scanning of shards of the folder ``root``; it also writes their ``.tar.idx``, without flushing them."""

    def __init__(self, root: str):
        super().__init__(meta_path(root, "energon_lite.shards"))
        self.root = root

    def name(self, unit: str) -> str:
        return unit

    def where(self, unit: str) -> str:
        return os.path.join(self.root, unit)

    def inputs(self, unit: str) -> list[Any]:
        """Return the version of the scan's rules, and size, time of change and first block's checksum of the shard."""
        return [SCAN_RULES, *(file_state(self.where(unit)) or (-1, -1, -1))]

    def do(self, unit: str) -> ShardScan:
        scan = scan_shard(self.root, unit)
        write_shard_index(self.root, scan, flush=False)
        return scan

    def pack(self, result: ShardScan) -> tuple[dict[str, Any], Arrays]:
        fields = vars(result) | {"keys": np.frombuffer(result.keys, dtype=np.uint8)}
        arrays = {name: value for name, value in fields.items() if isinstance(value, np.ndarray)}
        return {name: value for name, value in fields.items() if name not in arrays}, arrays

    def unpack(self, table: Table, arrays: Arrays) -> ShardScan:
        texts = {name: tuple(table[name]) for name in ("part_names", "notes")}
        return ShardScan(**{**table, **texts, **arrays, "keys": arrays["keys"].tobytes()})


class ShardScans(ShardedJob[str, ShardScan]):
    """The scans of all shards: known ones, and those that ranks and processes make.

    Args:
        root: the data set's folder.
        shards: names of all shards, in order.
        ranks: the ranks that share the work; None: this process alone.
        workers: processes of this rank at most; None for one per core.
        rescan: ignore the packed index of an earlier preparation, but not the results of an interrupted one.
        progress: called with the number of finished shards, the number of all, and a few words.
    """

    def __init__(
        self,
        root: str,
        shards: Sequence[str],
        *,
        ranks: Ranks | None = None,
        workers: int | None = None,
        rescan: bool = False,
        progress: Progress | None = None,
    ):
        ranks = ranks or Ranks()
        self.root = root
        self._indexed = {} if rescan else _indexed_scans(root, ranks.seen(shards))
        super().__init__(
            Shards(root),
            shards,
            ranks=ranks,
            workers=workers,
            alone=_ALONE,
            known=self._indexed,
            where=root,
            tick=_Bytes(root, progress) if progress else None,
        )

    def do_share(self) -> None:
        """Scan the new and changed shards of this rank's share; afterwards all of its shards have a ``.tar.idx``."""
        super().do_share()
        for name in self.done.keys() - self.made:
            write_shard_index(self.root, self.read(name))
        if self.ranks.rank:
            self._flush()

    def gather(self) -> None:
        """On rank 0: collect the scans of all ranks; see :meth:`ShardedJob.gather`."""
        super().gather()
        self._flush()

    def read(self, unit: str) -> ShardScan:
        """Return the scan of a finished shard."""
        return self._indexed.get(unit) or super().read(unit)

    def _flush(self) -> None:
        flush_files([shard_index_path(self.root, name) for name in self.made])


class _Bytes:
    """Reporter of progress in shards and in their bytes per second. Little more than headers is read, so the speed may
    exceed that of the disk."""

    def __init__(self, root: str, progress: Progress):
        self._root = root
        self._progress = progress
        self._size = 0
        self._start = time.monotonic()

    def __call__(self, name: str, table: Table | None, done: int, of: int) -> None:
        path = os.path.join(self._root, name)
        self._size += os.path.getsize(path) if os.path.exists(path) else 0
        speed = self._size / max(time.monotonic() - self._start, 1e-6) / 1e9
        self._progress(done, of, f"{speed:.2f} GB/s")


def _indexed_scans(root: str, shards: Sequence[str]) -> dict[str, ShardScan]:
    """The scans of those shards that are unchanged in the packed index of an earlier preparation, by name."""
    try:
        index = PackedIndex.open(meta_path(root, PACKED_INDEX))
        if index.rules != SCAN_RULES:
            return {}
        rows = {name: row for row, name in enumerate(index.shard_names)}
        scans = [index.scan(rows[shard]) for shard in shards if shard in rows]
    except (OSError, DataIndexError):
        return {}
    now = Shards(root).inputs
    return {scan.name: scan for scan in scans if now(scan.name) == [SCAN_RULES, scan.size, scan.mtime_ns, scan.head]}


def mark_unfinished(root: str) -> None:
    """Mark the preparation as unfinished, although ``.info.json`` may exist already."""
    write_bytes(meta_path(root, _UNFINISHED), flush=False)


def is_unfinished(root: str) -> bool:
    """Return True if a preparation was interrupted in its last steps."""
    return os.path.exists(meta_path(root, _UNFINISHED))


def remove_scans(root: str) -> None:
    """Remove the files of all scans, and after them the mark of :func:`mark_unfinished`."""
    Shards(root).remove()
    remove_if_there(meta_path(root, _UNFINISHED))
