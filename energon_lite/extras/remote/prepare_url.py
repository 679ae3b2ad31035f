"""Preparation of a data set in a store, in place. Headers are read by ranges, and only small files are written.

All files are made in a local folder, as for a local data set, and then uploaded next to the shards: last comes
``.info.json``, which makes the data set count as prepared. Results for shards are kept in that folder, so that a run
that was killed resumes there.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from energon_lite.errors import DatasetError, ShardFormatError, UsageError
from energon_lite.extras.remote.file_versions import version_of
from energon_lite.extras.remote.remote_files import copy_file, file_size, file_system, list_files, size_in, tried
from energon_lite.extras.remote.remote_index import in_threads, scan_remote_shard
from energon_lite.storage.dataset_scan import DatasetScan, Shards, chosen_shards, dataset_scan
from energon_lite.storage.files.atomic_file import only_one, remove_leftovers
from energon_lite.storage.files.byte_ranges import Listing
from energon_lite.storage.index import nv_meta
from energon_lite.storage.index.index_cache import cache_folder, check_count
from energon_lite.storage.prepare import PrepareOptions, PrepareReport, already_prepared, write_prepared
from energon_lite.storage.prepare_choices import Choice
from energon_lite.storage.sharded_job import Progress, ShardedJob
from energon_lite.storage.sharded_work import Outcome, Table
from energon_lite.storage.tar_scan import SCAN_RULES, ShardScan

#: An empty file that tests write access, and marks an unfinished preparation.
_MARK = "energon_lite.unfinished"
#: Files that make a data set count as prepared, in the order of their upload.
_LAST = (nv_meta.SQLITE_INDEX, nv_meta.INFO_YAML, nv_meta.INFO_JSON)
#: Schemes of servers that cannot be written to.
_READ_ONLY = ("http", "https")
_ELSEWHERE = (
    "prepare a local copy and upload .nv-meta and the .tar.idx files with the shards, or give the store's own URL"
)


class _Shards(Shards):
    """The scanning of shards of a data set in a store.

    Args:
        url: URL of the data set.
        folder: the local folder of the results.
        there: the store's listing of the data set's files.
    """

    def __init__(self, url: str, folder: str, there: Listing):
        super().__init__(url)
        self.folder = folder
        self._there = there

    def inputs(self, unit: str) -> list[Any]:
        """Return the version of the scan's rules, and size and version of the shard."""
        return [SCAN_RULES, self._size(unit), list(version_of(self._there[unit]))]

    def belongs(self, unit: str, inputs: Any) -> bool:
        # A shard without a version may have changed unnoticed.
        return any(version_of(self._there[unit])) and super().belongs(unit, inputs)

    def do(self, unit: str) -> ShardScan:
        return scan_remote_shard(self.root, unit, self._size(unit))

    def _size(self, unit: str) -> int:
        return file_size(self.where(unit), self._there[unit])

    def outcome(self, unit: str) -> Outcome:
        """Scan a shard, and keep the result; return its table, or the error of a damaged shard."""
        try:
            return self.write(unit, self.inputs(unit), self.do(unit))
        except ShardFormatError as error:
            return error


