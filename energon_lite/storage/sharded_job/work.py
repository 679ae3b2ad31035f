"""Units of work, with a file for the result of each, so that no unit is done twice.

A result file is replaced atomically when its unit is done. It is used only if its checksum is right and its inputs are
the current ones. So it needs no flush to the disk: a file that a power failure has damaged counts as missing. Ranks
send their results, and failures of units, to rank 0 by these files.

It is an array file (:mod:`energon_lite.storage.files.array_file`) with the arrays of the result, the unit's name, its
inputs, and the plain data of the result.
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

U = TypeVar("U", bound=Hashable)
R = TypeVar("R")
Table = Mapping[str, Any]
Arrays = Mapping[str, NDArray[Any]]

_RESULT_FILE = FileKind(b"ENRGLRES", 2, "result of a unit of work", "remove the file, and run again")


class Work(ABC, Generic[U, R]):
    """The work on each unit of a job, the inputs of its result, and the files in which results are kept.

    Units are hashable; they and the work itself can be pickled.

    Args:
        folder: the folder of the result files.

    Example:
        >>> work.write("a.tar", work.inputs("a.tar"), work.do("a.tar"))
        >>> work.read("a.tar")
        ShardScan(name='a.tar', ...)
    """

    def __init__(self, folder: str):
        self.folder = folder
        self._names: dict[U, str] = {}

    # -- units ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def name(self, unit: U) -> str:
        """Return the name of a unit in messages; it is unique."""

    @abstractmethod
    def inputs(self, unit: U) -> Any:
        """Return the current inputs of a unit's result as plain data; if they change, the unit is done again."""

    def belongs(self, unit: U, inputs: Any) -> bool:
        """Return True if a result of these inputs is still valid."""
        return bool(inputs == self.inputs(unit))

    def where(self, unit: U) -> str:
        """Return the place that an error of the unit names."""
        return self.name(unit)

    def do(self, unit: U) -> R:
        """Compute the result of a unit. Not called if the job is given a runner of units."""
        raise NotImplementedError

    @abstractmethod
    def pack(self, result: R) -> tuple[dict[str, Any], Arrays]:
        """Divide a result into plain data, which is kept in memory for each unit, and arrays, which are not."""

    @abstractmethod
    def unpack(self, table: Table, arrays: Arrays) -> R:
        """Make the result of its packed form."""

    # -- results ----------------------------------------------------------------------------------------------------

    def path(self, unit: U) -> str:
        """Return the result file of a unit: its name is a readable beginning and a hash of the unit's name."""
        if unit not in self._names:
            name = self.name(unit)
            digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:16]
            self._names[unit] = f"{os.path.basename(name)[:60]}-{digest}.result"
        return os.path.join(self.folder, self._names[unit])

    def make_folder(self) -> None:
        """Make the folder. Files in it are written and removed, so a link to another user's folder, which may have come
        with the data, is removed first."""
        if os.path.islink(self.folder):
            os.unlink(self.folder)
        os.makedirs(self.folder, exist_ok=True)

    def write(self, unit: U, inputs: Any, result: R) -> Table:
        """Keep a result of these inputs; return its table."""
        table, arrays = self.pack(result)
        self._write(unit, inputs, table, arrays)
        return table

    def write_failure(self, unit: U) -> None:
        """Report to other ranks that the unit cannot be done with its current inputs."""
        self._write(unit, self.inputs(unit), None, {})

    def find(self, units: Iterable[U]) -> dict[U, Table | None]:
        """Return the tables of the units that have a result of the current inputs; None: they could not be done."""
        try:
            there = set(os.listdir(self.folder))
        except (FileNotFoundError, NotADirectoryError):
            return {}
        wanted = (unit for unit in units if os.path.basename(self.path(unit)) in there)
        contents = {unit: self._read(unit) for unit in wanted}
        return {unit: head["result"] for unit, (head, _) in contents.items() if head}

    def read(self, unit: U) -> R:
        """Return the result of a unit that :meth:`find` has returned.

        Raises:
            DataIndexError: the file has been damaged or removed since.
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
        """Remove all result files, with the folder."""
        if os.path.islink(self.folder):
            os.unlink(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _write(self, unit: U, inputs: Any, table: Table | None, arrays: Arrays) -> None:
        head = {"unit": self.name(unit), "inputs": inputs, "result": table}
        self.make_folder()
        write_arrays(self.path(unit), _RESULT_FILE, arrays, head, flush=False)

    def _read(self, unit: U) -> tuple[Table, Arrays]:
        """The contents of a unit's file; empty if it is missing, damaged, or of other inputs."""
        try:
            arrays, head = read_arrays(self.path(unit), _RESULT_FILE)
        except (FileNotFoundError, NotADirectoryError, DataIndexError):
            return {}, {}
        is_ours = head["unit"] == self.name(unit) and self.belongs(unit, head["inputs"])
        return (head, arrays) if is_ours else ({}, {})
