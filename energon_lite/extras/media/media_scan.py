"""The metadata of all media of a data set or a folder: which files are media, their metadata, and its table.

The work is a job that processes and ranks share. Units are shards, or a few files of a plain folder. The result of each
is kept until all are done, so that a run that was killed resumes there. A damaged medium has no metadata; it is
reported. The table is in ``index.sqlite``, in the form of Megatron-Energon 7.4: members of shards by ``key.part``,
files of a plain folder by their path in it."""

from __future__ import annotations

import io
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from energon_lite.errors import DataIndexError, DatasetError, DecodeError, EmptyDatasetError, UsageError
from energon_lite.extras.media.av_decoder import AVDecoder
from energon_lite.extras.media.metadata import ImageMetadata, MediaMetadataBase, serialize_media_metadata
from energon_lite.storage.files.atomic_file import replacing
from energon_lite.storage.files.byte_ranges import file_version, found_at
from energon_lite.storage.files.shard_store import ShardIdentity, file_state
from energon_lite.storage.index.index_cache import open_index
from energon_lite.storage.index.nv_meta import (
    META_FOLDER,
    SQLITE_INDEX,
    is_jsonl,
    is_prepared,
    meta_path,
    read_info,
    read_uuid,
)
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.read.ranges import PartRange, RangeStream, open_stream
from energon_lite.storage.samples.image_decoding import read_image_header
from energon_lite.storage.samples.part_decoder import HEAD_BYTES, guess_extension, media_kind
from energon_lite.storage.sharded_job import Progress, Ranks, ShardedJob
from energon_lite.storage.sharded_work import Arrays, Table, Work


class MediaFilterStrategy(str, Enum):
    """Criterion by which a file counts as a medium."""

    EXTENSION = "EXTENSION"
    HEADER = "HEADER"
    GLOB = "GLOB"


@dataclass(frozen=True)
class MediaFilterConfig:
    """A filter of files that are media. Make one with :meth:`parse`.

    Args:
        strategy: select by extension, by the first bytes, or by patterns of names.
        patterns: patterns of names, for ``GLOB``.
    """

    strategy: MediaFilterStrategy
    patterns: list[str] = field(default_factory=list, hash=False)

    @classmethod
    def parse(cls, glob: str | None, header: bool, extension: bool) -> MediaFilterConfig:
        """Make the filter from three options, exactly one of which has to be given.

        Args:
            glob: select by patterns such as ``"*.jpg,clips/*"``, separated by commas.
            header: select by the first bytes.
            extension: select by the extension.

        Raises:
            UsageError: none or several are given.
        """
        if sum(map(bool, (glob, header, extension))) != 1:
            raise UsageError(
                "exactly one of the ways to find media must be given: by glob, by header or by extension",
                fix="several patterns can be given in one, with commas: '*.jpg,*.mp4'",
            )
        if glob:
            return cls(MediaFilterStrategy.GLOB, [pattern.strip() for pattern in glob.split(",") if pattern.strip()])
        return cls(MediaFilterStrategy.HEADER if header else MediaFilterStrategy.EXTENSION)

    def should_consider_all(self) -> bool:
        """Return True if names do not matter, so that every file has to be opened."""
        return self.strategy is MediaFilterStrategy.HEADER

    def should_consider_media(self, name: str) -> bool:
        """Return True if a file of this name may be a medium. Upper and lower case are equal; a pattern may match the
        whole path, or the name without folders."""
        if self.strategy is MediaFilterStrategy.HEADER:
            return True
        if self.strategy is MediaFilterStrategy.EXTENSION:
            return media_kind(name.rpartition(".")[2]) is not None
        lower = name.lower()
        names = (lower, lower.rpartition("/")[2])
        return any(fnmatchcase(candidate, pattern.lower()) for candidate in names for pattern in self.patterns)

    def extract_metadata(self, source: Any, filename: str | None = None) -> MediaMetadataBase | None:
        """Return the metadata of a file; None: it is no medium, or a damaged one.

        Args:
            source: bytes, an open file, or an object with ``open("rb")`` and ``name``, such as a path.
            filename: name of the file, if the source is not a path.
        """
        try:
            return self.read_metadata(source, filename)
        except DecodeError:
            return None

    def read_metadata(self, source: Any, filename: str | None = None) -> MediaMetadataBase | None:
        """Return the metadata of a file; None: it is no medium.

        Raises:
            DecodeError: the medium is damaged.
        """
        if isinstance(source, (bytes, bytearray)):
            source = io.BytesIO(source)
        is_open = hasattr(source, "read")
        name = filename if is_open else str(source.name)
        if name is None:
            raise UsageError("bytes and open files have no name", fix="give filename=")
        with nullcontext(source) if is_open else source.open("rb") as stream:
            if not self.should_consider_media(name):
                return None
            kind = media_kind(name.rpartition(".")[2])
            if self.strategy is not MediaFilterStrategy.EXTENSION:
                stream.seek(0)
                kind = media_kind(guess_extension(stream.read(HEAD_BYTES))) or kind
            if kind is None:
                return None
            if kind == "av":
                return AVDecoder(stream).get_metadata(get_audio_num_samples=True)
            return ImageMetadata(**read_image_header(stream)._asdict())


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


