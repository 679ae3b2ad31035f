"""Opening of the packed index of a data set, which is made if it does not exist.

``energon-lite prepare`` writes it into ``.nv-meta``. A folder that Energon prepared has none, or an old one; then it is
made from the tars when the data set is opened, and kept in ``.nv-meta`` or, where that cannot be written, in the user's
cache (``$ENERGON_LITE_CACHE``, else ``~/.cache/energon_lite``). If many processes do this at once, one makes it and the
others wait. A JSONL file needs no preparation: its index is made in the same way, and again when the file has changed.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

from energon_lite.documents.paths import is_url
from energon_lite.entry_points import storage_guest
from energon_lite.errors import DataIndexError, EnergonLiteError, ShardChangedError, counted
from energon_lite.storage.files.atomic_file import only_one
from energon_lite.storage.files.byte_ranges import remote_guest
from energon_lite.storage.files.stored_array import whole_or_none
from energon_lite.storage.index.nv_meta import PACKED_INDEX, is_jsonl, meta_path, read_info, read_uuid
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.tar_scan import ShardScan, scan_shard

_log = logging.getLogger(__name__)

_T = TypeVar("_T")
#: Returns True if an index belongs to the data set in its current state.
_Fits = Callable[[PackedIndex], bool]


def cache_folder() -> str:
    """The folder for files that cannot be kept next to the data."""
    chosen = os.environ.get("ENERGON_LITE_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.abspath(chosen) if chosen else os.path.join(base, "energon_lite")


class FileIndex(Protocol):
    """Maker of the index of a JSONL file, local or behind a URL.

    ``(path) -> FileIndex`` is the entry ``jsonl`` of ``STORAGE_GUESTS``; it raises NotPreparedError without a file.
    """

    def fits(self, index: PackedIndex) -> bool:
        """Return True if an index belongs to the file in its current state."""

    def make(self) -> PackedIndex:
        """Make the index.

        Raises:
            DatasetError: the file cannot be read.
            ShardChangedError: it was written to during the scan.
        """


class UrlDatasets(NamedTuple):
    """Functions of the guest that opens data sets behind URLs: entry ``url_datasets`` of ``STORAGE_GUESTS``.

    Attributes:
        local_meta: returns the local folder with a copy of the data set's ``.nv-meta``.
        open_index: ``(url, meta, counts, shards)``, with that folder, the number of samples by shard, and the wanted
            shards; checks that these exist with the indexed sizes, and returns the index, its file, and their versions.
    """

    local_meta: Callable[[str], str]
    open_index: Callable[[str, str, Mapping[str, int], Sequence[str]], tuple[PackedIndex, str, tuple[int, ...]]]


def url_datasets(url: str) -> UrlDatasets:
    """Return the guest that opens data sets behind URLs.

    Raises:
        UsageError: it is not installed.
    """
    return remote_guest("url_datasets", "data sets behind URLs are opened", url)


def local_meta(path: str) -> str:
    """Return the folder whose ``.nv-meta`` has the small files of a data set: ``path`` itself, or a copy in the cache.

    Raises:
        NotPreparedError: there is no prepared data set behind the URL.
        DatasetError: the store does not answer, or its package is not installed.
        UsageError: the guest is not installed.
    """
    if not is_url(path) or is_jsonl(path):  # a JSONL file has no such folder
        return path
    return url_datasets(path).local_meta(path)


def index_places(root: str) -> tuple[str, str]:
    """Possible places of the packed index of a data set: next to the data (of a URL: in the cache), and in the user's
    cache."""
    name = os.path.basename(os.path.normpath(root))
    of = root if is_url(root) else os.path.realpath(root)
    place = hashlib.sha256(of.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    cached = os.path.join(cache_folder(), "index", f"{name}-{place}.idx")
    return cached if is_url(root) else meta_path(root, PACKED_INDEX), cached


def open_index(root: str, counts: Mapping[str, int] | None = None) -> tuple[PackedIndex, str]:
    """Open the packed index of a local data set (a prepared folder or a JSONL file); return it with its path.

    Args:
        root: the folder or file.
        counts: number of samples by shard, if the caller has read them.

    Raises:
        NotPreparedError: there is no such folder or file, or the folder was not prepared.
        ShardFormatError, MissingShardError, ShardChangedError: a shard is missing, damaged or has changed, and the
            index had to be made.
        DatasetError: as :meth:`FileIndex.make`; or no place for the index can be written.
        UsageError: the guest for JSONL files is not installed.
    """
    file: FileIndex
    if is_jsonl(root):
        file = storage_guest("jsonl", "JSONL files are indexed", "formats", root)(root)
    else:
        file = _FolderIndex(root, counts or read_info(root))

    def make_at(path: str) -> tuple[PackedIndex, str]:
        return made_once(path, lambda path: _fitting(path, file.fits), lambda: file.make().write(path)), path

    return _find(root, file.fits) or first_writable(
        root, "the packed index", index_places(root), "run `energon-lite prepare`", make_at
    )


def shard_counts(root: str) -> dict[str, int]:
    """Number of samples of each shard of a local data set, in order.

    Raises:
        NotPreparedError, DatasetError: as :func:`open_index`.
    """
    return open_index(root)[0].shard_counts if is_jsonl(root) else read_info(root)


def find_index(root: str, counts: Mapping[str, int]) -> tuple[PackedIndex, str] | None:
    """Open the index of a prepared folder; None if there is none that fits. Unlike :func:`open_index`, makes none."""
    return _find(root, _FolderIndex(root, counts).fits)


def first_writable(root: str, what: str, places: Sequence[str], owner: str, write: Callable[[str], _T]) -> _T:
    """Return the result of ``write`` for the first of these places where it does not raise an OSError.

    Raises:
        DataIndexError: it fails everywhere; the fix names ``owner``, an action of the owner of the data set ``root``.
    """
    failures = []
    for place in places:
        try:
            return write(place)
        except OSError as error:
            if isinstance(error, EnergonLiteError):
                raise
            failures.append(f"{place} ({error.strerror or error})")
    raise DataIndexError(
        f"{what} cannot be written anywhere: {', '.join(failures)}",
        where=root,
        fix=f"set ENERGON_LITE_CACHE to a folder that can be written, or let the owner of the data {owner}",
    )


def made_once(path: str, found: Callable[[str], _T | None], make: Callable[[], object]) -> _T:
    """Return the contents of a file; if ``found`` gives None, one process makes the file, and the others wait.

    Raises:
        DataIndexError: the file that was made is not found.
    """
    contents = found(path)
    if contents is None:
        with only_one(path):
            contents = found(path)  # another process may have made it while this one waited
            if contents is None:
                make()
                contents = found(path)
    if contents is None:
        raise DataIndexError("the file was changed right after it had been made", where=path, fix="start again")
    return contents


def check_count(root: str, shard: str, samples: int, expected: int) -> None:
    """Check that a shard has as many samples as when the data set ``root`` was prepared.

    Raises:
        ShardChangedError: the numbers differ.
    """
    if samples != expected:
        raise ShardChangedError(
            f"the shard has {counted(samples, 'sample')}, but {expected} when the data set was prepared",
            where=os.path.join(root, shard),
            fix=f"restore the shard, or prepare again: `energon-lite prepare --force-overwrite {root}`",
        )


def _find(root: str, fits: _Fits) -> tuple[PackedIndex, str] | None:
    for path in dict.fromkeys(index_places(root)):
        index = _fitting(path, fits)
        if index is not None:
            return index, path
    return None


def _fitting(path: str, fits: _Fits) -> PackedIndex | None:
    """The index in a file if the file exists, is whole, and fits the data set's current state; otherwise None."""
    index = whole_or_none(PackedIndex.open, path)
    if index is not None and not fits(index):
        _log.info("%s is older than what it belongs to, it will be made again", path)
        return None
    return index


class _FolderIndex(FileIndex):
    """Maker of the index of a prepared folder, by its last preparation.

    Args:
        root: the folder.
        counts: number of samples by shard.
    """

    def __init__(self, root: str, counts: Mapping[str, int]):
        self._root = root
        self._counts = counts
        # The order of shards counts as well: sample numbers depend on it.
        self._wanted = read_uuid(root), list(counts.items())

    def fits(self, index: PackedIndex) -> bool:
        return (index.uuid, list(index.shard_counts.items())) == self._wanted

    def make(self) -> PackedIndex:
        root, counts = self._root, self._counts
        _log.warning(
            "%s has no packed index: reading the headers of its %d shards (`energon-lite prepare` does this once, in "
            "parallel)",
            root,
            len(counts),
        )
        scans: list[ShardScan] = []
        start = shown = time.monotonic()
        for name, count in counts.items():
            scan = scan_shard(root, name)
            check_count(root, name, scan.samples, count)
            scans.append(scan)
            now = time.monotonic()
            if now - shown > 10:
                _log.warning("%s: %d of %d shards after %.0f s", root, len(scans), len(counts), now - start)
                shown = now
        return PackedIndex.from_scans(scans, uuid=read_uuid(root))
