"""A notebook as a page: its text, its code, and what the code printed or drew when the notebook was saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def page_of_notebook(path: Path) -> str:
    """The Markdown of a notebook.

    Args:
        path: of the ``.ipynb`` file.
    """
    cells = json.loads(path.read_text())["cells"]
    parts = [_markdown(cell) if cell["cell_type"] == "markdown" else _code(cell) for cell in cells]
    return "\n\n".join(part for part in parts if part) + "\n"


def _markdown(cell: dict[str, Any]) -> str:
    return _joined(cell["source"])


def _code(cell: dict[str, Any]) -> str:
    parts = [f"```python\n{_joined(cell['source'])}\n```"]
    for output in cell.get("outputs", ()):
        data = output.get("data", {})
        if "image/png" in data:
            parts.append(f'<img alt="{_alt(data)}" src="data:image/png;base64,{"".join(data["image/png"]).strip()}">')
        elif printed := _joined(output.get("text", data.get("text/plain", ""))):
            parts.append(f"```text\n{printed}\n```")
    return "\n\n".join(parts)


def _alt(data: dict[str, Any]) -> str:
    return _joined(data.get("text/plain", "")).strip("<>").replace('"', "'")


def _joined(source: str | list[str]) -> str:
    return "".join(source).rstrip()
