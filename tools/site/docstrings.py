"""Roles in docstrings, as ``:class:`~energon_lite.Batch```, made links of the reference or code, for griffe."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe
from reference import FOLDER, ROLE, listed


class Roles(griffe.Extension):
    """Makes links of roles that name something of the reference, and code of all others."""

    def __init__(self) -> None:
        super().__init__()
        pages = [listed(path.read_text()) for path in sorted(Path(FOLDER).glob("*.md"))]
        self._addresses = {name: f"{module}.{name}" for page in pages for module, name in page}

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change an object's docstring where it stands."""
        if obj.docstring is not None:
            text = re.sub(ROLE, self._link, obj.docstring.value)
            # Google's section has this name; without it, results such as [[0, 2]] would be read as links.
            obj.docstring.value = re.sub(r"^( *)Example:$", r"\1Examples:", text, flags=re.M)

    def _link(self, found: re.Match[str]) -> str:
        name = found[1].rpartition(".")[2]
        address = self._addresses.get(name)
        return f"[`{name}`][{address}]" if address else f"`{name}`"
