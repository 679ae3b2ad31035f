"""The metadata of media in ``index.sqlite``, as Megatron-Energon 7.4 keeps it: of members of shards by ``key.part``, of
files in a plain folder by their path in it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import closing
from functools import lru_cache
from typing import TYPE_CHECKING
from urllib.parse import quote

from energon_lite.errors import DataIndexError
from energon_lite.media.metadata import MediaMetadataBase, deserialize_media_metadata
from energon_lite.storage.files.atomic_file import replacing
from energon_lite.storage.index.nv_meta import SQLITE_INDEX, meta_path

if TYPE_CHECKING:
    import sqlite3

__all__ = ["MediaRow", "has_media_metadata", "read_media_metadata", "write_media_metadata"]

#: Entry, kind, and the metadata as JSON.
MediaRow = tuple[str, str, str]

_TABLES = """
CREATE TABLE IF NOT EXISTS media_metadata (entry_key TEXT PRIMARY KEY, metadata_type TEXT NOT NULL,
                                           metadata_json TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS media_filters (filter_id INTEGER PRIMARY KEY AUTOINCREMENT, strategy TEXT NOT NULL,
                                          patterns TEXT, created_at_utc TEXT DEFAULT CURRENT_TIMESTAMP,
                                          UNIQUE(strategy, patterns));
"""
_MAKE = "make it with `energon-lite prepare-media {}`"


def write_media_metadata(
    root: str, rows: Iterable[MediaRow], strategy: str, patterns: str, tmp_path: str | None = None
) -> None:
    """Put metadata into the ``index.sqlite`` of a folder; what is known of other entries stays.

    The file is replaced as a whole, so that who reads the old one meanwhile is not disturbed.

    Args:
        root: the folder; it need not be prepared.
        rows: the metadata.
        strategy, patterns: of the filter that chose the entries.
        tmp_path: a folder for the file while it is written, where the data set's own is slow; None: the data set's.

    Raises:
        DataIndexError: the file that is there is no database.
    """
    import sqlite3

    path = meta_path(root, SQLITE_INDEX)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with replacing(path, flush=True) as temporary, tempfile.TemporaryDirectory(dir=tmp_path) as folder:
        draft = os.path.join(folder, SQLITE_INDEX) if tmp_path else temporary
        if os.path.exists(path):
            shutil.copyfile(path, draft)
        try:
            with closing(sqlite3.connect(draft)) as connection:
                connection.execute("PRAGMA trusted_schema = OFF")
                connection.execute("PRAGMA journal_mode = MEMORY")
                connection.executescript(_TABLES)
                with connection:
                    connection.executemany("INSERT OR REPLACE INTO media_metadata VALUES (?, ?, ?)", rows)
                    connection.execute(
                        "INSERT OR IGNORE INTO media_filters (strategy, patterns) VALUES (?, ?)", (strategy, patterns)
                    )
        except sqlite3.DatabaseError as error:
            raise DataIndexError(
                f"the metadata cannot be written into the database: {error}",
                where=path,
                fix="prepare the data set again (--tar-index-only), or remove the file",
            ) from error
        if draft != temporary:
            shutil.copyfile(draft, temporary)


def has_media_metadata(root: str) -> bool:
    """Whether the metadata of media was extracted for a folder."""
    path = meta_path(root, SQLITE_INDEX)
    if not os.path.isfile(path):
        return False
    return bool(_asked(path, "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'media_metadata'", ()))


def read_media_metadata(root: str, entry: str) -> MediaMetadataBase | None:
    """The metadata of one entry; None: there is none of it, since it is no medium or a damaged one.

    Args:
        root: a folder on a local disk: a prepared data set, or any with ``.nv-meta/index.sqlite``.
        entry: ``key.part`` of a prepared data set, else the path in the folder.

    Raises:
        DataIndexError: no metadata was extracted here, or it is damaged.

    Example:
        >>> read_media_metadata("data/films", "000017.mp4").video_duration
        12.5
    """
    path = meta_path(root, SQLITE_INDEX)
    if not has_media_metadata(root):
        raise DataIndexError("there is no metadata of media here", where=path, fix=_MAKE.format(root))
    found = _asked(path, "SELECT metadata_type, metadata_json FROM media_metadata WHERE entry_key = ?", (entry,))
    return deserialize_media_metadata(*found) if found else None


def _asked(path: str, question: str, values: tuple[str, ...]) -> tuple[str, str] | None:
    import sqlite3

    try:
        status = os.stat(path)
        connection = _connection(path, status.st_mtime_ns, status.st_ino, os.getpid())
        row: tuple[str, str] | None = connection.execute(question, values).fetchone()
        return row
    except sqlite3.Error as error:
        raise DataIndexError(
            f"the database cannot be read: {error}", where=path, fix="prepare the data set again (--tar-index-only)"
        ) from error


# One for each process and version of the file: a connection does not survive a fork, and a file that was replaced stays
# open as the old one. SQLite itself keeps threads from each other.
@lru_cache(maxsize=64)
def _connection(path: str, changed: int, inode: int, process: int) -> sqlite3.Connection:
    import sqlite3

    return sqlite3.connect(f"file:{quote(path)}?mode=ro&immutable=1", uri=True, check_same_thread=False)
