"""Preparing media, as callers of Energon do it."""

from __future__ import annotations

import os
from typing import Any

from energon_lite.media import MediaFilterConfig
from energon_lite.storage.prepare.media_scan import prepare_media

__all__ = ["prepare_filesystem_dataset"]


def prepare_filesystem_dataset(
    root_path: str | os.PathLike[str],
    media_filter: MediaFilterConfig,
    *,
    progress: bool,
    workers: int = 16,
    index_sqlite_tmp_path: Any = None,
) -> int:
    """Extract the metadata of the media files below a folder; returns how many there are.

    Args:
        root_path: the folder.
        media_filter: what is taken for a medium.
        progress: accepted; the command `energon-lite prepare-media` shows it.
        workers: processes at most.
        index_sqlite_tmp_path: a folder in which the database is written first.
    """
    tmp_path = None if index_sqlite_tmp_path is None else os.fspath(index_sqlite_tmp_path)
    return prepare_media(root_path, media_filter, workers=workers, tmp_path=tmp_path).found
