"""The rooms of the library, and what each says of itself.

python tests/docs/rooms.py      # writes it into docs/architecture.md
"""

from __future__ import annotations

import ast
from pathlib import Path

from pages import DOCS, ROOT

PACKAGE = ROOT / "energon_lite"


def rooms() -> dict[str, str]:
    """The first paragraph of the docstring of each room, by its path inside of the package, ``storage/tar``."""
    folders = sorted(path.parent for path in PACKAGE.rglob("__init__.py") if path.parent != PACKAGE)
    return {str(folder.relative_to(PACKAGE)): _paragraph(folder) for folder in folders}


def table() -> str:
    """The table of rooms in ``docs/architecture.md``."""
    lines = [f"| `{room}` | {said.replace('``', '`')} |" for room, said in rooms().items()]
    return "\n".join(["| room | what it is |", "|---|---|", *lines])


def _paragraph(folder: Path) -> str:
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    return " ".join(docstring.split("\n\n")[0].split())


def _write_table() -> None:
    page = DOCS / "architecture.md"
    before, _, rest = page.read_text().partition("| room | what it is |\n")
    page.write_text(f"{before}{table()}\n\n{rest.partition(chr(10) * 2)[2]}")


if __name__ == "__main__":
    _write_table()