#: Version of the rules; increased when the same file would give other metadata than before.
_RULES = 1
#: Most files of a plain folder in a unit.
_TOGETHER = 16
#: Seconds of work up to which no helpers are started.
_ALONE = 0.5

#: A unit: the name of one shard, or the names of some files.
Unit = tuple[str, ...]


@dataclass(frozen=True)
class MediaReport:
    """The outcome of a preparation of media.

    Attributes:
        path: the folder.
        found: number of media whose metadata was stored.
        broken: damaged media, each with its defect.
    """

    path: str
    found: int
    broken: tuple[tuple[str, str], ...] = ()


#: Rows of the media of a unit, and damaged media with their defects.
Found = tuple[list[MediaRow], list[tuple[str, str]]]


class _Media(Work[Unit, Found]):
    """The extraction of metadata from the media of units in a folder."""

    def __init__(self, root: str, media_filter: MediaFilterConfig, *, of_shards: bool):
        super().__init__(meta_path(root, "energon_lite.extras.media"))
        self.root = root
        self.filter = media_filter
        self.of_shards = of_shards

    def name(self, unit: Unit) -> str:
        return unit[0] if len(unit) == 1 else f"{unit[0]} to {unit[-1]}"

    def where(self, unit: Unit) -> str:
        return os.path.join(self.root, unit[0])

    def inputs(self, unit: Unit) -> list[Any]:
        states = (file_state(os.path.join(self.root, name)) for name in unit)
        return [_RULES, self.filter.strategy.value, *self.filter.patterns, *states]

    def do(self, unit: Unit) -> Found:
        rows: list[MediaRow] = []
        broken: list[tuple[str, str]] = []
        files = ((name, open_stream(os.path.join(self.root, name))) for name in unit)
        for entry, stream in self._of_shard(unit[0]) if self.of_shards else files:
            try:
                metadata = self.filter.read_metadata(stream, entry)
            except DecodeError as error:
                broken.append((entry, error.what))
                continue
            if metadata is not None:
                kind, text = serialize_media_metadata(metadata)
                rows.append((entry, kind.value, text))
        return rows, broken

    def _of_shard(self, name: str) -> Iterator[tuple[str, RangeStream]]:
        index = _index(self.root, read_uuid(self.root))
        scan = index.scan(index.shard_rows[name])
        path = os.path.join(self.root, name)
        shard = path, ShardIdentity(scan.size, scan.head, file_version(found_at(path)))
        for key, (first, stop) in zip(scan.all_keys(), pairwise(scan.first_part.tolist()), strict=True):
            for offset, size, number in scan.parts[first:stop].tolist():
                entry = f"{key}.{scan.part_names[number]}"
                if self.filter.should_consider_media(entry):
                    yield entry, PartRange(shard, offset, size).open()

    def pack(self, result: Found) -> tuple[dict[str, Any], Arrays]:
        return {"found": len(result[0])}, {"found": np.frombuffer(json.dumps(result).encode(), np.uint8)}

    def unpack(self, table: Table, arrays: Arrays) -> Found:
        rows, broken = json.loads(arrays["found"].tobytes())
        return [(entry, kind, text) for entry, kind, text in rows], [(entry, what) for entry, what in broken]


