"""The scans of all shards of a data set, as a job whose units are shards.

What is found in a shard is kept in a file of its own, in ``.nv-meta/energon_lite.shards``. When the packed index is
there it holds everything that these files hold, so they are removed, and the next ``prepare`` takes unchanged shards
from the packed index.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon_lite.errors import DataIndexError
from energon_lite.storage.files.atomic_file import flush_files, remove_if_there, write_bytes
from energon_lite.storage.files.open_file import open_file
from energon_lite.storage.files.shard_store import head_checksum
from energon_lite.storage.index.nv_meta import PACKED_INDEX, meta_path, shard_index_path, write_shard_index
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.sharded_job.helpers import run_units
from energon_lite.storage.sharded_job.job import Progress, ShardedJob
from energon_lite.storage.sharded_job.ranks import Ranks
from energon_lite.storage.sharded_job.result_files import ResultFiles, Table, UnitKind
from energon_lite.storage.tar.tar_headers import BLOCK
from energon_lite.storage.tar.tar_scan import SCAN_RULES, ShardScan, scan_shard

__all__ = ["ShardScans", "is_unfinished", "mark_unfinished", "remove_scans", "scan_files", "scan_job"]

#: Seconds of work that are not worth starting helpers for.
_ALONE = 0.3
_UNFINISHED = "energon_lite.unfinished"


@dataclass(frozen=True)
class _Shards(UnitKind[str, ShardScan]):
    """Shards of the folder ``root`` as units of work; their results are scans."""

    root: str

    def name(self, unit: str) -> str:
        return unit

    def where(self, unit: str) -> str:
        return os.path.join(self.root, unit)

    def inputs(self, unit: str) -> list[int]:
        """Rules of the scan, size, time of change and checksum of the first block."""
        try:
            with open(self.where(unit), "rb", buffering=0, opener=open_file) as file:
                now = os.fstat(file.fileno())
                return [SCAN_RULES, now.st_size, now.st_mtime_ns, head_checksum(file.read(BLOCK))]
        except OSError:
            return [SCAN_RULES, -1, -1, -1]

    def pack(self, result: ShardScan) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        fields = vars(result) | {"keys": np.frombuffer(result.keys, dtype=np.uint8)}
        arrays = {name: value for name, value in fields.items() if isinstance(value, np.ndarray)}
        return {name: value for name, value in fields.items() if name not in arrays}, arrays

    def unpack(self, table: Table, arrays: Mapping[str, NDArray[Any]]) -> ShardScan:
        texts = {name: tuple(table[name]) for name in ("part_names", "notes")}
        return ShardScan(**{**table, **texts, **arrays, "keys": arrays["keys"].tobytes()})


def scan_files(root: str) -> ResultFiles[str, ShardScan]:
    """The files of the scans of a data set."""
    return ResultFiles(meta_path(root, "energon_lite.shards"), _Shards(root))


def scan_job(root: str) -> tuple[ResultFiles[str, ShardScan], Callable[[str], ShardScan]]:
    """The result files of the scans of a data set, and what is done with a shard."""
    return scan_files(root), partial(_scan, root)


class ShardScans:
    """The scans of all shards: those that are known already, and those that ranks and processes make.

    Args:
        root: the data set's folder.
        shards: names of all shards, in order.
        ranks: who works on the data set; None: this process alone.
        workers: processes of this rank at most; None for one per core.
        rescan: do not use the packed index of an earlier preparation (but what an interrupted one left).
        progress: called with the number of shards that are done, of all, and a few words.

    Attributes:
        job: the work, with the errors of shards that cannot be scanned.
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
        ranks, files = ranks or Ranks(), scan_files(root)
        mine = ranks.share(shards) if ranks.rank else shards
        self.root = root
        self._indexed = {} if rescan else _indexed_scans(root, mine)
        tick = _Bytes(root, len(mine), progress) if progress else None
        run = partial(run_units, *scan_job(root), workers=ranks.workers(workers), alone=_ALONE)
        self.job = ShardedJob(files, shards, run, ranks=ranks, known=self._indexed, where=root, tick=tick)

    def do_share(self) -> None:
        """Scan this rank's shards, as far as they are new or have changed; all have a ``.tar.idx`` then."""
        self.job.do_share()
        for name in self.job.done.keys() - self.job.made:
            write_shard_index(self.root, self.scan(name))
        if self.job.ranks.rank:
            self._flush()

    def gather(self) -> None:
        """On rank 0: have the scans of all ranks; see :meth:`ShardedJob.gather`."""
        self.job.gather()
        self._flush()

    def scan(self, name: str) -> ShardScan:
        """The scan of a shard that is done."""
        return self._indexed.get(name) or self.job.read(name)

    def _flush(self) -> None:
        flush_files([shard_index_path(self.root, name) for name in self.job.made])


class _Bytes:
    """Tells progress in shards, and in the bytes of those, of which little more than the headers is read; so GB/s may
    exceed the disk's."""

    def __init__(self, root: str, shards: int, progress: Progress):
        self._root, self._shards, self._progress = root, shards, progress
        self._done = self._size = 0
        self._start = time.monotonic()

    def __call__(self, name: str, table: Table | None) -> None:
        path = os.path.join(self._root, name)
        self._done, self._size = self._done + 1, self._size + (os.path.getsize(path) if os.path.exists(path) else 0)
        speed = self._size / max(time.monotonic() - self._start, 1e-6) / 1e9
        self._progress(self._done, self._shards, f"{speed:.2f} GB/s")


def _scan(root: str, name: str) -> ShardScan:
    """What is done with a shard."""
    scan = scan_shard(root, name)
    write_shard_index(root, scan, flush=False)
    return scan


def _indexed_scans(root: str, shards: Sequence[str]) -> dict[str, ShardScan]:
    """The scans of those shards that stand in the packed index of an earlier preparation and have not changed."""
    try:
        index = PackedIndex.open(meta_path(root, PACKED_INDEX))
        if index.rules != SCAN_RULES:
            return {}
        rows = {name: row for row, name in enumerate(index.shard_names)}
        scans = [index.scan(rows[shard]) for shard in shards if shard in rows]
    except (OSError, DataIndexError):
        return {}
    now = _Shards(root).inputs
    return {scan.name: scan for scan in scans if now(scan.name) == [SCAN_RULES, scan.size, scan.mtime_ns, scan.head]}


def mark_unfinished(root: str) -> None:
    """Say that the preparation is not at its end, although ``.info.json`` may be there already."""
    write_bytes(meta_path(root, _UNFINISHED), flush=False)


def is_unfinished(root: str) -> bool:
    """Whether a preparation was interrupted in its last steps."""
    return os.path.exists(meta_path(root, _UNFINISHED))


def remove_scans(root: str) -> None:
    """Remove the files of all scans, and after them the mark of :func:`mark_unfinished`."""
    scan_files(root).remove()
    remove_if_there(meta_path(root, _UNFINISHED))
