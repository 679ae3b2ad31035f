"""Files of the tour through the trainer in ``docs/trainer.md``."""

from __future__ import annotations

import re

from tests.house.docs.pages import DOCS, ROOT

TRAINER = ROOT / "energon_lite" / "trainer"
ROOMS = ("parallel", "optimizer", "checkpointing", "models", "data", "training")
PAGE = DOCS / "trainer.md"
#: The section with the tour, and a file that it names.
_TOUR = re.compile(r"^## A tour\b.*?(?=^## )", re.MULTILINE | re.DOTALL)
_STOP = re.compile(r"`([a-z_]+/[a-z_]+\.py)`")


def stops() -> set[str]:
    """Names of the files in the tour, relative to the trainer's folder."""
    tour = _TOUR.search(PAGE.read_text())
    assert tour is not None, f"{PAGE.name} has no tour"
    return set(_STOP.findall(tour[0]))


def files() -> set[str]:
    """Names of all files of the rooms; ``__init__.py`` only names the contents of other files and is left out."""
    found = (path for room in ROOMS for path in (TRAINER / room).glob("*.py") if path.name != "__init__.py")
    return {str(path.relative_to(TRAINER)) for path in found}
