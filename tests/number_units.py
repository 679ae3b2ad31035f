"""A small job: the unit n reads the number in the file ``n``, and its result is the square. No test in it, so that
helper processes import it quickly."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon_lite.errors import DatasetError
from energon_lite.storage.sharded_work import Table, Work


class Squares(Work[int, int]):
    """The work on a number appends a line to the file ``log`` of the folder ``root``."""

    def __init__(self, root: str):
        super().__init__(os.path.join(root, "results"))
        self.root = root

    def name(self, unit: int) -> str:
        return f"number {unit}"

    def inputs(self, unit: int) -> str:
        return Path(self.root, str(unit)).read_text()

    def do(self, unit: int) -> int:
        with open(os.path.join(self.root, "log"), "a") as log:
            log.write(f"{unit}\n")
        text = Path(self.root, str(unit)).read_text()
        if text == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if text == "interrupt":
            raise KeyboardInterrupt
        if not text.isdecimal():
            raise DatasetError(f"{text!r} is no number", where=str(unit))
        return int(text) ** 2

    def pack(self, result: int) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        return {"digits": len(str(result))}, {"square": np.array([result])}

    def unpack(self, table: Table, arrays: dict[str, NDArray[Any]]) -> int:
        assert table["digits"] == len(str(arrays["square"][0]))
        return int(arrays["square"][0])


def write_inputs(root: Path, texts: list[str]) -> None:
    for unit, text in enumerate(texts):
        (root / str(unit)).write_text(text)


def done(root: Path) -> list[int]:
    """The units on which work was begun since this was asked last."""
    log = root / "log"
    found = [int(line) for line in log.read_text().split()] if log.exists() else []
    log.unlink(missing_ok=True)
    return found
