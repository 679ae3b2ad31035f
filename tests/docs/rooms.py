"""Table of the rooms of the library, each with the first paragraph of its docstring.

python tests/docs/rooms.py      # writes it into docs/architecture.md
"""

from __future__ import annotations

import ast
from pathlib import Path

from pages import DOCS, ROOT

PACKAGE = ROOT / "energon_lite"
HEAD = ("| room | contents |", "|---|---|")


def rooms() -> dict[str, str]:
    """Return the first paragraph of each room's docstring, by the room's path inside the package: ``storage/tar``.

    Rooms of the core come first, those of the trainer next, extras last; folders inside an extra are left out.
    """
    folders = [path.parent.relative_to(PACKAGE) for path in PACKAGE.rglob("__init__.py") if path.parent != PACKAGE]
    shown = [folder for folder in folders if folder.parts[0] != "extras" or len(folder.parts) <= 2]
    shown.sort(key=lambda folder: (folder.parts[0] == "extras", folder.parts[0] == "trainer", folder.parts))
    return {str(folder): _paragraph(PACKAGE / folder) for folder in shown}


def table() -> str:
    """Return the table of rooms in ``docs/architecture.md``."""
    lines = [f"| `{room}` | {said.replace('``', '`')} |" for room, said in rooms().items()]
    return "\n".join([*HEAD, *lines])


def _paragraph(folder: Path) -> str:
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    return " ".join(docstring.split("\n\n")[0].split())


def _write_table() -> None:
    page = DOCS / "architecture.md"
    before, _, rest = page.read_text().partition(HEAD[0] + "\n")
    page.write_text(f"{before}{table()}\n\n{rest.partition(chr(10) * 2)[2]}")


if __name__ == "__main__":
    _write_table()
