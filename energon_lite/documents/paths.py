"""Paths, URLs and brace patterns in documents and arguments, and hints for missing paths.

The bound on brace patterns such as ``shard-{000..127}.tar`` is checked before their expansion: a few characters may
stand for more names than fit into memory.
"""

from __future__ import annotations

import os
import re
import warnings
from glob import iglob
from string import ascii_lowercase, ascii_uppercase

from energon_lite.entry_points import source_formats
from energon_lite.errors import UsageError, nearest

#: Largest number of names of a pattern.
MAX_NAMES = 1_000_000
#: Largest number of characters of all names together.
_MAX_TEXT = 1 << 28
#: Largest number of characters of a pattern. Beyond this limit and the next ones, it is not a list of shards.
_MAX_LENGTH = 1 << 16
#: Largest nesting depth of braces.
_MAX_DEPTH = 20
#: Bound on the digits of a number, exclusive.
_MAX_DIGITS = 100
_NUMBERS = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.-?(\d+))?")
_ALPHABET = ascii_uppercase + ascii_lowercase
_LETTERS = re.compile(r"([A-Za-z])\.\.([A-Za-z])(?:\.\.-?(\d+))?")


def expand_braces(pattern: str, most: int = MAX_NAMES) -> list[str]:
    """Expand a pattern to its names, in order.

    Args:
        pattern: text with ranges ``{000..127}``, ``{0..9..3}``, ``{a..f}`` and alternatives ``{x,y}``, nested; a
            backslash before a brace makes it a plain character.
        most: largest number of names.

    Raises:
        ValueError: the braces do not match, or give too many names; the message says which.

    Example:
        >>> expand_braces("{train,val}/{08..10}.tar")[:4]
        ['train/08.tar', 'train/09.tar', 'train/10.tar', 'val/08.tar']
    """
    from braceexpand import braceexpand

    if "{" not in pattern and "}" not in pattern and "\\" not in pattern:
        if most < 1:
            raise ValueError("stand for too many names")
        return [pattern]
    if len(pattern) > _MAX_LENGTH:
        raise ValueError(f"have more than {_MAX_LENGTH} characters")
    if re.search(rf"\d{{{_MAX_DIGITS},}}\.\.|\.\.-?\d{{{_MAX_DIGITS},}}", pattern):
        raise ValueError(f"have a number of {_MAX_DIGITS} digits or more")
    count = _count_names(re.sub(r"\\.", "__", pattern, flags=re.DOTALL))
    if count > most or count * len(pattern) > _MAX_TEXT:
        raise ValueError(f"stand for {f'{count:,}' if count < 10**15 else 'far too many'} names, which are too many")
    return list(braceexpand(pattern))


def _count_names(text: str) -> int:
    """Number of names of a pattern without backslashes."""
    # For each open brace: its place, the number of names of the earlier alternatives, and of the current one.
    opened = [[-1, 0, 1]]
    for place, char in enumerate(text):
        if char == "{":
            opened.append([place, 0, 1])
            if len(opened) > _MAX_DEPTH + 1:
                raise ValueError(f"are nested more than {_MAX_DEPTH} deep")
        elif char == "," and len(opened) > 1:
            start, before, current = opened[-1]
            opened[-1] = [start, before + current, 1]
        elif char == "}":
            start, before, current = opened.pop()
            if not opened:
                raise ValueError("do not match")
            opened[-1][2] *= _count_range(text[start + 1 : place]) or before + current
    if len(opened) > 1:
        raise ValueError("do not match")
    return opened[0][2]


def _count_range(text: str) -> int:
    """Number of entries of a range such as ``0..9..3`` or ``a..f``; 0 for other texts."""
    if match := _NUMBERS.fullmatch(text):
        first, last = int(match[1]), int(match[2])
    elif match := _LETTERS.fullmatch(text):
        first, last = (_ALPHABET.index(match[side]) for side in (1, 2))
    else:
        return 0
    return abs(last - first) // (int(match[3] or 1) or 1) + 1


