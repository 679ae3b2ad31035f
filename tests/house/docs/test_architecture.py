"""The page about the architecture says what the code says: rooms, their picture, and doors that are narrow."""

from __future__ import annotations

import re
import sys
from itertools import pairwise

import pytest

from tests.house.docs.pages import DOCS, ROOT, blocks
from tests.house.docs.rooms import rooms, table

PAGE = DOCS / "architecture.md"
TRAINER = ROOT / "energon_lite" / "trainer"
#: Rooms of the tour through the trainer in ``docs/how_the_trainer_works.md``.
TOUR = ("parallel", "optimizer", "checkpointing", "models", "data", "training")


def test_each_room_says_what_it_is() -> None:
    assert [room for room, said in rooms().items() if not said.endswith((".", "?"))] == []


def test_the_tour_through_the_trainer_names_each_file() -> None:
    found = (path for room in TOUR for path in (TRAINER / room).glob("*.py") if path.name != "__init__.py")
    stops = re.findall(r"`([a-z_]+/[a-z_]+\.py)`", (DOCS / "how_the_trainer_works.md").read_text())
    assert sorted({*stops}) == sorted(str(path.relative_to(TRAINER)) for path in found)


def test_the_table_is_what_the_rooms_say() -> None:
    assert table() in PAGE.read_text(), "run tests/house/docs/rooms.py"


def test_the_picture_has_each_room_of_the_contracts() -> None:
    tomllib = pytest.importorskip("tomllib") if sys.version_info >= (3, 11) else pytest.importorskip("tomli")
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = [one for one in document["tool"]["importlinter"]["contracts"] if one["type"] == "layers"]
    names = {
        name.strip(" ()") for one in contracts for line in one["layers"] for name in line.replace("|", ":").split(":")
    } | {path.parent.name for path in (ROOT / "energon_lite" / "extras").glob("*/__init__.py")}
    picture = (DOCS / "figures" / "rooms.svg").read_text()
    assert [name for name in sorted(names) if f">{name}<" not in picture] == [], "run docs/figures/rooms.py"


def test_what_a_newcomer_adds_is_short() -> None:
    """An example of each of these doors has less than 60 lines; the test of the pages runs them."""
    text = PAGE.read_text()
    headings = ("A strategy", "A sample type", "A source", "A column", "A decoder")
    at = [*(text.index(f"### {heading}") for heading in headings), len(text)]
    for first, last in pairwise(at):
        begin, end = text.count("\n", 0, first), text.count("\n", 0, last)
        mine = [block for block in blocks(PAGE) if begin < block.line <= end and block.mark]
        lines = sum(bool(line.strip()) for block in mine for line in block.code.splitlines())
        assert mine and lines < 60, lines
