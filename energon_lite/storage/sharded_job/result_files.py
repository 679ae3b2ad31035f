"""A file for the result of each unit of work, so that nothing is done twice.

A result file appears whole, when its unit is done. It is used only if its checksum is right and it was made of the
inputs as they are now. So it needs no flush to the disk: one that a power cut has damaged is one that is not there.
Ranks hand their results to rank 0 this way, also the news that a unit could not be done.

Format: magic ``"ENRGLRES"``, u32 version (1), u32 crc32 of all that follows, u64 length of the table, table (JSON: the
unit's name, its inputs, type and shape of each array, and what the job adds), the bytes of the arrays.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import struct
import zlib
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from energon_lite.errors import DataIndexError
from energon_lite.storage.files.atomic_file import write_bytes
from energon_lite.storage.files.open_file import open_file

__all__ = ["Arrays", "ResultFiles", "Table", "UnitKind"]

U = TypeVar("U", bound=Hashable)
R = TypeVar("R")
Table = Mapping[str, Any]
Arrays = Mapping[str, NDArray[Any]]

_HEAD, _LENGTH = struct.Struct("<8sII"), struct.Struct("<Q")
_MAGIC, _VERSION = b"ENRGLRES", 1


class UnitKind(ABC, Generic[U, R]):
    """What the units of a job are, and how their results are kept. Units are hashable; both can be pickled."""

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

    @abstractmethod
    def pack(self, result: R) -> tuple[dict[str, Any], Arrays]:
        """A result as plain data, which is kept in memory for each unit, and arrays, which are not."""

    @abstractmethod
    def unpack(self, table: Table, arrays: Arrays) -> R:
        """The result that was packed so."""


class ResultFiles(Generic[U, R]):
    """The result files of a job.

    Args:
        folder: where they are.
        kind: of the units.

    Example:
        >>> files.write("a.tar", kind.inputs("a.tar"), scan)
        >>> files.read("a.tar") == scan
        True
    """

    def __init__(self, folder: str, kind: UnitKind[U, R]):
        self.folder, self.kind = folder, kind
        self._names: dict[U, str] = {}

    def path(self, unit: U) -> str:
        """The file of a unit: a readable beginning, and a hash that tells equal beginnings apart."""
        if unit not in self._names:
            name = self.kind.name(unit)
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
        table, arrays = self.kind.pack(result)
        self._write(unit, inputs, table, arrays)
        return table

    def write_failure(self, unit: U) -> None:
        """Let other ranks know that the unit cannot be done with its inputs as they are now."""
        self._write(unit, self.kind.inputs(unit), None, {})

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
                f"the result of {self.kind.name(unit)} was damaged or removed since it was written",
                where=self.path(unit),
                fix="run again: what is done otherwise is kept",
            )
        return self.kind.unpack(head["result"], arrays)

    def remove(self) -> None:
        """Remove all of them, with the folder."""
        if os.path.islink(self.folder):
            os.unlink(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _write(self, unit: U, inputs: Any, table: Table | None, arrays: Arrays) -> None:
        kinds = {name: [array.dtype.str, list(array.shape)] for name, array in arrays.items()}
        head = {"unit": self.kind.name(unit), "inputs": inputs, "arrays": kinds, "result": table}
        text = json.dumps(head).encode()
        body = b"".join([_LENGTH.pack(len(text)), text, *(array.tobytes() for array in arrays.values())])
        self.make_folder()
        write_bytes(self.path(unit), _HEAD.pack(_MAGIC, _VERSION, zlib.crc32(body)), body, flush=False)

    def _read(self, unit: U) -> tuple[Table, Arrays]:
        """What is in the file of a unit; nothing if it is not there, damaged, or of other inputs."""
        try:
            with open(self.path(unit), "rb", opener=open_file) as file:
                data = file.read()
        except (FileNotFoundError, NotADirectoryError):
            return {}, {}
        body = memoryview(data)[_HEAD.size :]
        if len(body) < _LENGTH.size or data[: _HEAD.size] != _HEAD.pack(_MAGIC, _VERSION, zlib.crc32(body)):
            return {}, {}
        place = _LENGTH.size + _LENGTH.unpack_from(body)[0]
        head = json.loads(bytes(body[_LENGTH.size : place]))
        if head["unit"] != self.kind.name(unit) or not self.kind.belongs(unit, head["inputs"]):
            return {}, {}
        arrays = {}
        for name, (dtype, shape) in head["arrays"].items():
            count = math.prod(shape)
            arrays[name] = np.frombuffer(body, dtype=dtype, count=count, offset=place).reshape(shape)
            place += arrays[name].nbytes
        return head, arrays
