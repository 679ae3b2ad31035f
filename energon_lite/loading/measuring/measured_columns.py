"""The columns that a measuring writes: what stands in their place, and the values that come there."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from functools import partial
from glob import glob
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon_lite.errors import DataIndexError, UsageError
from energon_lite.loading.measuring.report import Maker
from energon_lite.loading.measuring.values import Shapes, Values
from energon_lite.storage.files.atomic_file import remove_if_there
from energon_lite.storage.index.column_file import (
    ColumnFile,
    Made,
    Ragged,
    RaggedFile,
    write_column_file,
    write_ragged_file,
)
from energon_lite.storage.index.columns import LENGTH, SKIP, column_path, stored_columns, writable_folder
from energon_lite.storage.read.webdataset import WebdatasetSource

__all__ = ["Blocks", "MeasuredColumns"]

#: Gives for each shard what was measured, or None: it is not known.
Blocks = Callable[[], Iterable[Values | None]]


class MeasuredColumns:
    """The columns of a data set that are made by one maker: ``length``, ``skip``, and others by name.

    Args:
        source: the whole data set.
        maker: by what the columns are made.
        name: put before their names, with a dot, so that several measurings stand side by side.
        flags: False: there is no column ``skip``.
        lengths: False: there is no column ``length``.

    Attributes:
        results: the folder for the results of the work, until they are written.

    Raises:
        UsageError: a column of another maker, in a folder that cannot be written, would go before these.
    """

    def __init__(
        self, source: WebdatasetSource, maker: Maker, name: str = "", *, flags: bool = True, lengths: bool = True
    ):
        self._prefix = f"{name}." if name else ""
        self._source = source
        self._maker = maker
        self._folder = writable_folder(source.path)
        # The lengths last: a run that is killed between the two is not done, and finds its results.
        self._fixed = [self._prefix + one for one, wanted in ((SKIP, flags), (LENGTH, lengths)) if wanted]
        self.results = os.path.join(self._folder, f"{self._prefix}{LENGTH if lengths else 'columns'}.results")
        for one in self._fixed:
            self._check_not_hidden(one, ColumnFile)

    def paths(self, shapes: Shapes) -> tuple[str, ...]:
        """Their files."""
        others = [self._path(name, RaggedFile if width else ColumnFile) for name, width in sorted(shapes.items())]
        return *others, *(column_path(self._folder, one) for one in self._fixed)

    def _path(self, name: str, kind: type[ColumnFile]) -> str:
        return column_path(self._folder, self._prefix + name, kind.suffix)

    def _check_not_hidden(self, name: str, kind: type[ColumnFile]) -> None:
        """Columns beside the data go before those in the user's cache, so none of another maker may stand there."""
        for file in stored_columns(self._source.path, name, kind):
            if os.path.dirname(file.path) == self._folder:
                break
            if file.fits(self._source.index) and not self._is_ours(file):
                raise UsageError(
                    f"the data set has a column {name!r} already, made by something else, and its folder cannot be "
                    "written; what is measured now would stand behind it",
                    where=file.path,
                    fix="store it under another name: --name mine",
                )

    def _is_ours(self, file: ColumnFile) -> bool:
        """Return whether this maker has measured some of its shards."""
        return any(self._maker.made(*one) for one in file.makers)

    def _unchanged(self, file: ColumnFile) -> dict[int, Any]:
        """What this maker has measured."""
        found = file.unchanged(self._source.index)
        return {row: values for row, (values, made) in found.items() if self._maker.made(*made)}

    def known(self) -> dict[int, Values]:
        """The values of unchanged shards, by row, from the columns that are there."""
        index = self._source.index
        fixed: list[dict[int, NDArray[Any]]] = []
        for name in self._fixed:
            made = [file for file in stored_columns(self._source.path, name) if self._is_ours(file)]
            fixed.append(self._unchanged(made[0]) if made else {})
        columns = {name: self._unchanged(file) for name, file in self._others(ColumnFile).items()}
        ragged = {name: self._unchanged(file) for name, file in self._others(RaggedFile).items()}
        known = [set(found) for found in fixed]
        known += [set(one) for one in columns.values()] + [set(one) for one in ragged.values()]
        by_name = dict(zip(self._fixed, fixed, strict=True))
        values = {}
        for row in set.intersection(*known) if known else ():
            one = Values.zeros(int(index.shards[row + 1, 3] - index.shards[row, 3]))
            one.lengths = by_name.get(self._prefix + LENGTH, {}).get(row, one.lengths)
            one.flags = by_name.get(self._prefix + SKIP, {}).get(row, one.flags)
            one.columns = {name: found[row] for name, found in columns.items()}
            one.ragged = {name: found[row] for name, found in ragged.items()}
            values[row] = one
        return values

    def _others(self, kind: type[ColumnFile], *, any_code: bool = False) -> dict[str, ColumnFile]:
        """Files of this maker, by name of the column, but for lengths and flags; ``any_code``: of no other one, too,
        whatever its code was."""
        found = {}
        for file_name in sorted(glob(f"{self._prefix}*{kind.suffix}", root_dir=self._folder)):
            name = file_name.removesuffix(kind.suffix).removeprefix(self._prefix)
            if name in (LENGTH, SKIP) or "." in name:  # such as those of another --name
                continue
            try:
                file = kind(os.path.join(self._folder, file_name))
            except (DataIndexError, OSError):
                continue
            of_all = [dict(settings) == dict(self._maker.settings) for settings, _ in file.makers]
            if all(of_all) if any_code else self._is_ours(file):
                found[name] = file
        return found

    def up_to_date(self, shapes: Shapes) -> bool:
        """Return whether they are there, and by this very maker."""
        paths = self.paths(shapes)
        present = [_kind(path)(path) for path in paths if os.path.exists(path)]
        return len(present) == len(paths) and all(
            file.fits(self._source.index) and self._is_ours(file) and file.code == self._maker.code for file in present
        )

    def write(self, blocks: Blocks, largest: dict[str, int], shapes: Shapes, measured: Container[int] = ()) -> None:
        """Write them, and remove those that this maker wrote formerly and does no more. What is known of other shards
        stays, by whatever it was measured.

        Args:
            blocks: what was measured; it is called for each column.
            largest: the largest value of each column, lengths included.
            shapes: the columns beside lengths and flags.
            measured: rows of the shards of which ``blocks`` knows something.
        """
        for name, width in shapes.items():
            self._check_not_hidden(self._prefix + name, RaggedFile if width else ColumnFile)
        index = self._source.index
        made = self._made_by()
        for name, width in sorted(shapes.items()):
            kind = RaggedFile if width else ColumnFile
            kept, most, made["others"] = self._kept(self._prefix + name, kind, abs(width), measured)
            path = self._path(name, kind)
            dtype = _dtype(max(largest.get(name, 0), most))
            if width:
                rows = partial(_rows, blocks, name, abs(width), kept)
                write_ragged_file(path, self._prefix + name, index, rows, width=abs(width), dtype=dtype, **made)
            else:
                column = (kept.get(row) if one is None else one.column(name) for row, one in enumerate(blocks()))
                write_column_file(path, self._prefix + name, index, column, dtype=dtype, **made)
        for name in self._fixed:
            what = "lengths" if name.endswith(LENGTH) else "flags"
            kept, most, made["others"] = self._kept(name, ColumnFile, 0, measured)
            column = (kept.get(row) if one is None else getattr(one, what) for row, one in enumerate(blocks()))
            dtype = _dtype(max(largest.get(LENGTH, 0), most)) if what == "lengths" else "|u1"
            write_column_file(column_path(self._folder, name), name, index, column, dtype=dtype, **made)
        for kind in (ColumnFile, RaggedFile):
            for name, file in self._others(kind, any_code=True).items():
                if name not in shapes or bool(shapes[name]) != (kind is RaggedFile):
                    remove_if_there(file.path)

    def _kept(
        self, name: str, kind: type[ColumnFile], width: int, measured: Container[int]
    ) -> tuple[dict[int, Any], int, dict[int, Made]]:
        """Of shards that were not measured now the values in the file that is there, the largest of them, and by what
        they were measured.

        Raises:
            UsageError: they do not fit into one file with those that were measured now.
        """
        for file in stored_columns(self._source.path, name, kind):
            found = {row: one for row, one in file.unchanged(self._source.index).items() if row not in measured}
            if not found:
                continue
            if file.values.dtype.kind not in "iu" or (width and file.values.shape[1] != width):
                raise UsageError(
                    f"the column {name!r} has other values for shards that were not measured now: "
                    f"{file.values.dtype} {list(file.values.shape[1:])}",
                    where=file.path,
                    fix="measure all shards, without --split-parts; or store it under another name: --name mine",
                )
            blocks = [values.values if kind is RaggedFile else values for values, _ in found.values()]
            most = max(int(np.max(block, initial=0)) for block in blocks)
            return {row: one[0] for row, one in found.items()}, most, {row: one[1] for row, one in found.items()}
        return {}, 0, {}

    def _made_by(self) -> dict[str, Any]:
        return {"maker": self._maker.settings, "code": self._maker.code, "command": self._maker.command}


def _rows(blocks: Blocks, name: str, width: int, kept: Mapping[int, Ragged]) -> Iterator[Ragged | None]:
    return (kept.get(row) if one is None else one.rows(name, width) for row, one in enumerate(blocks()))


def _kind(path: str) -> type[ColumnFile]:
    return RaggedFile if path.endswith(RaggedFile.suffix) else ColumnFile


def _dtype(largest: int) -> str:
    return "<i4" if largest < 2**31 else "<i8"
