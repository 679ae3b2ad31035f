"""Columns that a measuring writes: their maker, the files that exist, the values to be written, and the report."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from glob import glob
from operator import attrgetter, methodcaller
from typing import Any

import numpy as np

from energon_lite.errors import DataIndexError, UsageError
from energon_lite.loading.measuring_runner import Shapes, Values
from energon_lite.storage.files.atomic_file import remove_if_there
from energon_lite.storage.index.column_file import (
    LENGTH,
    ColumnFile,
    Made,
    Ragged,
    RaggedFile,
    column_path,
    writable_folder,
    write_column_file,
)
from energon_lite.storage.index.columns import FAILED, SKIP, SKIPPED
from energon_lite.storage.read.webdataset import WebdatasetSource

#: Function that yields the values of each shard, or None for shards without known values.
Blocks = Callable[[], Iterable[Values | None]]


class MeasuredColumns:
    """Columns of a data set that are made by one maker: ``length``, ``skip``, and others by name.

    Args:
        source: the whole data set.
        maker: the maker of the columns.
        name: prefix of the columns' names, before a dot, so that results of several measurings can coexist.
        flags: False: there is no column ``skip``.
        lengths: False: there is no column ``length``.

    Attributes:
        results: folder for the results of the work, until the columns are written.

    Raises:
        UsageError: a column of another maker, in a folder that cannot be written, would take precedence over these.
    """

    def __init__(
        self, source: WebdatasetSource, maker: Maker, name: str = "", *, flags: bool = True, lengths: bool = True
    ):
        self._prefix = f"{name}." if name else ""
        self._source = source
        self._maker = maker
        self._folder = writable_folder(source.path)
        self._fixed = [column for column, wanted in ((SKIP, flags), (LENGTH, lengths)) if wanted]
        self.results = os.path.join(self._folder, f"{self._prefix}{LENGTH if lengths else 'columns'}.results")
        for column in self._fixed:
            self._check_not_hidden(column, ColumnFile)

    def _files(self, shapes: Shapes) -> list[tuple[str, int, type[ColumnFile], str]]:
        """Return name, width, kind and path of each column, in the order in which they are written: lengths last, so
        that a run that is killed in between is not done, and finds its results."""
        widths = {name: abs(width) for name, width in sorted(shapes.items()) if name not in self._fixed}
        widths |= dict.fromkeys(self._fixed, 0)
        kinds = {name: RaggedFile if width else ColumnFile for name, width in widths.items()}
        return [(name, widths[name], kind, self._path(name, kind)) for name, kind in kinds.items()]

    def paths(self, shapes: Shapes) -> tuple[str, ...]:
        """Return the paths of the columns' files."""
        return tuple(path for *_, path in self._files(shapes))

    def _path(self, name: str, kind: type[ColumnFile]) -> str:
        return column_path(self._folder, self._prefix + name, kind.suffix)

    def _check_not_hidden(self, column: str, kind: type[ColumnFile]) -> None:
        """Refuse a column of another maker next to the data: it takes precedence over columns in the user's cache."""
        name = self._prefix + column
        for file in kind.stored(self._source.path, name):
            if os.path.dirname(file.path) == self._folder:
                break
            if file.fits(self._source.index) and not self._is_ours(file):
                raise UsageError(
                    f"the data set has a column {name!r} already, made by something else, and its folder cannot be "
                    "written; it would hide what is measured now",
                    where=file.path,
                    fix="store it under another name: --name mine",
                )

    def _is_ours(self, file: ColumnFile) -> bool:
        """Return whether this maker has measured some of a file's shards."""
        return any(self._maker.made(*maker_and_code) for maker_and_code in file.makers)

    def _unchanged(self, file: ColumnFile) -> dict[int, Any]:
        """Return the values of unchanged shards that this maker has measured, by row."""
        unchanged = file.unchanged(self._source.index)
        return {row: values for row, (values, made) in unchanged.items() if self._maker.made(*made)}

    def known(self) -> dict[int, Values]:
        """Return the values of unchanged shards, by row, from the existing columns."""
        index = self._source.index
        stored = {name: self._unchanged(file) for name, file in self._others()}
        for name in self._fixed:
            files = ColumnFile.stored(self._source.path, self._prefix + name)
            made = [file for file in files if self._is_ours(file)]
            stored[name] = self._unchanged(made[0]) if made else {}
        values = dict[int, Values]()
        for row in set.intersection(*map(set, stored.values())) if stored else ():
            columns: dict[str, Any] = {name: rows[row] for name, rows in stored.items()}
            values[row] = Values.zeros(int(index.shards[row + 1, 3] - index.shards[row, 3]))
            values[row].flags = columns.pop(SKIP, values[row].flags)
            values[row].columns = columns
        return values

    def _others(self, *, any_code: bool = False) -> Iterator[tuple[str, ColumnFile]]:
        """Yield the files of this maker with the names of their columns, without lengths and flags. ``any_code``: files
        that only this maker has measured, with any version of its code."""
        for kind in (ColumnFile, RaggedFile):
            for file_name in sorted(glob(f"{self._prefix}*{kind.suffix}", root_dir=self._folder)):
                name = file_name.removesuffix(kind.suffix).removeprefix(self._prefix)
                if name in (LENGTH, SKIP) or "." in name:  # columns of another --name have a dot
                    continue
                try:
                    file = kind(os.path.join(self._folder, file_name))
                except (DataIndexError, OSError):
                    continue
                of_all = [dict(settings) == dict(self._maker.settings) for settings, _ in file.makers]
                if all(of_all) if any_code else self._is_ours(file):
                    yield name, file

    def up_to_date(self, shapes: Shapes) -> bool:
        """Return whether all files exist and were written by this maker with the same code."""
        files = self._files(shapes)
        present = [kind(path) for _, _, kind, path in files if os.path.exists(path)]
        return len(present) == len(files) and all(
            file.fits(self._source.index) and self._is_ours(file) and file.code == self._maker.code for file in present
        )

    def write(self, blocks: Blocks, largest: dict[str, int], shapes: Shapes, measured: Container[int] = ()) -> None:
        """Write the columns, and remove those that this maker wrote earlier and does not write any more. Values of
        other shards are kept, whatever measured them.

        Args:
            blocks: yields the measured values; it is called for each column.
            largest: the largest value of each column.
            shapes: the columns.
            measured: rows of the shards for which ``blocks`` has values.
        """
        files = self._files(shapes)
        for name, _, kind, _ in files:
            self._check_not_hidden(name, kind)
        index = self._source.index
        made: dict[str, Any] = {"maker": self._maker.settings, "code": self._maker.code, "command": self._maker.command}
        for name, width, kind, path in files:
            full = self._prefix + name
            kept, most, made["others"] = self._kept(full, kind, width, measured)
            get = attrgetter("flags") if name == SKIP else methodcaller("column", name, width)
            dtype = "|u1" if name == SKIP else "<i4" if max(largest.get(name, 0), most) < 2**31 else "<i8"
            write_column_file(path, full, index, partial(_blocks, blocks, get, kept), width=width, dtype=dtype, **made)
        for name, file in self._others(any_code=True):
            if name not in shapes or bool(shapes[name]) != isinstance(file, RaggedFile):
                remove_if_there(file.path)

    def _kept(
        self, name: str, kind: type[ColumnFile], width: int, measured: Container[int]
    ) -> tuple[dict[int, Any], int, dict[int, Made]]:
        """Return the stored values of shards that were not measured now, the largest of them, and their makers.

        Raises:
            UsageError: they do not fit into one file with the values that were measured now.
        """
        for file in kind.stored(self._source.path, name):
            unchanged = file.unchanged(self._source.index)
            stored = {row: entry for row, entry in unchanged.items() if row not in measured}
            if not stored:
                continue
            if file.values.dtype.kind not in "iu" or (width and file.values.shape[1] != width):
                raise UsageError(
                    f"the column {name!r} has other values for shards that were not measured now: "
                    f"{file.values.dtype} {list(file.values.shape[1:])}",
                    where=file.path,
                    fix="measure all shards, without --split-parts; or store it under another name: --name mine",
                )
            values = {row: own for row, (own, _) in stored.items()}
            blocks = [own.values if kind is RaggedFile else own for own in values.values()]
            most = max(int(np.max(block, initial=0)) for block in blocks)
            return values, most, {row: maker for row, (_, maker) in stored.items()}
        return {}, 0, {}


