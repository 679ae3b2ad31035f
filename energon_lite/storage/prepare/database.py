"""The ``index.sqlite`` of a data set under preparation, with the tables of other programs from the earlier one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from energon_lite.storage.files.atomic_file import remove_if_there, temporary_path
from energon_lite.storage.index import nv_meta
from energon_lite.storage.index.sqlite_index import (
    build_sqlite_index,
    carry_over,
    find_duplicate_keys,
    tables_of_others,
)
from energon_lite.storage.prepare.dataset_scan import DatasetScan
from energon_lite.storage.prepare.odd_samples import duplicate_notes

__all__ = ["made_database"]


@contextmanager
def made_database(path: str, scan: DatasetScan, warnings: list[str], *, wanted: bool) -> Iterator[list[str]]:
    """Make ``index.sqlite`` if it is wanted and possible; it gets its name when the block ends.

    Tables of other programs are carried over from the earlier file (:data:`nv_meta.SQLITE_KEPT` if that was moved
    away). Gives the paths of the files that are made: one or none.
    """
    temporary, kept = temporary_path(path), nv_meta.meta_path(scan.root, nv_meta.SQLITE_KEPT)
    earlier = path if tables_of_others(path) else kept
    is_carried = False
    try:
        made = wanted and build_sqlite_index(temporary, scan.scans)
        if wanted and not made:
            warnings += _why_no_database(scan)
        if made and os.path.exists(earlier):
            is_carried = _carry_over(temporary, earlier, warnings)
        elif os.path.exists(kept):
            warnings.append(f"index.sqlite had tables of others in it; until there is a new one they are in {kept}")
        yield [path] if made else []
        if made:
            if earlier == path and not is_carried:
                os.replace(path, kept)
            os.replace(temporary, path)
        if is_carried:
            remove_if_there(kept)
    finally:
        remove_if_there(temporary)


def _carry_over(path: str, earlier: str, warnings: list[str]) -> bool:
    import sqlite3

    try:
        warnings += carry_over(path, earlier)
        return True
    except sqlite3.Error as error:
        kept = nv_meta.SQLITE_KEPT
        warnings.append(f"index.sqlite had tables of others that cannot be read ({error}); the file is kept as {kept}")
        return False


def _why_no_database(scan: DatasetScan) -> list[str]:
    duplicate = next(find_duplicate_keys(scan.scans), None)
    if duplicate is None:
        return ["no index.sqlite: a key is not valid UTF-8. Energon's look-ups by key need it, we do not"]
    key, first, second = duplicate
    place = f"{first} and {second}" if first != second else f"{first} (its parts do not stand together?)"
    return [
        *duplicate_notes(scan.scans),
        f"no index.sqlite: key {key!r} appears twice, in {place}. Loading works, here and in Energon; only Energon's "
        "look-ups by key (auxiliary data, joins) need unique keys",
    ]