@lru_cache(maxsize=4)
def _index(root: str, uuid: str) -> PackedIndex:
    return open_index(root)[0]


def prepare_media(
    path: str | os.PathLike[str],
    media_filter: MediaFilterConfig,
    *,
    workers: int | None = None,
    ranks: Ranks | None = None,
    progress: Progress | None = None,
    tmp_path: str | None = None,
) -> MediaReport:
    """Extract the metadata of the media of a prepared data set or a plain folder, and store it in
    ``.nv-meta/index.sqlite``, where Energon finds it as well.

    Args:
        path: the folder.
        media_filter: the filter that selects media.
        workers: processes at most; None for one per core.
        ranks: the processes that share the work; each must call this. Rank 0 stores all results; the reports of the
            others cover their own share.
        progress: called with the number of finished units (shards, or a few files), of all, and a few words.
        tmp_path: a folder in which the database is written first, if the data set's storage is slow.

    Raises:
        UsageError: the path is no folder.
        EmptyDatasetError: no file in a plain folder has the name of a medium.
        DatasetError: a shard cannot be read, or is not the one that was indexed.

    Example:
        >>> prepare_media("data/films", MediaFilterConfig.parse(None, False, True)).found
        16413
    """
    root, ranks = os.path.abspath(os.path.expanduser(os.fspath(path))), ranks or Ranks()
    if is_jsonl(root) or not os.path.isdir(root):
        raise UsageError(
            "media are looked for in a folder: a prepared data set of shards, or one of media files",
            where=root,
            fix="give such a folder",
        )
    of_shards = is_prepared(root)
    units = [(name,) for name, count in read_info(root).items() if count] if of_shards else _files(root, media_filter)
    work = _Media(root, media_filter, of_shards=of_shards)
    media_count = 0

    def tick(unit: Unit, table: Table | None, done: int, of: int) -> None:
        nonlocal media_count
        media_count += (table or {}).get("found", 0)
        if progress:
            progress(done, of, f"{media_count:,} media")

    what = "shards" if of_shards else "groups of files"
    job = ShardedJob(work, units, ranks=ranks, workers=workers, alone=_ALONE, what=what, where=root, tick=tick)
    job.run()
    with ranks.together():
        if ranks.rank:
            return MediaReport(root, media_count)
        job.raise_errors(DatasetError, "be read", "restore them, or prepare the data set again")
        broken: list[tuple[str, str]] = []

        def rows() -> Iterator[MediaRow]:
            for unit in units:
                own, damaged = job.read(unit)
                broken.extend(damaged)
                yield from own

        patterns = ",".join(media_filter.patterns)
        write_media_metadata(root, rows(), media_filter.strategy.value, patterns, tmp_path)
        work.remove()
    return MediaReport(root, sum(job.done[unit]["found"] for unit in units), tuple(broken))


def _files(root: str, media_filter: MediaFilterConfig) -> list[Unit]:
    """Units of the files in a plain folder that may be media."""
    names: list[str] = []
    shards = 0
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name != META_FOLDER)
        shards += sum(name.endswith(".tar") for name in files)
        place = os.path.relpath(folder, root).replace(os.sep, "/")
        whole = (name if place == "." else f"{place}/{name}" for name in sorted(files))
        names += [
            name
            for name in whole
            if media_filter.should_consider_media(name) and os.path.isfile(os.path.join(root, name))
        ]
    if not names:
        raise EmptyDatasetError(
            "no file in the folder is an image, audio or video" + (f", but {shards} are shards" if shards else ""),
            where=root,
            fix="run `energon-lite prepare` first" if shards else "give other patterns, or --media-metadata-by-header",
        )
    return [tuple(names[start : start + _TOGETHER]) for start in range(0, len(names), _TOGETHER)]