def _blocks(blocks: Blocks, get: Callable[[Values], Any], kept: Mapping[int, Any]) -> Iterator[Any]:
    return (kept.get(row) if block is None else get(block) for row, block in enumerate(blocks()))


@dataclass(frozen=True)
class Maker:
    """Maker of columns: the settings and the code that their values depend on.

    Args:
        settings: plain data; with other settings, values are different.
        code: hash of the user's code involved; empty if there is none.
        command: command line that makes the columns again.
        any_code: accept values that were made with the same settings and other code.
    """

    settings: Mapping[str, Any]
    code: str = ""
    command: str = ""
    any_code: bool = False

    def made(self, settings: Mapping[str, Any], code: str) -> bool:
        """Return whether values made with these settings and code are valid for this maker."""
        return dict(settings) == dict(self.settings) and (self.any_code or code == self.code)


@dataclass
class MeasureReport:
    """Results of a measuring.

    Attributes:
        path: path of the data set.
        shards: number of shards to be measured.
        samples: samples in those shards; on ranks other than 0: samples that this rank has measured.
        known: number of samples that had been measured before.
        skipped, failed: numbers of samples.
        shortest, longest, total: of the lengths of the other samples.
        reasons: ``(count, stage, reason, skipped)`` of samples measured now, the most frequent first.
        failures: a few of the failed samples: shard, key, stage and reason as text.
        columns: by the name of another column: its number of values (one for each sample, except in ragged ones), their
            sum, and the largest; ragged columns of rows have no sum.
        written: files of the columns; empty on ranks other than 0.
    """

    path: str
    shards: int = 0
    samples: int = 0
    known: int = 0
    skipped: int = 0
    failed: int = 0
    shortest: int = 0
    longest: int = 0
    total: int = 0
    reasons: tuple[tuple[int, str, str, bool], ...] = ()
    failures: tuple[str, ...] = ()
    columns: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    written: tuple[str, ...] = ()

    @property
    def kept(self) -> int:
        """Number of samples that have a length."""
        return self.samples - self.skipped - self.failed

    def add(self, block: Values) -> None:
        """Count the samples of one shard."""
        flags = block.flags
        kept = block.column(LENGTH)[block.flags == 0]
        if len(kept):
            self.shortest = min(self.shortest, int(kept.min())) if self.kept else int(kept.min())
            self.longest = max(self.longest, int(kept.max()))
        self.samples += len(flags)
        self.skipped += int((flags == SKIPPED).sum())
        self.failed += int((flags == FAILED).sum())
        self.total += int(kept.sum())
        for name, own in block.columns.items():
            if name == LENGTH:
                continue
            column = own.values if isinstance(own, Ragged) else own
            count, total, largest = self.columns.get(name, (0, 0, 0))
            more = int(column.sum()) if column.ndim == 1 or column.shape[1] == 1 else 0
            self.columns[name] = count + len(column), total + more, max(largest, int(column.max(initial=0)))
