"""The tour through the trainer: the files it stops at, and how many lines each has.

python tests/docs/tour.py      # writes these numbers into docs/trainer.md
"""

from __future__ import annotations

import re

from pages import DOCS, ROOT

TRAINER = ROOT / "energon_lite" / "trainer"
ROOMS = ("parallel", "optimizer", "checkpointing", "models", "data", "training")
PAGE = DOCS / "trainer.md"
#: A stop: its number, the file, and its lines, if they are there.
_STOP = re.compile(r"^(\d+\. `([a-z_]+/[a-z_]+\.py)`)(?: \((\d+)\))?:", re.MULTILINE)
_TOTAL = re.compile(r"(All stops together: )`?[\d,a-z]+`?( lines)")


def stops() -> dict[str, int]:
    """The files at which the tour stops, in order, with the lines that it says they have."""
    return {file: int(lines or 0) for _, file, lines in _STOP.findall(PAGE.read_text())}


def files() -> dict[str, int]:
    """All files of the rooms, with their lines. (What has names of other files only is no stop.)"""
    found = sorted(path for room in ROOMS for path in (TRAINER / room).glob("*.py") if path.name != "__init__.py")
    return {str(path.relative_to(TRAINER)): len(path.read_text().splitlines()) for path in found}


def _write_lines() -> None:
    lines = files()
    text = _STOP.sub(lambda found: f"{found[1]} ({lines[found[2]]}):", PAGE.read_text())
    PAGE.write_text(_TOTAL.sub(lambda found: f"{found[1]}{sum(lines.values()):,}{found[2]}", text))


if __name__ == "__main__":
    _write_lines()
