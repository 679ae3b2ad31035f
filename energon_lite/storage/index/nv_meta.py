"""The small files that describe a prepared data set, in the formats of Megatron-Energon 7.

============================  =========================================================================================
file                          contents
============================  =========================================================================================
``.nv-meta/.info.json``       the shards, in order, and their sample counts. Written last: with it, a folder is prepared
``.nv-meta/split.yaml``       the shards of each split, and excluded shards and samples
``.nv-meta/dataset.yaml``     the sample type and its field map or loader
``.nv-meta/index.uuid``       changes with every indexing
``.nv-meta/index.sqlite``     look-up by key, for tools of Energon (see :class:`KeyDatabase`)
``.nv-meta/energon_lite.idx`` our packed index (see :mod:`energon_lite.storage.index.packed_index`)
``<shard>.tar.idx``           start of each sample and end of the last, as 64-bit numbers; also ``chats.jsonl.idx``
============================  =========================================================================================

A JSONL file is a data set of one shard, itself, whose samples have one part, ``json``. It has no folder of its own: the
files about ``chats.jsonl`` are called ``chats.jsonl.<file>`` instead.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from energon_lite.documents.paths import missing_file_fix
from energon_lite.entry_points import load, storage_guests
from energon_lite.errors import DataIndexError, NotPreparedError, UsageError
from energon_lite.storage.files.atomic_file import write_bytes
from energon_lite.storage.tar_scan import ShardScan

META_FOLDER = ".nv-meta"
INFO_JSON = ".info.json"
INFO_YAML = ".info.yaml"
SPLIT_YAML = "split.yaml"
DATASET_YAML = "dataset.yaml"
UUID_FILE = "index.uuid"
SQLITE_INDEX = "index.sqlite"
#: An ``index.sqlite`` with tables of other programs is kept here until the new one is written.
SQLITE_KEPT = "energon_lite.kept.sqlite"
PACKED_INDEX = "energon_lite.idx"
#: File that marks a folder whose preparation has not ended.
UNFINISHED = "energon_lite.unfinished"

#: Bytes; a larger file is not a list of shards: the list of a million shards takes a twentieth of this.
_LARGEST = 1 << 30
#: The name of the only part of the samples of a JSONL file.
JSONL_PART = "json"
#: The byte order mark of UTF-8.
BOM = b"\xef\xbb\xbf"


def is_jsonl(path: str) -> bool:
    """Return True for the path of a JSONL file."""
    return path.endswith(".jsonl")


def folder_of_shards(root: str) -> str:
    """The folder that names of shards are relative to: the data set's own, or the folder of a JSONL file."""
    return folder_and_name(root)[0] if is_jsonl(root) else root


def folder_and_name(path: str) -> tuple[str, str]:
    """Split a path or URL into folder and name, which :func:`os.path.join` joins to the same path again.

    Example:
        >>> folder_and_name("s3://bucket/chats.jsonl"), folder_and_name("memory://chats.jsonl")
        (('s3://bucket', 'chats.jsonl'), ('memory://', 'chats.jsonl'))
    """
    folder, name = os.path.split(path)
    return (f"{folder}//" if folder.endswith(":") else folder), name


def meta_path(root: str, name: str) -> str:
    """Path of a file in the ``.nv-meta`` folder of the data set ``root``, or next to it if that is a JSONL file."""
    return f"{root}.{name}" if is_jsonl(root) else os.path.join(root, META_FOLDER, name)


def is_prepared(root: str) -> bool:
    """Return True if the folder was prepared completely."""
    return any(os.path.isfile(meta_path(root, name)) for name in (INFO_JSON, INFO_YAML))


def mark_unfinished(root: str) -> None:
    """Mark the preparation as unfinished, although ``.info.json`` may exist already."""
    write_bytes(meta_path(root, UNFINISHED), flush=False)


def is_unfinished(root: str) -> bool:
    """Return True if a preparation was interrupted in its last steps."""
    return os.path.exists(meta_path(root, UNFINISHED))


def check_writable(root: str) -> None:
    """Check that files can be written for the data set, before long work.

    Raises:
        UsageError: they cannot.
    """
    meta = os.path.join(root, META_FOLDER)
    folder = meta if os.path.isdir(meta) else root
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(
            "files cannot be written into the folder, which preparation does",
            where=folder,
            fix="run this as a user who may write there, or prepare a copy of the data set",
        )