_SHOWN = 5
_FILE = "file://"
_DSS = "dss://"
_MSC = "msc://"
_RCLONE = "rclone://"
#: Profile of multi-storage-client for the local file system.
_THIS_MACHINE = "__filesystem__"
#: Its name in the first versions; since then users may give this name to another store.
_ONCE_THIS_MACHINE = "default"
_MAGIC = "*?["
#: Endings of the paths of files that are data sets by themselves.
_DATA_ENDINGS = {".jsonl", ".parquet", ".arrow", ".feather", ".bin", ".idx", ".lance", "/index.json"}


def add_data_endings(*endings: str) -> None:
    """Register further endings of paths of data sets."""
    _DATA_ENDINGS.update(endings)


def _data_endings() -> tuple[str, ...]:
    formats = source_formats().values()
    markers = (f"/{entry.marker}" for entry in formats if entry.marker)
    return (*_DATA_ENDINGS, *(ending for entry in formats for ending in entry.extensions), *markers)


def is_data_path(path: str) -> bool:
    """True if a local path that is not a folder names a data set.

    That is a file, a pattern that matches files, or the common start of two or more files (``text_document`` of
    ``text_document.bin`` and ``text_document.idx``).
    """
    endings = _data_endings()
    if path.endswith(endings):
        return os.path.isfile(path) or any(True for _ in iglob(path, recursive=True))
    return sum(os.path.isfile(path + ending) for ending in endings) > 1


def static_folder(path: str) -> str:
    """Folder of a path or pattern; a local folder itself is returned unchanged.

    Example:
        >>> static_folder("data/*/part-*.parquet"), static_folder("s3://bucket/data/a.parquet")
        ('data', 's3://bucket/data')
    """
    if not is_url(path) and os.path.isdir(path):
        return path
    head = path[: min((path.index(character) for character in _MAGIC if character in path), default=len(path))]
    return head.rpartition("/")[0] or ("/" if head.startswith("/") else ".")


def is_url(path: str) -> bool:
    """True for ``s3://bucket/key`` and the like, False for paths and ``file://`` URLs."""
    return "://" in path and not path.startswith(_FILE)


def local_path(path: str) -> str:
    """Convert a ``file://`` URL to a path, and a ``dss://`` URL to a path or URL; others are returned unchanged.

    ``dss://name@version/path`` is ``$NVDATASET_CACHE_DIR/name/version/path``, as in Megatron-Energon. Also converted
    are ``rclone://``, an old name of ``msc://``, and ``msc://__filesystem__/path``, a local path
    (``msc://default/path`` too, if no store has that name).

    Raises:
        UsageError: a ``dss://`` URL has no version, or the variable is not set.

    Example:
        >>> local_path("file:///data/digits"), local_path("s3://bucket/digits")
        ('/data/digits', 's3://bucket/digits')
    """
    if path.startswith(_DSS):
        path = _of_cached_data_set(path)
    return of_multi_storage(path).removeprefix(_FILE)


def absolute_path(path: str | os.PathLike[str]) -> str:
    """Return the absolute form of a path that a user gave, or its URL; see :func:`local_path`."""
    text = local_path(os.fspath(path))
    return text if is_url(text) else os.path.abspath(os.path.expanduser(text))


def of_multi_storage(path: str) -> str:
    """Convert a URL of multi-storage-client to its current form, or to a path if it is local.

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
    """True if a profile of multi-storage-client is the local file system, and is not redefined by the user."""
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
    """Resolve a relative path in a document at a URL to a URL.

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
    """Hint for a missing ``path``: the nearest existing name; or ``otherwise``, and the contents of the folder.

    The folder is the deepest one on ``path`` that exists.

    Example:
        >>> missing_file_fix("/data/digts", "correct the path")
        "did you mean '/data/digits'?"
    """
    parent, name = os.path.split(os.path.abspath(path))
    while not os.path.isdir(parent):
        parent, name = os.path.split(parent)
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
