"""Metadata of media in ``index.sqlite``, in the form of Megatron-Energon 7.4: members of shards by ``key.part``, files
of a plain folder by their path in it. :mod:`energon_lite.extras.media.stores.media_table` reads it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import closing

from energon_lite.errors import DataIndexError
from energon_lite.storage.files.atomic_file import replacing
from energon_lite.storage.index.nv_meta import SQLITE_INDEX, meta_path

__all__ = ["MediaRow", "write_media_metadata"]

#: A row of the table: the entry's key, the kind of metadata, and the metadata as JSON.
MediaRow = tuple[str, str, str]

_TABLES = """
CREATE TABLE IF NOT EXISTS media_metadata (entry_key TEXT PRIMARY KEY, metadata_type TEXT NOT NULL,
                                           metadata_json TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS media_filters (filter_id INTEGER PRIMARY KEY AUTOINCREMENT, strategy TEXT NOT NULL,
                                          patterns TEXT, created_at_utc TEXT DEFAULT CURRENT_TIMESTAMP,
                                          UNIQUE(strategy, patterns));
"""


def write_media_metadata(
    root: str, rows: Iterable[MediaRow], strategy: str, patterns: str, tmp_path: str | None = None
) -> None:
    """Write metadata into the ``index.sqlite`` of a folder; the metadata of other entries stays.

    The file is replaced as a whole, so readers of the old one are not disturbed.

    Args:
        root: the folder; it need not be prepared.
        rows: the metadata.
        strategy, patterns: strategy and patterns of the filter that chose the entries.
        tmp_path: a folder for the file while it is written, if the data set's storage is slow; None: the data set's.

    Raises:
        DataIndexError: the existing file is no database.
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
