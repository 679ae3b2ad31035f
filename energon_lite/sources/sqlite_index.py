"""``index.sqlite``: samples by key, as Megatron-Energon 7.4 writes it.

We do not read it. It is there for what Energon does with it (auxiliary stores, joins, mounting), so that a data set
prepared here loses nothing there. Energon demands that keys are unique in a data set; we do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import repeat

import numpy as np

from energon_lite.sources.atomic_file import flush_files
from energon_lite.sources.tar_scan import ShardScan

__all__ = ["build_sqlite_index", "find_duplicate_key"]

_TABLES = """
CREATE TABLE samples (tar_file_id INTEGER NOT NULL, sample_key TEXT NOT NULL UNIQUE, sample_index INTEGER NOT NULL,
                      byte_offset INTEGER, byte_size INTEGER);
CREATE TABLE sample_parts (tar_file_id INTEGER, sample_index INTEGER, part_name TEXT, content_byte_offset INTEGER,
                           content_byte_size INTEGER);
"""

_INDEXES = """
CREATE INDEX idx_samples_by_tar_and_idx ON samples(tar_file_id, sample_index);
CREATE INDEX idx_sample_parts_seq ON sample_parts(tar_file_id, sample_index, content_byte_offset);
CREATE INDEX idx_sample_parts_full ON sample_parts(tar_file_id, sample_index, part_name, content_byte_offset,
                                                   content_byte_size);
"""


def find_duplicate_key(scans: Sequence[ShardScan]) -> tuple[str, str, str] | None:
    """The first key that appears twice: (key, shard, other shard), or None."""
    seen: dict[str, int] = {}
    for number, scan in enumerate(scans):
        for key in scan.all_keys():
            if key in seen:
                return key, scans[seen[key]].name, scan.name
            seen[key] = number
    return None


def build_sqlite_index(path: str, scans: Sequence[ShardScan]) -> bool:
    """Build the database as the file ``path``, which is to be renamed when it is whole: meanwhile nothing protects it.

    Returns:
        False, and a file that is of no use, if keys are not unique (or are not text).
    """
    import sqlite3

    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = OFF")
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("PRAGMA temp_store = MEMORY")
        connection.executescript(_TABLES)
        try:
            for number, scan in enumerate(scans):
                connection.executemany("INSERT INTO samples VALUES (?, ?, ?, ?, ?)", _sample_rows(number, scan))
                connection.executemany("INSERT INTO sample_parts VALUES (?, ?, ?, ?, ?)", _part_rows(number, scan))
        except (sqlite3.IntegrityError, UnicodeEncodeError):
            return False
        connection.commit()
        connection.executescript(_INDEXES)
    flush_files([path])
    return True


def _sample_rows(number: int, scan: ShardScan) -> Iterator[tuple[int, str, int, int, int]]:
    # Columns that are zipped, not a generator: the rows are then made without running Python code for each.
    sizes = np.diff(scan.headers, append=scan.end)
    return zip(
        repeat(number), scan.all_keys(), range(scan.samples), scan.headers.tolist(), sizes.tolist(), strict=False
    )


def _part_rows(number: int, scan: ShardScan) -> Iterator[tuple[int, int, str, int, int]]:
    samples = np.repeat(np.arange(scan.samples), np.diff(scan.first_part))
    offsets, sizes, names = (column.tolist() for column in scan.parts.T)
    texts = map(scan.part_names.__getitem__, names)
    return zip(repeat(number), samples.tolist(), texts, offsets, sizes, strict=False)