@dataclass(frozen=True)
class RemoteFolder:
    """A data set in a store, and the local folder in which its small files are made.

    Args:
        url: URL of the data set.
        root: the local folder.
        there: the store's listing of its files.
    """

    url: str
    root: str
    there: Listing

    @property
    def is_prepared(self) -> bool:
        """True if the data set was prepared completely."""
        names = {f"{nv_meta.META_FOLDER}/{name}" for name in (nv_meta.INFO_JSON, nv_meta.INFO_YAML)}
        return bool(names & self.there.keys()) and f"{nv_meta.META_FOLDER}/{_MARK}" not in self.there

    def begin(self) -> None:
        """Mark the data set as unfinished, which detects missing permissions before long work.

        Raises:
            UsageError: nothing can be written there.
        """
        scheme = self.url.partition("://")[0]
        if scheme in _READ_ONLY:
            raise UsageError(f"{scheme}:// cannot be written to", where=self.url, fix=_ELSEWHERE)
        try:
            put_bytes(self.url, f"{nv_meta.META_FOLDER}/{_MARK}", b"")
        except DatasetError as error:
            raise UsageError(f"nothing can be written there: {error.what}", where=self.url, fix=_ELSEWHERE) from error

    def find_shards(self, exclude: str | None) -> list[str]:
        """Find the shards; see :func:`~energon_lite.storage.dataset_scan.find_shards`."""
        is_hidden = {name: any(part.startswith(".") for part in name.split("/")[:-1]) for name in self.there}
        return chosen_shards(self.url, [name for name in self.there if not is_hidden[name]], exclude)

    def scan(self, shards: list[str], *, rescan: bool, progress: Progress | None) -> DatasetScan:
        """Scan these shards; the results are kept in the local folder.

        Raises:
            ShardFormatError: shards cannot be indexed; the message names all of them with the reasons.
            EmptyDatasetError: no shard holds a sample.
        """
        work = _Shards(self.url, os.path.join(self.root, "scans"), self.there)

        def tick(name: str, table: Table | None, done: int, of: int) -> None:
            if progress is not None:
                progress(done, of, "")

        run = partial(in_threads, work.outcome)
        job = ShardedJob(work, shards, run=run, again=lambda table: rescan, where=self.url, tick=tick)
        job.run()
        job.raise_errors(ShardFormatError, "be indexed", "write them again, or leave them out with --exclude")
        return dataset_scan(self.url, [job.read(name) for name in shards])

    def local(self, scan: DatasetScan) -> DatasetScan:
        """Write the ``.tar.idx`` files into the local folder; return the scan with that folder as its root."""
        for shard in scan.scans:
            path = nv_meta.shard_index_path(self.root, shard.name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            nv_meta.write_shard_index(self.root, shard, flush=False)
        return replace(scan, root=self.root)

    def publish(self, scan: DatasetScan) -> None:
        """Upload the files of the local folder next to the shards.

        Raises:
            DatasetError: the store refuses, or fails.
        """
        meta = os.path.join(self.root, nv_meta.META_FOLDER)
        names = [name for name in os.listdir(meta) if os.path.isfile(os.path.join(meta, name)) and name != _MARK]
        for name in reversed(_LAST):
            remove_file(self.url, f"{nv_meta.META_FOLDER}/{name}")
        first = [os.path.relpath(nv_meta.shard_index_path("", shard.name), ".") for shard in scan.scans]
        first += [f"{nv_meta.META_FOLDER}/{name}" for name in names if name not in _LAST]
        dict(in_threads(self._put, first))
        for name in _LAST:
            if name in names:
                self._put(f"{nv_meta.META_FOLDER}/{name}")
        remove_file(self.url, f"{nv_meta.META_FOLDER}/{_MARK}")

    def _put(self, name: str) -> None:
        put_file(self.url, name, os.path.join(self.root, name))


@contextmanager
def remote_folder(url: str, tmp_path: str | None = None) -> Iterator[RemoteFolder]:
    """Open a data set in a store for its preparation in the block. Its small files are copied to a local folder, which
    is removed when the block ends without an error.

    Args:
        url: URL of the data set.
        tmp_path: folder in which the local folder is made; None: in the user's cache.

    Raises:
        UsageError: nothing can be written there.
        DatasetError: the store does not answer.
    """
    url = url.rstrip("/")
    base = os.path.join(cache_folder(), "prepare") if tmp_path is None else os.path.abspath(tmp_path)
    name = f"{os.path.basename(url)}-{hashlib.sha256(url.encode()).hexdigest()[:16]}"
    root = os.path.join(base, name)
    mark = f"{nv_meta.META_FOLDER}/{_MARK}"
    with only_one(root):
        there = list_files(url)
        meta = os.path.join(root, nv_meta.META_FOLDER)
        shutil.rmtree(meta, ignore_errors=True)
        os.makedirs(meta)
        with suppress(FileNotFoundError):
            remove_leftovers(os.path.join(root, "scans"))
        try:
            for path, info in there.items():
                folder, _, file = path.rpartition("/")
                if folder == nv_meta.META_FOLDER and file != _MARK and not file.endswith((".lock", ".tmp")):
                    copy_file(url, path, os.path.join(meta, file), size_in(info))
            yield RemoteFolder(url, root, there)
        except BaseException:
            if mark not in there:
                with suppress(Exception):
                    now = {f"{nv_meta.META_FOLDER}/{name}" for name in list_files(url, nv_meta.META_FOLDER)}
                    if now - {mark} == {name for name in there if name.startswith(nv_meta.META_FOLDER + "/")}:
                        remove_file(url, mark)  # nothing was changed there
            raise
        shutil.rmtree(root, ignore_errors=True)


def prepare_url(url: str, choose: Callable[[DatasetScan], Choice] | None, options: PrepareOptions) -> PrepareReport:
    """Prepare a data set; without ``choose``, make the indexes of a prepared one again."""
    with remote_folder(url, options.tmp_path) as remote:
        if choose is not None and remote.is_prepared and not options.force_overwrite:
            raise already_prepared(url)
        counts = nv_meta.read_info(remote.root) if choose is None else {}
        shards = remote.find_shards(options.exclude) if choose else [name for name in counts if counts[name]]
        remote.begin()
        scan = remote.scan(shards, rescan=options.rescan or choose is None, progress=options.progress)
        for name in counts:
            check_count(url, name, scan.index.shard_counts.get(name, 0), counts[name])
        choice = None if choose is None else choose(scan)
        report = write_prepared(remote.local(scan), choice, options.sqlite)
        remote.publish(scan)
        return replace(report, path=remote.url)


# -- files in the store, each written atomically --------------------------------------------------------------------


def put_bytes(url: str, name: str, data: bytes) -> None:
    """Write the file ``name`` below ``url``.

    Raises:
        DatasetError: the store refuses, or fails repeatedly.
    """
    fs, base = file_system(url)
    tried(lambda: fs.pipe_file(f"{base}/{name}", data), url, name)


def put_file(url: str, name: str, source: str) -> None:
    """Write the file ``name`` below ``url`` with the contents of a local file.

    Raises:
        DatasetError: the store refuses, fails repeatedly, or has another number of bytes afterwards.
    """
    fs, base = file_system(url)

    def put() -> None:
        fs.put_file(source, f"{base}/{name}")
        fs.invalidate_cache()
        size, there = os.path.getsize(source), size_in(fs.info(f"{base}/{name}"))
        if there not in (None, size):
            raise OSError(f"{there} bytes were written instead of {size}")

    tried(put, url, name)


def remove_file(url: str, name: str) -> None:
    """Remove a file if it exists.

    Raises:
        DatasetError: the store refuses, or fails repeatedly.
    """
    fs, base = file_system(url)
    with suppress(FileNotFoundError):
        tried(lambda: fs.rm_file(f"{base}/{name}"), url, name)