def read_info(root: str) -> dict[str, int]:
    """Read the number of samples of each shard, in the order of the data set.

    Raises:
        NotPreparedError: the folder does not exist, or was not prepared completely.
        DataIndexError: the file is damaged, or names a shard outside of the data set's folder.
    """
    from energon_lite.documents import parse_yaml

    for name in (INFO_JSON, INFO_YAML):
        path = meta_path(root, name)
        try:
            text = _read(path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        try:
            document = json.loads(text) if name == INFO_JSON else parse_yaml(text.decode(), path).plain()
            counts = {str(shard): _count(count) for shard, count in document["shard_counts"].items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataIndexError(
                f"the list of shards is damaged: {type(error).__name__}: {error}",
                where=path,
                fix=f"run `energon-lite prepare --force-overwrite {root}`",
            ) from None
        for shard in counts:
            if not _is_inside(shard):
                raise DataIndexError(
                    f"the shard {shard[:200]!r} is outside of the data set's folder",
                    where=path,
                    fix="a data set names files in its own folder only; if this one is yours, put (or link) its shards "
                    "there and prepare it again",
                )
        return counts
    raise _not_prepared(root)


def _read(path: str) -> bytes:
    """Read a regular file; a pipe, which would block, counts as missing."""
    if not os.path.isfile(path):
        raise FileNotFoundError(path)
    if os.path.getsize(path) > _LARGEST:
        raise DataIndexError(
            f"the file has more than {_LARGEST} bytes, too many for its kind",
            where=path,
            fix="prepare the folder again",
        )
    with open(path, "rb") as file:
        return file.read()


def _is_inside(shard: str) -> bool:
    """Return True if a name can only lead to a file in the folder that it is relative to. Links in that folder are not
    checked: their safety is up to the people who may write there."""
    try:
        os.fsencode(shard)
    except ValueError:
        return False
    is_odd = not shard or "\0" in shard or "://" in shard
    return not (is_odd or os.path.isabs(shard) or ".." in shard.split("/"))


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is not a number of samples")
    return value


def _not_prepared(root: str) -> NotPreparedError:
    if not os.path.exists(root):
        fix = missing_file_fix(root, "check the path")
        return NotPreparedError("there is no such data set", where=root, fix=fix)
    if not os.path.isdir(root):
        return NotPreparedError(
            "a data set is a folder of tar files, and this is a file of no known format",
            where=root,
            fix="give the folder that holds it; extensions of other formats are in lower case",
        )
    cure = f"run `energon-lite prepare {root}`"
    if os.path.isdir(os.path.join(root, META_FOLDER)):
        missing = f"the data set was not prepared to the end ({META_FOLDER}/{INFO_JSON} is missing)"
        return NotPreparedError(missing, where=root, fix=cure)
    if inside := sorted(Path(root).glob(f"*/{META_FOLDER}/{INFO_JSON}")):
        fix = f"give one of them, such as {inside[0].parents[1]}"
        return NotPreparedError("this is a folder of data sets, and none itself", where=root, fix=fix)
    return NotPreparedError(f"the data set has not been prepared (no {META_FOLDER} folder)", where=root, fix=cure)


def write_info(root: str, shard_counts: Mapping[str, int], *, legacy: bool = False) -> str:
    """Write ``.info.json`` (and with ``legacy`` the ``.info.yaml`` of old versions); return its path."""
    import energon_lite  # importlib.metadata would take longer than indexing a small data set

    document = {"energon_version": f"energon_lite {energon_lite.__version__}", "shard_counts": dict(shard_counts)}
    path = write_meta(root, INFO_JSON, json.dumps(document, indent=2))
    if legacy:
        write_meta(root, INFO_YAML, document)
    return path


def read_uuid(root: str) -> str:
    """Read the text of ``index.uuid``; empty if the file is missing.

    Raises:
        DataIndexError: the file is no text.
    """
    path = meta_path(root, UUID_FILE)
    try:
        return _read(path).decode("utf-8").strip()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except UnicodeDecodeError:
        raise DataIndexError(
            "the identity of the index is not text (UTF-8)",
            where=path,
            fix=f"run `energon-lite prepare --force-overwrite {root}`",
        ) from None


def write_meta(root: str, name: str, contents: Mapping[str, Any] | str) -> str:
    """Write a file of the data set ``root``: text, or a document as YAML in the order of its keys; return its path."""
    path = meta_path(root, name)
    if not isinstance(contents, str):
        import yaml

        contents = yaml.safe_dump(dict(contents), sort_keys=False, allow_unicode=True)
    write_bytes(path, contents.encode())
    return path


def shard_index_path(root: str, shard: str) -> str:
    """Path of Energon's file with the starts of the samples: ``<shard>.tar.idx``, or ``<file>.jsonl.idx``."""
    return f"{root}.idx" if is_jsonl(root) else os.path.join(root, os.path.splitext(shard)[0] + ".tar.idx")


def write_shard_index(root: str, scan: ShardScan, *, flush: bool = True) -> str:
    """Write the file of :func:`shard_index_path`, unless it exists with these contents; return its path."""
    path = shard_index_path(root, scan.name)
    offsets = scan.headers.astype("<u8").tobytes() + scan.end.to_bytes(8, "little")
    if not os.path.isfile(path) or os.path.getsize(path) != len(offsets) or Path(path).read_bytes() != offsets:
        write_bytes(path, offsets, flush=flush)
    return path


# -- index.sqlite ---------------------------------------------------------------------------------------------------


class RemoteShard(NamedTuple):
    """Facts about a shard that are known before it is scanned.

    Attributes:
        size: bytes in it.
        block: its first 512 bytes.
        samples: number of its samples according to ``.info.json``.
    """

    size: int
    block: bytes
    samples: int


class KeyDatabase(NamedTuple):
    """Functions of the guest that writes and reads ``index.sqlite``: entry ``index.sqlite`` of the table
    ``STORAGE_GUESTS``.

    Attributes:
        tables_of_others: returns the names of the tables of other programs in a database.
        made: context manager ``(path, scans, warnings, wanted)``: makes the file, if it is ``wanted`` and possible, and
            gives it its name when the block ends; gives the paths of the files that are made, adds to ``warnings``.
        scans: returns the scans of the shards that a local copy of the database describes completely and plausibly.
    """

    tables_of_others: Callable[[str], list[str]]
    made: Callable[[str, Sequence[ShardScan], list[str], bool], AbstractContextManager[list[str]]]
    scans: Callable[[str, Mapping[str, RemoteShard]], Iterator[ShardScan]]


def key_database() -> KeyDatabase | None:
    """Return the guest for ``index.sqlite``; None: it is not installed."""
    target = storage_guests().get(SQLITE_INDEX)
    return None if target is None else load(target)
