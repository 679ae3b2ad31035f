"""The columns that a measuring writes: what stands in their place, and the values that come there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon_lite.errors import UsageError
from energon_lite.loading.measuring.report import Maker
from energon_lite.storage.index.column_file import ColumnFile, write_column_file
from energon_lite.storage.index.columns import LENGTH, SKIP, column_path, stored_columns, writable_folder
from energon_lite.storage.read.webdataset import WebdatasetSource

__all__ = ["Block", "MeasuredColumns"]

#: Lengths and flags of the samples of a shard.
Block = tuple[NDArray[Any], NDArray[Any]]


class MeasuredColumns:
    """The columns ``length`` and ``skip`` of a data set, made by one maker.

    Args:
        source: the whole data set.
        maker: by what the columns are made.
        name: put before their names, with a dot, so that several measurings stand side by side.
        flags: False: there is no column ``skip``.

    Attributes:
        paths: their files.
        results: the folder for the results of the work, until they are written.

    Raises:
        UsageError: a column of another maker, in a folder that cannot be written, would go before these.
    """

    def __init__(self, source: WebdatasetSource, maker: Maker, name: str = "", *, flags: bool = True):
        prefix = f"{name}." if name else ""
        self._source, self._maker = source, maker
        self._folder = writable_folder(source.path)
        # The lengths last: a run that is killed between the two is not done, and finds its results.
        self._names = [prefix + SKIP, prefix + LENGTH] if flags else [prefix + LENGTH]
        self.paths = tuple(column_path(self._folder, one) for one in self._names)
        self.results = os.path.join(self._folder, f"{prefix}{LENGTH}.results")
        self._check_not_hidden()

    def _check_not_hidden(self) -> None:
        """Columns beside the data go before those in the user's cache, so none of another maker may stand there."""
        for name in self._names:
            for file in stored_columns(self._source.path, name):
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
        return self._maker.made(file.maker, file.code)

    def known(self) -> dict[int, Block]:
        """The values of unchanged shards, by row, from the columns that are there."""
        found: list[dict[int, NDArray[Any]]] = []
        for name in self._names:
            made = [file for file in stored_columns(self._source.path, name) if self._is_ours(file)]
            found.append(made[0].unchanged(self._source.index) if made else {})
        flags, lengths = found[0], found[-1]
        if len(self._names) == 1:
            flags = {row: np.zeros(len(values), dtype=np.uint8) for row, values in lengths.items()}
        return {row: (lengths[row], flags[row]) for row in lengths.keys() & flags.keys()}

    def up_to_date(self) -> bool:
        """Whether they are there, and by this very maker."""
        present = [ColumnFile(path) for path in self.paths if os.path.exists(path)]
        return len(present) == len(self.paths) and all(
            file.fits(self._source.index) and self._is_ours(file) and file.code == self._maker.code for file in present
        )

    def write(self, blocks: Callable[[], Iterable[Block | None]], longest: int) -> None:
        """Write them.

        Args:
            blocks: gives for each shard its values, or None: they are not known. It is called for each column.
            longest: the largest length of all.
        """
        for path, name in zip(self.paths, self._names, strict=True):
            of_lengths = name.endswith(LENGTH)
            write_column_file(
                path,
                name,
                self._source.index,
                (None if block is None else block[0 if of_lengths else 1] for block in blocks()),
                dtype="|u1" if not of_lengths else "<i4" if longest < 2**31 else "<i8",
                maker=self._maker.settings,
                code=self._maker.code,
                command=self._maker.command,
            )
