"""The scan of a folder of shards before it is prepared: a sharded job whose units are shards, and its result.

The result for each shard is kept in a file of its own, in ``.nv-meta/energon_lite.shards``. The finished packed index
has the contents of all these files, so they are removed then, and the next ``prepare`` takes unchanged shards from the
packed index.
"""

from __future__ import annotations

import logging
import os
import re
import time
import uuid
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon_lite.errors import DataIndexError, EmptyDatasetError, ShardFormatError, UsageError, counted, listed
from energon_lite.storage.files.atomic_file import flush_files, remove_if_there
from energon_lite.storage.files.shard_store import file_state
from energon_lite.storage.index.nv_meta import PACKED_INDEX, UNFINISHED, meta_path, shard_index_path, write_shard_index
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.read.sample_choice import SampleChoice
from energon_lite.storage.read.sample_reader import SampleReader
from energon_lite.storage.read.webdataset import RawSample, WebdatasetSource
from energon_lite.storage.sharded_job import Progress, Ranks, ShardedJob, Tick
from energon_lite.storage.sharded_work import Arrays, Table, Work
from energon_lite.storage.tar_scan import SCAN_RULES, ShardScan, check_is_file, scan_shard

_log = logging.getLogger(__name__)

#: More part names than this in a data set usually mean that keys contain dots.
_MANY_PART_NAMES = 100
#: Seconds of work up to which no helpers are started.
_ALONE = 0.3


def find_shards(root: str, exclude: str | None = None) -> list[str]:
    """Find all tar files below ``root``; return their names with forward slashes, sorted.

    Links are followed; each folder is searched once.

    Args:
        root: the folder; hidden folders in it are not searched.
        exclude: regular expression; shards whose name it matches anywhere are left out.

    Raises:
        UsageError: the expression is invalid, or a name cannot be written into ``split.yaml``.
        ShardFormatError: a shard is a pipe or the like, or all are compressed.
        EmptyDatasetError: there is no tar file.
    """
    if not os.path.isdir(root):
        what = "this is a file, and no folder" if os.path.exists(root) else "there is no such folder"
        fix = "give the folder that holds the tar files; files of other formats are loaded without preparation"
        raise UsageError(what, where=root, fix=fix)
    paths = (os.path.join(folder, file) for folder, files in _folders(root) for file in files)
    chosen = chosen_shards(root, [os.path.relpath(path, root).replace(os.sep, "/") for path in paths], exclude)
    for name in chosen:
        check_is_file(os.path.join(root, name))
    return chosen


def chosen_shards(root: str, files: Iterable[str], exclude: str | None = None) -> list[str]:
    """Choose the shards among known files, by their names relative to ``root``; see :func:`find_shards`."""
    try:
        unwanted = re.compile(exclude) if exclude else None
    except re.error as error:
        raise UsageError(f"--exclude {exclude!r} is not a regular expression: {error}") from None
    names = set(files)
    found = sum(name.endswith(".tar") for name in names)
    wanted = sorted(name for name in names if not (unwanted and unwanted.search(name)))
    chosen = [name for name in wanted if name.endswith(".tar")]
    packed = re.compile(r"\.(tgz|tar\.(gz|zst|xz|bz2))$")
    packed_only = [name for name in wanted if packed.search(name) and packed.sub(".tar", name) not in names]
    if not chosen and packed_only:
        what = f"all shards are compressed, such as {packed_only[0]!r}; their samples cannot be read at random"
        fix = "unpack them to .tar (compressed images gain nothing from it)"
        raise ShardFormatError(what, where=root, fix=fix)
    if not chosen:
        left_out = f" that --exclude leaves in ({found} were found)" if found else ""
        raise EmptyDatasetError(f"there are no .tar files in the folder{left_out}", where=root, fix="check the path")
    if packed_only:
        _log.warning("%s: compressed shards are left out (unpack them to .tar), such as %s", root, packed_only[0])
    for name in chosen:
        if "{" in name or "}" in name:
            raise UsageError(
                f"shard {name!r} has a brace in its name, which split.yaml takes for a pattern",
                where=root,
                fix="rename it, or leave it out with --exclude",
            )
    return chosen


