"""Text that comes with Python: the source of its standard library, in pieces of a few hundred bytes."""

from __future__ import annotations

import sys
import sysconfig
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

#: A piece ends with the line that takes it over this many characters.
PIECE = 300
#: Largest number of pieces of a module, so that long ones do not dominate.
PIECES_PER_MODULE = 40
#: One module in this many is held out.
HELD_OUT = 6


@dataclass(frozen=True)
class Piece:
    """Some neighbouring lines of a module.

    Args:
        key: its name in the data set, made of the module's name and the piece's number.
        text: the lines.
    """

    key: str
    text: str


def library_modules() -> list[Path]:
    """The files of the standard library's public top-level modules, sorted by name.

    Packages and private modules are left out: among those are the ones that differ from machine to machine.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    names = (name for name in sys.stdlib_module_names if not name.startswith("_"))
    return sorted(path for path in (folder / f"{name}.py" for name in names) if path.is_file())


def hold_out(modules: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Divide modules into (train, val). Whole modules, so that no piece of val has a neighbour in train."""
    val = list(modules[HELD_OUT - 1 :: HELD_OUT])
    return [module for module in modules if module not in val], val


def cut(modules: Sequence[Path], *, size: int = PIECE, most: int = PIECES_PER_MODULE) -> Iterator[Piece]:
    """The pieces of some modules.

    Args:
        modules: files of Python source.
        size: a piece ends with the line that takes it over this many characters.
        most: largest number of pieces of a module, from its start.
    """
    for module in modules:
        # `tokenize.open` obeys the coding that a source file declares, and makes every line end a plain newline.
        with tokenize.open(module) as stream:
            for number, text in enumerate(islice(_join_lines(stream, size), most)):
                yield Piece(f"{module.stem}-{number:03d}", text)


def _join_lines(lines: Iterator[str], size: int) -> Iterator[str]:
    text = ""
    for line in lines:
        text += line
        if len(text) > size:
            yield text
            text = ""
    if text.strip():
        yield text
