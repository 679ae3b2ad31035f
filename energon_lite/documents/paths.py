"""Paths and URLs as users write them, and words for a path that is not there."""

from __future__ import annotations

import os

from energon_lite.errors import nearest

__all__ = ["is_url", "join_url", "local_path", "missing_file_fix"]

_SHOWN = 5
_FILE = "file://"


def is_url(path: str) -> bool:
    """True for ``s3://bucket/key`` and the like, False for paths and ``file://`` URLs."""
    return "://" in path and not path.startswith(_FILE)


def local_path(path: str) -> str:
    """The path that a ``file://`` URL means; what is none stays as it is.

    Example:
        >>> local_path("file:///data/digits"), local_path("s3://bucket/digits")
        ('/data/digits', 's3://bucket/digits')
    """
    return path.removeprefix(_FILE)


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
