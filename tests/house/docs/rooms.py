"""List of the rooms of the library, each with the first paragraph of its docstring.

python -m tests.house.docs.rooms      # writes it into docs/architecture.md
"""

from __future__ import annotations

import ast
from pathlib import Path

from tests.house.docs.pages import DOCS, ROOT

PACKAGE = ROOT / "energon_lite"
BEGIN = "<!-- made by tests/house/docs/rooms.py -->\n"


def rooms() -> dict[str, str]:
    """Return the first paragraph of each room's docstring, by the room's path inside the package: ``storage/tar``.

    Rooms of the core come first, those of the trainer next, extras last; folders inside an extra are left out.
    """
    folders = [path.parent.relative_to(PACKAGE) for path in PACKAGE.rglob("__init__.py") if path.parent != PACKAGE]
    shown = [folder for folder in folders if folder.parts[0] != "extras" or len(folder.parts) <= 2]
    shown.sort(key=lambda folder: (folder.parts[0] == "extras", folder.parts[0] == "trainer", folder.parts))
    return {str(folder): _paragraph(PACKAGE / folder) for folder in shown}


def table() -> str:
    """Return the list in ``docs/architecture.md``: outer rooms and extras, each with its description."""
    shown = {room: said for room, said in rooms().items() if "/" not in room or room.startswith("extras/")}
    return "\n".join(f"* `{room}`: {said.replace('``', '`')}" for room, said in shown.items())


def _paragraph(folder: Path) -> str:
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    return " ".join(docstring.split("\n\n")[0].split())


def _write_table() -> None:
    page = DOCS / "architecture.md"
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{table()}\n\n{rest.lstrip().partition(chr(10) * 2)[2]}")


if __name__ == "__main__":
    _write_table()
