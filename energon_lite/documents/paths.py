"""Paths and URLs as users write them, and words for a path that is not there."""

from __future__ import annotations

import os
from glob import iglob

from energon_lite.errors import UsageError, nearest

__all__ = ["add_data_endings", "is_data_path", "is_url", "local_path", "missing_file_fix", "static_folder"]

_SHOWN = 5
_FILE, _DSS = "file://", "dss://"
_MAGIC = "*?["
#: How the paths of files end that are data sets by themselves.
_DATA_ENDINGS = {".jsonl", ".parquet", ".arrow", ".feather", ".bin", ".idx", ".lance", "/index.json"}


def add_data_endings(*endings: str) -> None:
    """Have paths that end so taken for data sets."""
    _DATA_ENDINGS.update(endings)


def is_data_path(path: str) -> bool:
    """Whether a local path that is no folder means a data set: a file, a pattern that files match, or what two files
    or more begin with (``text_document`` of ``text_document.bin`` and ``text_document.idx``)."""
    if path.endswith(tuple(_DATA_ENDINGS)):
        return os.path.isfile(path) or any(True for _ in iglob(path, recursive=True))
    return sum(os.path.isfile(path + ending) for ending in _DATA_ENDINGS) > 1


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

    ``dss://name@version/path`` is ``$NVDATASET_CACHE_DIR/name/version/path``, as in Megatron-Energon.

    Raises:
        UsageError: a ``dss://`` URL has no version, or that variable is not set.

    Example:
        >>> local_path("file:///data/digits"), local_path("s3://bucket/digits")
        ('/data/digits', 's3://bucket/digits')
    """
    if path.startswith(_DSS):
        path = _of_cached_data_set(path)
    return path.removeprefix(_FILE)


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
