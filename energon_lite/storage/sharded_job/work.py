"""Units of work, and a file for the result of each, so that nothing is done twice.

A result file appears whole, when its unit is done. It is used only if its checksum is right and it was made of the
inputs as they are now. So it needs no flush to the disk: one that a power cut has damaged is one that is not there.
Ranks hand their results to rank 0 this way, also the news that a unit could not be done.

It is an array file (:mod:`energon_lite.storage.files.array_file`): the arrays of the result, and beside them the unit's
name, its inputs, and what else the result says.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, Generic, TypeVar

from numpy.typing import NDArray

from energon_lite.errors import DataIndexError
from energon_lite.storage.files.array_file import FileKind, read_arrays, write_arrays

__all__ = ["Arrays", "Table", "Work"]

U = TypeVar("U", bound=Hashable)
R = TypeVar("R")
Table = Mapping[str, Any]
Arrays = Mapping[str, NDArray[Any]]

_RESULT_FILE = FileKind(b"ENRGLRES", 2, "result of a unit of work", "remove the file, and run again")


class Work(ABC, Generic[U, R]):
    """What is done with each unit of a job, what its result depends on, and the files in which the results are kept.

    Units are hashable; they and the work itself can be pickled.

    Args:
        folder: where the result files are.

    Example:
        >>> work.write("a.tar", work.inputs("a.tar"), work.do("a.tar"))
        >>> work.read("a.tar")
        ShardScan(name='a.tar', ...)
    """

    def __init__(self, folder: str):
        self.folder = folder
        self._names: dict[U, str] = {}

    # -- what the units are -----------------------------------------------------------------------------------------

    @abstractmethod
    def name(self, unit: U) -> str:
        """What a unit is called in messages; other units have other names."""

    @abstractmethod
    def inputs(self, unit: U) -> Any:
        """What the result of a unit depends on, as it is now, in plain data: with others, the unit is done again."""

    def belongs(self, unit: U, inputs: Any) -> bool:
        """Whether a result that was made of these inputs is that of the present ones."""
        return bool(inputs == self.inputs(unit))

    def where(self, unit: U) -> str:
        """The place to be named in an error."""
        return self.name(unit)

    def do(self, unit: U) -> R:
        """The result of a unit. Not asked for where the job is given who does its units."""
        raise NotImplementedError

    @abstractmethod
    def pack(self, result: R) -> tuple[dict[str, Any], Arrays]:
        """A result as plain data, which is kept in memory for each unit, and arrays, which are not."""

    @abstractmethod
    def unpack(self, table: Table, arrays: Arrays) -> R:
        """The result that was packed so."""

    # -- their results ----------------------------------------------------------------------------------------------

    def path(self, unit: U) -> str:
        """The file of a unit: a readable beginning, and a hash that tells equal beginnings apart."""
        if unit not in self._names:
            name = self.name(unit)
            digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:16]
            self._names[unit] = f"{os.path.basename(name)[:60]}-{digest}.result"
        return os.path.join(self.folder, self._names[unit])

    def make_folder(self) -> None:
        """Have the folder. What is in it is written and removed, so a link that came with the data, to a folder of
        somebody else's, must not stand there."""
        if os.path.islink(self.folder):
            os.unlink(self.folder)
        os.makedirs(self.folder, exist_ok=True)

    def write(self, unit: U, inputs: Any, result: R) -> Table:
        """Keep a result, which was made of these inputs; returns its table."""
        table, arrays = self.pack(result)
        self._write(unit, inputs, table, arrays)
        return table

    def write_failure(self, unit: U) -> None:
        """Let other ranks know that the unit cannot be done with its inputs as they are now."""
        self._write(unit, self.inputs(unit), None, {})

    def find(self, units: Iterable[U]) -> dict[U, Table | None]:
        """The tables of those units that have a result of the present inputs; None: they could not be done."""
        try:
            there = set(os.listdir(self.folder))
        except (FileNotFoundError, NotADirectoryError):
            return {}
        wanted = (unit for unit in units if os.path.basename(self.path(unit)) in there)
        found = {unit: self._read(unit) for unit in wanted}
        return {unit: head["result"] for unit, (head, _) in found.items() if head}

    def read(self, unit: U) -> R:
        """The result of a unit that :meth:`find` has found.

        Raises:
            DataIndexError: it has been damaged or removed since.
        """
        head, arrays = self._read(unit)
        if not head or head["result"] is None:
            raise DataIndexError(
                f"the result of {self.name(unit)} was damaged or removed since it was written",
                where=self.path(unit),
                fix="run again: what is done otherwise is kept",
            )
        return self.unpack(head["result"], arrays)

    def remove(self) -> None:
        """Remove all of them, with the folder."""
        if os.path.islink(self.folder):
            os.unlink(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _write(self, unit: U, inputs: Any, table: Table | None, arrays: Arrays) -> None:
        head = {"unit": self.name(unit), "inputs": inputs, "result": table}
        self.make_folder()
        write_arrays(self.path(unit), _RESULT_FILE, arrays, head, flush=False)

    def _read(self, unit: U) -> tuple[Table, Arrays]:
        """What is in the file of a unit; nothing if it is not there, damaged, or of other inputs."""
        try:
            arrays, head = read_arrays(self.path(unit), _RESULT_FILE)
        except (FileNotFoundError, NotADirectoryError, DataIndexError):
            return {}, {}
        is_ours = head["unit"] == self.name(unit) and self.belongs(unit, head["inputs"])
        return (head, arrays) if is_ours else ({}, {})
