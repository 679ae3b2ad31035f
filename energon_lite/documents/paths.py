"""Paths and URLs as users write them, and words for a path that is not there."""

from __future__ import annotations

import os
import warnings
from glob import iglob

from energon_lite.entry_points import source_formats
from energon_lite.errors import UsageError, nearest

__all__ = [
    *("add_data_endings", "is_data_path", "is_url", "join_url"),
    *("local_path", "missing_file_fix", "of_multi_storage", "static_folder"),
]

_SHOWN = 5
_FILE, _DSS, _MSC, _RCLONE = "file://", "dss://", "msc://", "rclone://"
#: What multi-storage-client calls this machine; in its first versions "default", which may be anybody's since then.
_THIS_MACHINE, _ONCE_THIS_MACHINE = "__filesystem__", "default"
_MAGIC = "*?["
#: Endings of paths that are data sets by themselves, without those of guests.
_DATA_ENDINGS = {".jsonl"}


def add_data_endings(*endings: str) -> None:
    """Have paths that end so taken for data sets."""
    _DATA_ENDINGS.update(endings)


def _data_endings() -> tuple[str, ...]:
    formats = source_formats().values()
    markers = (f"/{entry.marker}" for entry in formats if entry.marker)
    return (*_DATA_ENDINGS, *(ending for entry in formats for ending in entry.extensions), *markers)


def is_data_path(path: str) -> bool:
    """Whether a local path that is no folder means a data set: a file, a pattern that files match, or what two files
    or more begin with (``text_document`` of ``text_document.bin`` and ``text_document.idx``)."""
    endings = _data_endings()
    if path.endswith(endings):
        return os.path.isfile(path) or any(True for _ in iglob(path, recursive=True))
    return sum(os.path.isfile(path + ending) for ending in endings) > 1


def static_folder(path: str) -> str:
    """The folder that a path or pattern is in; itself, if it is a folder on a local disk.

    Example:
        >>> static_folder("data/*/part-*.parquet"), static_folder("s3://bucket/data/a.parquet")
        ('data', 's3://bucket/data')
    """
    if not is_url(path) and os.path.isdir(path):
        return path
    head = path[: min((path.index(one) for one in _MAGIC if one in path), default=len(path))]
    return head.rpartition("/")[0] or ("/" if head.startswith("/") else ".")


def is_url(path: str) -> bool:
    """True for ``s3://bucket/key`` and the like, False for paths and ``file://`` URLs."""
    return "://" in path and not path.startswith(_FILE)


def local_path(path: str) -> str:
    """The path that a ``file://`` URL means; the path, or URL, that a ``dss://`` one means; others stay as they are.

    ``dss://name@version/path`` is ``$NVDATASET_CACHE_DIR/name/version/path``, as in Megatron-Energon. So are
    ``rclone://``, an old name of ``msc://``, and ``msc://__filesystem__/path``, a path of this machine
    (``msc://default/path`` too, if no store has that name).

    Raises:
        UsageError: a ``dss://`` URL has no version, or that variable is not set.

    Example:
        >>> local_path("file:///data/digits"), local_path("s3://bucket/digits")
        ('/data/digits', 's3://bucket/digits')
    """
    if path.startswith(_DSS):
        path = _of_cached_data_set(path)
    return of_multi_storage(path).removeprefix(_FILE)


def of_multi_storage(path: str) -> str:
    """A URL of multi-storage-client by its name today; a path, if it is one of this machine.

    Example:
        >>> of_multi_storage("msc://__filesystem__/data/digits")
        '/data/digits'
    """
    if path.startswith(_RCLONE):
        warnings.warn(f"{path}: rclone:// is deprecated, write msc://", FutureWarning, stacklevel=3)
        path = _MSC + path.removeprefix(_RCLONE)
    profile, _, inside = path.removeprefix(_MSC).partition("/")
    return "/" + inside if path.startswith(_MSC) and _is_this_machine(profile) else path


def _is_this_machine(profile: str) -> bool:
    """Whether a profile of multi-storage-client means the local file system, and nobody has set it to be another."""
    if profile != _ONCE_THIS_MACHINE:
        return profile == _THIS_MACHINE
    try:
        from multistorageclient import config
    except ImportError:
        return True
    if not hasattr(config, "RESERVED_POSIX_PROFILE_NAME"):
        return True
    try:
        config.StorageClientConfig.from_file(profile=profile)
    except ValueError:
        return True
    return False


def join_url(document: str, path: str) -> str:
    """The URL that a relative path means in a document behind a URL.

    Raises:
        ValueError: the path leads out of the store.

    Example:
        >>> join_url("s3://bucket/blends/all.yaml", "../coco")
        's3://bucket/coco'
    """
    scheme, _, place = document.partition("://")
    folder = place.split("/")[:-1]
    steps, kept = folder, min(1, len(folder))  # the bucket, or the host
    for step in path.split("/"):
        if step == "..":
            if len(steps) <= kept:
                raise ValueError(path)
            steps = steps[:-1]
        elif step not in ("", "."):
            steps = [*steps, step]
    return f"{scheme}://{'/'.join(steps)}"


def _of_cached_data_set(url: str) -> str:
    first, slash, rest = url.removeprefix(_DSS).partition("/")
    name, at, version = first.rpartition("@")
    if not (at and name and version) or {name, version} & {".", ".."}:
        raise UsageError(
            "a dss:// URL names a data set and its version", where=url, fix="write dss://name@version/path"
        )
    base = os.environ.get("NVDATASET_CACHE_DIR")
    if not base:
        raise UsageError(
            "NVDATASET_CACHE_DIR is not set: dss:// URLs mean what is in that folder",
            where=url,
            fix="set it, or give the path of the data set",
        )
    return f"{base.rstrip('/')}/{name}/{version}{slash}{rest}"


def missing_file_fix(path: str, otherwise: str) -> str:
    """How to cure a missing ``path``: the nearest name beside it; or else ``otherwise``, and what is there.

    "Beside" is in the deepest folder on the way to ``path`` that exists.

    Example:
        >>> missing_file_fix("/data/digts", "correct the path")
        "did you mean '/data/digits'?"
    """
    parent = os.path.abspath(path)
    while True:
        parent, name = os.path.split(parent)
        if os.path.isdir(parent) or not name:
            break
    try:
        names = sorted(entry for entry in os.listdir(parent) if not entry.startswith(".") or name.startswith("."))
    except OSError:
        return otherwise
    close = nearest(name, names)
    if close is not None and close != name:
        return f"did you mean {os.path.join(parent, close)!r}?"
    if not names:
        return otherwise
    shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
    return f"{otherwise}; the folder {parent!r} holds: {shown}"
