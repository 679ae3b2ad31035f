"""Find the packed index of a data set, or make it.

``energon-lite prepare`` writes it into ``.nv-meta``. A folder that was prepared by Energon has none, or has an old one;
then it is made from the tars when the data set is opened, and kept in ``.nv-meta`` or, where that cannot be written, in
the user's cache (``$ENERGON_LITE_CACHE``, else ``~/.cache/energon_lite``). Many processes may do this at once: one
makes it, the others wait for it. A JSONL file needs no preparing at all: its index is made like that, and made again
when the file has changed.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Mapping

from energon_lite.errors import DataIndexError, EnergonLiteError, ShardChangedError
from energon_lite.storage.files.file_lock import only_one
from energon_lite.storage.index.jsonl import check_there, is_jsonl, scan_jsonl
from energon_lite.storage.index.nv_meta import PACKED_INDEX, meta_path, read_info, read_uuid
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.tar.tar_scan import ShardScan, scan_shard

__all__ = ["cache_folder", "find_index", "find_or_make_index", "index_places", "open_index", "shard_counts"]

_log = logging.getLogger(__name__)

#: Gives the index in a file, if it is there and that of the data set as it is now.
_Valid = Callable[[str], PackedIndex | None]


def cache_folder() -> str:
    """The folder for what cannot be kept beside the data."""
    chosen = os.environ.get("ENERGON_LITE_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.abspath(chosen) if chosen else os.path.join(base, "energon_lite")


def index_places(root: str) -> tuple[str, str]:
    """Where the packed index of a data set may be: beside the data, and in the user's cache."""
    name = os.path.basename(os.path.normpath(root))
    place = hashlib.sha256(os.path.realpath(root).encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return meta_path(root, PACKED_INDEX), os.path.join(cache_folder(), "index", f"{name}-{place}.idx")


def open_index(root: str, counts: Mapping[str, int] | None = None) -> tuple[PackedIndex, str]:
    """The packed index of a local data set, a prepared folder or a JSONL file, and the file it is in.

    Args:
        root: the folder or file.
        counts: samples by shard, if the caller has read them.

    Raises:
        NotPreparedError: there is no such folder or file, or the folder was not prepared.
        DatasetError: as :func:`find_or_make_index`, :func:`~energon_lite.storage.index.jsonl.scan_jsonl`.
    """
    return _jsonl_index(root) if is_jsonl(root) else find_or_make_index(root, counts or read_info(root))


def shard_counts(root: str) -> dict[str, int]:
    """Samples per shard of a local data set, in order.

    Raises:
        NotPreparedError, DatasetError: as :func:`open_index`.
    """
    return dict(open_index(root)[0].shard_counts) if is_jsonl(root) else read_info(root)


def find_or_make_index(root: str, shard_counts: Mapping[str, int]) -> tuple[PackedIndex, str]:
    """The packed index of the data set ``root``, and the file it is in.

    Args:
        root: the prepared folder.
        shard_counts: the contents of its ``.info.json``.

    Raises:
        ShardFormatError, MissingShardError, ShardChangedError: the index had to be made, and a shard is not as it
            should be.
    """
    return _find_or_make(root, _fits(root, shard_counts), lambda: _make(root, shard_counts))


def find_index(root: str, shard_counts: Mapping[str, int]) -> tuple[PackedIndex, str] | None:
    """:func:`find_or_make_index` without the making: None if there is no index, or none that fits."""
    return _find(root, _fits(root, shard_counts))


def _fits(root: str, shard_counts: Mapping[str, int]) -> _Valid:
    uuid = read_uuid(root)

    def valid(path: str) -> PackedIndex | None:
        index = _open_if_sound(path)
        if index is None:
            return None
        # The order of shards counts as well: sample numbers depend on it.
        if index.uuid != uuid or list(index.shard_counts.items()) != list(shard_counts.items()):
            _log.info("%s is older than the data set's preparation, it will be made again", path)
            return None
        return index

    return valid


def _jsonl_index(path: str) -> tuple[PackedIndex, str]:
    check_there(path)

    def valid(place: str) -> PackedIndex | None:
        index = _open_if_sound(place)
        if index is None:
            return None
        try:
            now = os.stat(path)
        except OSError:
            return None  # reading it will say what is wrong
        then = index.shard_names, int(index.shards[0, 0]), int(index.shard_times[0])
        return index if then == ((os.path.basename(path),), now.st_size, now.st_mtime_ns) else None

    def make() -> PackedIndex:
        scan = scan_jsonl(path)
        for note in scan.notes:
            _log.warning("%s: %s", path, note)
        return PackedIndex.from_scans([scan])

    return _find_or_make(path, valid, make)


def _find_or_make(root: str, valid: _Valid, make: Callable[[], PackedIndex]) -> tuple[PackedIndex, str]:
    """A valid index, made if need be in the first place that can be written, unless another process does or did."""
    found = _find(root, valid)
    if found is not None:
        return found
    failures = []
    for path in index_places(root):
        try:
            with only_one(path):
                index = valid(path)  # another process may have made it while this one waited
                if index is None:
                    make().write(path)
                    index = PackedIndex.open(path)
                return index, path
        except OSError as error:
            if isinstance(error, EnergonLiteError):
                raise
            failures.append(f"{os.path.dirname(path)} ({error.strerror or error})")
    raise DataIndexError(
        "the packed index cannot be written anywhere: " + ", ".join(failures),
        where=root,
        fix="set ENERGON_LITE_CACHE to a folder that can be written, or let the owner run `energon-lite prepare`",
    )


def _find(root: str, valid: _Valid) -> tuple[PackedIndex, str] | None:
    for path in index_places(root):
        index = valid(path)
        if index is not None:
            return index, path
    return None


def _open_if_sound(path: str) -> PackedIndex | None:
    try:
        return PackedIndex.open(path)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    except DataIndexError as error:
        _log.warning("%s (it will be made again)", error)
        return None


def _make(root: str, shard_counts: Mapping[str, int]) -> PackedIndex:
    _log.warning(
        "%s has no packed index: reading the headers of its %d shards (`energon-lite prepare` does this once, in "
        "parallel)",
        root,
        len(shard_counts),
    )
    scans: list[ShardScan] = []
    start = shown = time.monotonic()
    for name, count in shard_counts.items():
        scan = scan_shard(root, name)
        if scan.samples != count:
            raise ShardChangedError(
                f"the shard has {scan.samples} samples, but {count} when the data set was prepared",
                where=os.path.join(root, name),
                fix=f"restore the shard, or prepare again: `energon-lite prepare --force-overwrite {root}`",
            )
        scans.append(scan)
        now = time.monotonic()
        if now - shown > 10:
            _log.warning("%s: %d of %d shards after %.0f s", root, len(scans), len(shard_counts), now - start)
            shown = now
    return PackedIndex.from_scans(scans, uuid=read_uuid(root))