def _folders(root: str) -> Iterator[tuple[str, list[str]]]:
    """All folders from ``root`` on with the names of their files, each once. Folders behind links come last, so that a
    folder is listed under its own name if it has one here."""
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
        return [SCAN_RULES, *(file_state(self.where(unit)) or ())]

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
            tick=_reporter(root, progress) if progress else None,
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


def _reporter(root: str, progress: Progress) -> Tick[str]:
    """Return the reporter of progress in shards and in their bytes per second. Little more than headers is read, so the
    speed may exceed that of the disk."""
    size, start = 0, time.monotonic()

    def report(name: str, table: Table | None, done: int, of: int) -> None:
        nonlocal size
        path = os.path.join(root, name)
        size += os.path.getsize(path) if os.path.exists(path) else 0
        progress(done, of, f"{size / max(time.monotonic() - start, 1e-6) / 1e9:.2f} GB/s")

    return report


def _indexed_scans(root: str, shards: Sequence[str]) -> dict[str, ShardScan]:
    """The scans of those shards that are unchanged in the packed index of an earlier preparation, by name."""
    try:
        index = PackedIndex.open(meta_path(root, PACKED_INDEX))
        if index.rules != SCAN_RULES:
            return {}
        scans = [index.scan(index.shard_rows[shard]) for shard in shards if shard in index.shard_rows]
    except (OSError, DataIndexError):
        return {}
    now = Shards(root).inputs
    return {scan.name: scan for scan in scans if now(scan.name) == [SCAN_RULES, scan.size, scan.mtime_ns, scan.head]}


def remove_scans(root: str) -> None:
    """Remove the files of all scans, and after them the mark of an unfinished preparation."""
    Shards(root).remove()
    remove_if_there(meta_path(root, UNFINISHED))


@dataclass(frozen=True)
class DatasetScan:
    """The contents of a folder of shards.

    Attributes:
        root: the folder, absolute, or a URL.
        scans: shards that hold samples, in order.
        index: the packed index over them.
        parts: number of parts by part name, the most frequent first.
        notes: remarks on oddities.
    """

    root: str
    scans: tuple[ShardScan, ...]
    index: PackedIndex
    parts: Mapping[str, int]
    notes: tuple[str, ...] = ()

    @property
    def shard_names(self) -> tuple[str, ...]:
        """Names of the shards that hold samples, in order."""
        return self.index.shard_names

    @property
    def samples(self) -> int:
        """Number of samples in all shards."""
        return len(self.index)

    def read(self, indices: Sequence[int]) -> list[RawSample]:
        """Read the samples with these numbers."""
        nothing = np.zeros(0, dtype=np.int64)
        reader = SampleReader(WebdatasetSource(SampleChoice(self.index, self.root, self.shard_names, nothing)))
        return [reader.sample(index) for index in indices]


def count_parts(scans: Sequence[ShardScan]) -> dict[str, int]:
    """Count the parts by part name, the most frequent first."""
    parts: Counter[str] = Counter()
    for scan in scans:
        parts.update(dict(zip(scan.part_names, np.bincount(scan.parts[:, 2]).tolist(), strict=True)))
    return dict(parts.most_common())


def merge_scans(scans: ShardScans, *, skip_broken: bool = False) -> DatasetScan:
    """Combine the scans of all shards.

    Args:
        scans: the scans of all shards.
        skip_broken: leave out shards that cannot be indexed, with a note for each.

    Raises:
        ShardFormatError: shards cannot be indexed; the message names all of them with the reasons.
        EmptyDatasetError: no shard holds a sample.
    """
    if not skip_broken:
        fix = "write them again, or leave them out with --exclude or --skip-broken-shards"
        scans.raise_errors(ShardFormatError, "be indexed", fix)
    readable = [scans.read(name) for name in scans.units if name not in scans.errors]
    left_out = [f"{name}: left out: {error.what}" for name, error in scans.errors.items()]
    return dataset_scan(os.path.abspath(scans.root), readable, left_out)


