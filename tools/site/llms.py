"""What a language model should read: ``llms.txt``, a list of the pages, made of the map.

    python tools/site/llms.py      # writes docs/llms.txt

The site also has ``llms-full.txt``, the text of all pages one after the other, which nobody has to keep up to date.
"""

from __future__ import annotations

import re
from pathlib import Path

from navigation import DOCS, sections, site_path

PATH = DOCS / "llms.txt"


def text() -> str:
    """``llms.txt``, as the map says it."""
    page = (DOCS / "index.md").read_text()
    title, about = page.split("\n\n")[:2]
    lines = [title, "", "> " + " ".join(about.split()), ""]
    for section in sections(page):
        lines += [f"## {section.title}", ""]
        lines += [f"- [{entry.title}]({site_path(entry.path)}): {entry.text}" for entry in section.all_entries()]
        lines.append("")
    return "\n".join(lines)


def full_text() -> str:
    """All pages of the map under ``docs/``, in its order, each with its path before it."""
    page = (DOCS / "index.md").read_text()
    paths = [DOCS / entry.path for section in sections(page) for entry in section.all_entries()]
    return "\n".join(_with_path(path) for path in paths if path.suffix == ".md" and DOCS in path.resolve().parents)


def _with_path(path: Path) -> str:
    body = re.sub(r"^<!-- .* -->\n", "", path.read_text(), flags=re.M)
    return f"<!-- {path.relative_to(DOCS)} -->\n\n{body}"


if __name__ == "__main__":
    PATH.write_text(text())
