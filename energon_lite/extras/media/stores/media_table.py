"""The table of media metadata in the ``index.sqlite`` of a data set or of a folder of files."""

from __future__ import annotations

import hashlib
import os
import threading
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from energon_lite.errors import DataIndexError, MissingEntryError, UsageError
from energon_lite.extras.media.metadata import MediaMetadataBase, deserialize_media_metadata
from energon_lite.storage.files.atomic_file import replacing
from energon_lite.storage.files.file_lock import only_one
from energon_lite.storage.files.urls import is_remote, url_files
from energon_lite.storage.index.index_cache import cache_folder
from energon_lite.storage.index.nv_meta import META_FOLDER, SQLITE_INDEX

if TYPE_CHECKING:
    import sqlite3

__all__ = ["MediaTable"]

_FIX = "make it with `energon-lite prepare-media` (or Energon's), and upload .nv-meta with the data"


class MediaTable:
    """Media metadata by the names of files.

    Args:
        root: the data set or folder, or its URL.
    """

    def __init__(self, root: str):
        self._root = root
        self._own = threading.local()  # each thread and each process has its own connection

    def __reduce__(self) -> Any:
        return MediaTable, (self._root,)

    def get(self, key: str) -> MediaMetadataBase:
        """Return the metadata of a file.

        Raises:
            UsageError: there is no table of metadata.
            MissingEntryError: the table has no entry for this file.
            DataIndexError: the table or the entry is damaged.

        Example:
            >>> MediaTable("data/films").get("000017.mp4").video_duration
            12.5
        """
        import sqlite3

        query = "SELECT metadata_type, metadata_json FROM media_metadata WHERE entry_key = ?"
        try:
            row = self._connection().execute(query, (key,)).fetchone()
        except sqlite3.Error as error:
            raise DataIndexError(f"media metadata cannot be read: {error}", where=self._root, fix=_FIX) from error
        if row is None:
            raise MissingEntryError(f"there is no media metadata of {key!r}", where=self._root, fix=_FIX)
        return deserialize_media_metadata(str(row[0]), str(row[1]), where=f"{self._root} [{key}]")

    def _connection(self) -> sqlite3.Connection:
        opened: tuple[int, sqlite3.Connection] | None = getattr(self._own, "opened", None)
        if opened is not None and opened[0] == os.getpid():
            return opened[1]
        path = _local_copy(self._root) if is_remote(self._root) else os.path.join(self._root, META_FOLDER, SQLITE_INDEX)
        if not os.path.isfile(path):
            raise UsageError("there is no media metadata", where=self._root, fix=_FIX)
        import sqlite3

        # No process writes to the file now; its views and triggers run no functions.
        connection = sqlite3.connect(f"file:{quote(path)}?mode=ro&immutable=1", uri=True)
        connection.execute("PRAGMA trusted_schema = OFF")
        query = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'media_metadata'"
        if connection.execute(query).fetchone() is None:
            connection.close()
            raise UsageError("there is no media metadata", where=self._root, fix=_FIX)
        self._own.opened = os.getpid(), connection
        return connection


def _local_copy(url: str) -> str:
    """Path of a copy in the user's cache of the ``index.sqlite`` of a remote data set."""
    version = url_files(url).list_files(url, META_FOLDER).get(SQLITE_INDEX)
    if version is None:
        raise UsageError("there is no media metadata", where=url, fix=_FIX)
    name = hashlib.sha256(f"{url.rstrip('/')} {sorted(version.items(), key=str)}".encode()).hexdigest()[:24]
    path = os.path.join(cache_folder(), "media", f"{name}.sqlite")
    if not os.path.isfile(path):
        with only_one(path), replacing(path) as temporary:
            url_files(url).copy_file(url, f"{META_FOLDER}/{SQLITE_INDEX}", temporary, version.get("size"))
    return path