def dataset_scan(root: str, found: Sequence[ShardScan], notes: Sequence[str] = ()) -> DatasetScan:
    """Make the scan of a folder, or of a URL, from those of its shards.

    Args:
        notes: remarks on shards that are not among them.

    Raises:
        EmptyDatasetError: no shard holds a sample.
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
    # Derived from the contents, so that equal shards give equal files, however often they are scanned by any number.
    index.uuid = str(uuid.UUID(hex=index.digest, version=4))
    parts = count_parts(found)
    if len(parts) > _MANY_PART_NAMES:
        notes.append(
            f"there are {len(parts)} part names, such as {next(iter(parts))!r}: a key ends at the first dot of a file "
            "name, so keys must not contain dots"
        )
    return DatasetScan(root, tuple(found), index, parts, tuple(notes))


#: Most samples of a kind that are named; further ones are only counted.
_NAMED = 1000
#: Most samples that are examined together.
_BLOCK = 1 << 20


def usual_parts(numbers: NDArray[np.int64], names: Sequence[str], samples: int) -> frozenset[str]:
    """Return the parts that nearly all samples have: at least 98 of 100.

    Args:
        numbers: the number of each part's name.
        names: the names, by number.
        samples: number of samples.

    Example:
        >>> usual_parts(np.array([0, 1, 0, 1, 0]), ["jpg", "txt"], 3)
        frozenset({'jpg'})
    """
    counts = np.bincount(numbers, minlength=len(names)).tolist()
    return frozenset(name for name, count in zip(names, counts, strict=True) if count >= 0.98 * samples)


def odd_sample_notes(index: PackedIndex) -> Iterator[str]:
    """Describe apparent defects of a data set; each kind is followed by its samples as ``shard: key.part``.

    Args:
        index: the packed index of the data set.
    """
    usual = usual_parts(index.parts[:][:, 2], index.part_names, len(index)) if len(index) else frozenset()
    known = np.array([name in usual for name in index.part_names], dtype=bool)
    kinds: dict[str, list[NDArray[np.int64]]] = {}
    for start in range(0, len(index), _BLOCK):
        for what, pairs in _odd(index, known, start, min(start + _BLOCK, len(index))):
            kinds.setdefault(what, []).append(pairs)
    for what, blocks in kinds.items():
        pairs = np.concatenate(blocks)
        samples, parts = pairs[:_NAMED].T.tolist()
        rows = (np.searchsorted(index.shards[:, 3], samples, side="right") - 1).tolist()
        names = [f"{index.key(sample)}.{index.part_names[part]}" for sample, part in zip(samples, parts, strict=True)]
        named = [f"{index.shard_names[row]}: {name}" for row, name in zip(rows, names, strict=True)]
        having = "1 sample has" if len(pairs) == 1 else f"{len(pairs):,} samples have"
        yield f"{having} {what}: {listed(named, _NAMED, len(pairs))}"


def _odd(
    index: PackedIndex, known: NDArray[np.bool_], start: int, stop: int
) -> Iterator[tuple[str, NDArray[np.int64]]]:
    """Kind and ``[n, 2]`` (sample, number of the part's name) of the defects in a range of samples."""
    first = index.samples[start : stop + 1][:, 0]
    parts = index.parts[int(first[0]) : int(first[-1])]
    owners = np.repeat(np.arange(start, stop), np.diff(first))
    empty = np.flatnonzero(parts[:, 1] == 0)
    if len(empty):
        yield "a part without bytes", np.stack([owners[empty], parts[empty, 2]], 1)
    # A sample with an unusual part does not count as lacking one: the unusual part may replace it.
    plain = np.ones(stop - start, dtype=bool)
    plain[owners[~known[parts[:, 2]]] - start] = False
    for number in np.flatnonzero(known).tolist():
        lacks = plain.copy()
        lacks[owners[parts[:, 2] == number] - start] = False
        if lacks.any():
            missing = np.flatnonzero(lacks) + start
            what = f"no part {index.part_names[number]!r}, which nearly all others have"
            yield what, np.stack([missing, np.full(len(missing), number)], 1)
    both = np.sort(owners * len(known) + parts[:, 2])
    doubled = both[1:][both[1:] == both[:-1]]
    if len(doubled):
        yield "a part more than once", np.stack(np.divmod(doubled, len(known)), 1)
