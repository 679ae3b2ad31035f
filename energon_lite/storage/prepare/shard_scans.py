"""The scans of all shards of a data set: those that are known already, and those that ranks and processes make.

Ranks share nothing but the folder. Each scans every ``world_size``-th shard and leaves a piece for each; rank 0
collects the pieces. There is no process that aggregates, so nothing is in the way of the others, and nobody's results
are lost when somebody dies.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence

from energon_lite.errors import DatasetError
from energon_lite.storage.files.atomic_file import flush_files
from energon_lite.storage.index.nv_meta import tar_index_path, write_tar_index
from energon_lite.storage.prepare.ranks import Ranks
from energon_lite.storage.prepare.scan_cache import (
    has_failed,
    indexed_scans,
    make_pieces_folder,
    stored_scans,
    write_failure,
)
from energon_lite.storage.prepare.scan_pool import ScanResult, scan_shards
from energon_lite.storage.tar.tar_scan import ShardScan

__all__ = ["gather_scans", "scan_share"]

#: Seconds between two looks for the pieces of other ranks.
_LOOK = 0.2


def scan_share(
    root: str,
    shards: Sequence[str],
    *,
    ranks: Ranks,
    workers: int | None = None,
    rescan: bool = False,
    progress: Callable[[str], None] | None = None,
) -> dict[str, ScanResult]:
    """Scan this rank's share of the shards, as far as they are new or have changed; all have a ``.tar.idx`` then.

    Args:
        root: the data set's folder.
        shards: names of all shards, in order.
        ranks: who works on the data set.
        workers: processes of this rank at most; None for one per core.
        rescan: do not use the packed index of an earlier preparation (but that which an interrupted one left).
        progress: called with the name of each shard that is done.

    Returns:
        Per shard of the share its contents or the error.
    """
    # Now, not after the first shard: a folder that cannot be written is told at once.
    make_pieces_folder(root)
    own = ranks.share(shards)
    known = _known(root, own, use_index=not rescan)
    for name, scan in known.items():
        write_tar_index(root, scan)
        if progress:
            progress(name)
    left = [name for name in own if name not in known]
    if workers is None and ranks.world_size > 1:  # the cores of a machine are for all of its ranks
        workers = max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    results = _scan(root, left, workers, progress)
    if ranks.rank and not ranks.grouped:
        for name, result in results.items():
            if not isinstance(result, ShardScan):
                write_failure(root, name)
    return {**known, **results}


def _scan(
    root: str, shards: Sequence[str], workers: int | None, progress: Callable[[str], None] | None
) -> dict[str, ScanResult]:
    results = dict(zip(shards, scan_shards(root, shards, workers=workers, progress=progress), strict=True))
    flush_files([tar_index_path(root, name) for name, found in results.items() if isinstance(found, ShardScan)])
    return results


def _known(root: str, shards: Sequence[str], use_index: bool) -> dict[str, ShardScan]:
    known = indexed_scans(root, shards) if use_index else {}
    # Pieces are younger than the index.
    return known | stored_scans(root, [name for name in shards if name not in known])


def gather_scans(
    root: str,
    shards: Sequence[str],
    share: Mapping[str, ScanResult],
    *,
    ranks: Ranks,
    workers: int | None = None,
    rescan: bool = False,
    progress: Callable[[str], None] | None = None,
) -> dict[str, ScanResult]:
    """On rank 0: the results of all ranks, by shard.

    Ranks of a group have met before (:meth:`Ranks.together`). Otherwise this waits for the pieces of the others. A
    shard of which they left no piece, because it is broken or they died, is scanned here; so errors are known
    first-hand.

    Raises:
        DatasetError: the others made no progress for ``ranks.timeout`` seconds.
    """
    done = dict(share)
    others = [name for name in shards if name not in done]
    if others:
        found: dict[str, ScanResult] = {**_known(root, others, use_index=not rescan)}
        if progress:
            for name in found:
                progress(name)
        if not ranks.grouped:
            found |= _wait(root, [name for name in others if name not in found], shards, ranks, progress)
        left = [name for name in others if name not in found]
        done |= found
        done |= _scan(root, left, workers, progress)
    return done


def _wait(
    root: str,
    wanted: Sequence[str],
    shards: Sequence[str],
    ranks: Ranks,
    progress: Callable[[str], None] | None,
) -> dict[str, ShardScan]:
    """The pieces of ``wanted``, without those that their ranks report as broken."""
    found: dict[str, ShardScan] = {}
    waiting, last = list(wanted), time.monotonic()
    while waiting:
        new = stored_scans(root, waiting)
        failed = {name for name in waiting if name not in new and has_failed(root, name)}
        if new or failed:
            last = time.monotonic()
        if progress:
            for name in new:
                progress(name)
        found |= new
        waiting = [name for name in waiting if name not in new and name not in failed]
        if waiting and time.monotonic() - last > ranks.timeout:
            raise _too_slow(root, waiting, shards, ranks)
        if waiting:
            time.sleep(_LOOK)
    return found


def _too_slow(root: str, waiting: Sequence[str], shards: Sequence[str], ranks: Ranks) -> DatasetError:
    owners = {name: number % ranks.world_size for number, name in enumerate(shards)}
    by_rank: dict[int, list[str]] = {}
    for name in waiting:
        by_rank.setdefault(owners[name], []).append(name)
    texts = [
        f"rank {rank}: {', '.join(names[:3])}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        for rank, names in sorted(by_rank.items())
    ]
    return DatasetError(
        f"no result for {len(waiting)} of {len(shards)} shards after {ranks.timeout:g} s without progress ("
        + "; ".join(texts)
        + ")",
        where=root,
        fix="see why these ranks are slow or gone, or whether they see this folder; run again, what is done is kept",
    )
