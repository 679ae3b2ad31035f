"""``index.sqlite``: samples by key, in the form of Megatron-Energon 7.4.

The core does not read these tables. They serve Energon's functions (auxiliary stores, joins, mounting), so that a
data set prepared here can be used there in full. Energon demands unique keys in a data set; this library does not.

Other programs may keep tables of their own in the file, such as Energon's metadata of pictures and videos, which may
take hours to collect. They are carried over when the file is made again.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import repeat
from urllib.parse import quote

import numpy as np

from energon_lite.errors import DatasetError, listed
from energon_lite.storage.files.atomic_file import flush_files, remove_if_there, temporary_path
from energon_lite.storage.files.shard_store import head_checksum
from energon_lite.storage.index.nv_meta import SQLITE_INDEX, SQLITE_KEPT, KeyDatabase, RemoteShard
from energon_lite.storage.tar_headers import BLOCK
from energon_lite.storage.tar_scan import ShardScan, split_member_name

#: The tables that this module writes.
_OURS = ("samples", "sample_parts")
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
#: Bytes behind the last sample, at most: the zeros that tar writers append, and members that are not samples.
_TRAILER = 1 << 20
#: Most duplicate keys that are named; further ones are only counted.
_NAMED = 1000


def find_duplicate_keys(scans: Sequence[ShardScan]) -> Iterator[tuple[str, str, str]]:
    """Find keys that appear again: (key, shard of the first appearance, shard of the later one)."""
    seen: dict[str, str] = {}
    for scan in scans:
        for key in scan.all_keys():
            if key in seen:
                yield key, seen[key], scan.name
            else:
                seen[key] = scan.name


def build_sqlite_index(path: str, scans: Sequence[ShardScan]) -> bool:
    """Write the database as the file ``path``. The caller renames the file when it is complete: a crash may damage it.

    Returns:
        False, and a useless file, if keys are not unique (or are not text).
    """
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


def tables_of_others(path: str) -> list[str]:
    """Names of the tables of other programs in a database; none if the file is no database.

    Raises:
        DatasetError: it is a database that cannot be read now.
    """
    if not os.path.isfile(path):
        return []
    try:
        with closing(sqlite3.connect(_read_only(path), uri=True)) as connection:
            rows = connection.execute(
                "SELECT name, sql FROM sqlite_master WHERE type = 'table' ORDER BY name"
            ).fetchall()
    except sqlite3.OperationalError as error:  # an unfinished transaction of a killed writer needs a writer to undo it
        raise DatasetError(
            f"index.sqlite cannot be read, so that it is not known whether others wrote into it: {error}",
            where=path,
            fix="end the program that writes to it; if none does, look at it with `sqlite3` once, or move it away",
        ) from error
    except sqlite3.Error:
        return []
    # A virtual table depends on the program that made it; it and the tables with its data are not touched.
    virtual = [name for name, sql in rows if str(sql).upper().startswith("CREATE VIRTUAL")]
    parts = ("sqlite_", *(f"{name}_" for name in virtual))
    return [name for name, _ in rows if name not in (*_OURS, *virtual) and not name.startswith(parts)]


def _copy_tables(path: str, earlier: str) -> list[str]:
    """Copy the tables of other programs from an earlier database into a new one that is not in use yet.

    A table with a column ``entry_key`` names members as ``<key>.<part>``. Of such a table, only rows about members of
    unchanged place and size are copied; if ``earlier`` has no samples, rows about members that exist.

    Returns:
        Notes on the copied and the left out rows.

    Raises:
        sqlite3.Error: the earlier database is damaged; the new one is unchanged.
    """
    kept, left_out = [], []
    with closing(sqlite3.connect(path, uri=True)) as connection:
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA journal_mode = MEMORY")
        connection.execute("ATTACH DATABASE ? AS earlier", (_read_only(earlier),))
        with connection:
            connection.execute("BEGIN")
            for name in tables_of_others(earlier):
                had, have = _copy(connection, name)
                kept.append(f"{name} ({have} row{'s' * (have != 1)})")
                if had != have:
                    left_out.append(f"{had - have} of {had} rows of {name}")
    flush_files([path])
    notes = [f"index.sqlite: kept what others wrote into it: {', '.join(kept)}"] if kept else []
    if left_out:
        notes.append(
            f"index.sqlite: {', '.join(left_out)} were about members that are gone or changed; `energon-lite "
            "prepare-media` makes those of the new ones"
        )
    return notes


def _copy(connection: sqlite3.Connection, name: str) -> tuple[int, int]:
    """Copy one table with its indexes; return the number of its rows before and after."""
    table = '"' + name.replace('"', '""') + '"'
    made = "SELECT sql FROM earlier.sqlite_master WHERE tbl_name = ? AND type = ? AND sql IS NOT NULL"
    ((sql,),) = connection.execute(made, (name, "table")).fetchall()
    connection.execute(sql)
    columns = [row[1] for row in connection.execute(f"PRAGMA earlier.table_info({table})")]
    fits = ""
    if "entry_key" in columns:
        places = "SELECT sample_key || '.' || part_name, content_byte_offset, content_byte_size FROM {0}.samples "
        places += "JOIN {0}.sample_parts USING (tar_file_id, sample_index)"
        known = connection.execute("SELECT count(*) FROM earlier.sqlite_master WHERE name IN (?, ?)", _OURS).fetchone()
        both = [places.format(schema) for schema in (("main", "earlier") if known == (len(_OURS),) else ("main",))]
        fits = f" WHERE entry_key IN (SELECT entry FROM (WITH fits(entry, x, y) AS ({' INTERSECT '.join(both)}) "
        fits += "SELECT entry FROM fits))"
    connection.execute(f"INSERT INTO main.{table} SELECT * FROM earlier.{table}{fits}")
    for (index,) in connection.execute(made, (name, "index")).fetchall():
        connection.execute(index)
    had, have = (
        connection.execute(f"SELECT count(*) FROM {schema}.{table}").fetchone() for schema in ("earlier", "main")
    )
    return had[0], have[0]


def _read_only(path: str) -> str:
    return f"file:{quote(path)}?mode=ro"


def _sample_rows(number: int, scan: ShardScan) -> Iterator[tuple[int, str, int, int, int]]:
    # Zipped columns instead of a generator: then no Python code runs for each row.
    sizes = np.diff(scan.headers, append=scan.end)
    return zip(
        repeat(number), scan.all_keys(), range(scan.samples), scan.headers.tolist(), sizes.tolist(), strict=False
    )


def _part_rows(number: int, scan: ShardScan) -> Iterator[tuple[int, int, str, int, int]]:
    samples = np.repeat(np.arange(scan.samples), np.diff(scan.first_part))
    offsets, sizes, names = (column.tolist() for column in scan.parts.T)
    texts = map(scan.part_names.__getitem__, names)
    return zip(repeat(number), samples.tolist(), texts, offsets, sizes, strict=False)


# -- replacement of the earlier file --------------------------------------------------------------------------------


@contextmanager
def made_database(path: str, scans: Sequence[ShardScan], warnings: list[str], wanted: bool) -> Iterator[list[str]]:
    """Make ``index.sqlite`` if it is wanted and possible; it gets its name when the block ends.

    Tables of other programs are carried over from the earlier file (``SQLITE_KEPT`` if that was moved away). Gives the
    paths of the files that are made: one or none.
    """
    temporary, kept = temporary_path(path), path.removesuffix(SQLITE_INDEX) + SQLITE_KEPT
    earlier = path if tables_of_others(path) else kept
    is_carried = False
    try:
        made = wanted and _built(temporary, scans, path)
        if wanted and not made:
            warnings += _why_no_database(scans)
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


def _built(temporary: str, scans: Sequence[ShardScan], path: str) -> bool:
    try:
        return build_sqlite_index(temporary, scans)
    except sqlite3.OperationalError as error:
        fix = "make room there, and prepare again; or do without Energon's look-ups by key: --no-sqlite"
        raise DatasetError(f"the database of keys cannot be written: {error}", where=path, fix=fix) from error


def _carry_over(path: str, earlier: str, warnings: list[str]) -> bool:
    try:
        warnings += _copy_tables(path, earlier)
        return True
    except sqlite3.Error as error:
        what = f"index.sqlite had tables of others that cannot be read ({error}); the file is kept as {SQLITE_KEPT}"
        warnings.append(what)
        return False


def _why_no_database(scans: Sequence[ShardScan]) -> list[str]:
    duplicates = [*find_duplicate_keys(scans)]
    if not duplicates:
        return ["no index.sqlite: a key is not valid UTF-8. Energon's look-ups by key need it, we do not"]
    named = [f"{later}: {key}" + (f" (as in {first})" if first != later else "") for key, first, later in duplicates]
    having = "1 sample has" if len(named) == 1 else f"{len(named):,} samples have"
    key, first, second = duplicates[0]
    place = f"{first} and {second}" if first != second else f"{first} (its parts are not contiguous?)"
    return [
        f"{having} the key of another one: {listed(named, _NAMED)}",
        f"no index.sqlite: key {key!r} appears twice, in {place}. Loading works, here and in Energon; only Energon's "
        "look-ups by key (auxiliary data, joins) need unique keys",
    ]


# -- places of samples from ``index.sqlite`` ------------------------------------------------------------------------
#
# For remote data sets that Energon prepared: they save reading the headers of the shards. All contents of the database
# are checked: a shard with impossible entries, or with entries that do not fit its size, its first block or its number
# of samples, is left out, and its headers are read instead.


def energon_scans(path: str, shards: Mapping[str, RemoteShard]) -> Iterator[ShardScan]:
    """Make the scans of the shards that the database describes completely and plausibly, in order.

    Args:
        path: a local copy of ``index.sqlite``.
        shards: all shards of the data set by name, in the order of ``.info.json``.

    Example:
        >>> scans = {scan.name: scan for scan in energon_scans("index.sqlite", shards)}
    """
    try:
        with closing(sqlite3.connect(f"{_read_only(path)}&immutable=1", uri=True)) as connection:
            connection.execute("PRAGMA trusted_schema = OFF")  # its views and triggers run no functions
            kinds = dict(connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'").fetchall())
            for name in _OURS:
                if not str(kinds.get(name, "")).upper().startswith("CREATE TABLE"):
                    return
            for number, (name, shard) in enumerate(shards.items()):
                scan = _scan(connection, number, name, shard)
                if scan is not None:
                    yield scan
    except (sqlite3.Error, UnicodeError):
        return


def _scan(connection: sqlite3.Connection, number: int, name: str, shard: RemoteShard) -> ShardScan | None:
    samples = connection.execute(
        "SELECT sample_key, sample_index, byte_offset, byte_size FROM samples WHERE tar_file_id = ? "
        "ORDER BY sample_index LIMIT ?",
        (number, shard.samples + 1),
    ).fetchall()
    parts = connection.execute(
        "SELECT sample_index, part_name, content_byte_offset, content_byte_size FROM sample_parts WHERE "
        "tar_file_id = ? ORDER BY sample_index, content_byte_offset",
        (number,),
    ).fetchall()
    if len(samples) != shard.samples or not samples or not parts:
        return None
    try:
        keys = [key.encode() for key, *_ in samples]
        table = np.array([row[1:] for row in samples], dtype=np.int64)
        numbers: dict[str, int] = {}
        rows = np.array(
            [(index, offset, size, numbers.setdefault(part, len(numbers))) for index, part, offset, size in parts],
            dtype=np.int64,
        )
    except (AttributeError, TypeError, ValueError, OverflowError):
        return None
    if not all(isinstance(part, str) and part for part in numbers):
        return None
    counts = np.bincount(np.clip(rows[:, 0], 0, len(samples)), minlength=len(samples))
    headers, stops = table[:, 1], table[:, 1] + table[:, 2]
    owner = np.clip(rows[:, 0], 0, len(samples) - 1)
    starts, ends = rows[:, 1], rows[:, 1] + rows[:, 2]
    end = int(stops[-1])
    is_sound = (
        np.array_equal(table[:, 0], np.arange(len(samples)))
        and rows[:, 0].min() >= 0
        and len(counts) == len(samples)
        and (counts > 0).all()
        and headers[0] >= 0
        and (headers % BLOCK == 0).all()
        and (headers[1:] >= stops[:-1]).all()
        and (rows[:, 2] >= 0).all()
        and (starts >= headers[owner] + BLOCK).all()
        and (starts % BLOCK == 0).all()
        and (ends <= stops[owner]).all()
        and end <= shard.size <= end + _TRAILER
        and _is_first(shard.block, (keys[0].decode(), parts[0][1]), int(headers[0]))
    )
    if not is_sound:
        return None
    return ShardScan(
        name=name,
        size=shard.size,
        head=head_checksum(shard.block),
        end=end,
        headers=headers.copy(),
        first_part=np.append(0, np.cumsum(counts)).astype(np.int64),
        parts=rows[:, 1:].copy(),
        part_names=tuple(numbers),
        key_offsets=np.append(0, np.cumsum([len(key) for key in keys])).astype(np.int64),
        keys=b"".join(keys),
    )


def _is_first(block: bytes, member: tuple[str, str], header: int) -> bool:
    """Return False if the first block of a shard contradicts its first member (key, part) at offset ``header``."""
    if header or len(block) < BLOCK or block[156:157] not in (b"0", b"\0") or block[345]:
        return len(block) == BLOCK
    name = block[:100].partition(b"\0")[0].decode("utf-8", "surrogateescape")
    return split_member_name(name) == member


DATABASE = KeyDatabase(tables_of_others, made_database, energon_scans)
