"""Files of the tour through the trainer in ``docs/how_the_trainer_works.md``."""

from __future__ import annotations

import re

from tests.house.docs.pages import DOCS, ROOT

TRAINER = ROOT / "energon_lite" / "trainer"
ROOMS = ("parallel", "optimizer", "checkpointing", "models", "data", "training")
PAGE = DOCS / "how_the_trainer_works.md"
#: A file that the page names.
_STOP = re.compile(r"`([a-z_]+/[a-z_]+\.py)`")


def stops() -> set[str]:
    """Names of the files in the tour, relative to the trainer's folder."""
    return set(_STOP.findall(PAGE.read_text()))


def files() -> set[str]:
    """Names of all files of the rooms; ``__init__.py`` only names the contents of other files and is left out."""
    found = (path for room in ROOMS for path in (TRAINER / room).glob("*.py") if path.name != "__init__.py")
    return {str(path.relative_to(TRAINER)) for path in found}
