"""The map of the documentation, ``docs/index.md``, as data: sections, pages, and what is said of each.

The map is written by hand and read on GitHub. The navigation of the site and ``llms.txt`` are made of it, so that there
is one list of pages. A section is a heading of second level, a group in it one of third level, and a page a paragraph
that begins with ``**[Title](page.md).**``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

_ENTRY = re.compile(r"\*\*\[(?P<title>[^\]]+)\]\((?P<path>[^)#]+)\)\.?\*\*\s*(?P<text>.*)", re.S)
#: Links of the map that are no pages under ``docs/``: the site has pages of these files.
OUTSIDE = {"../CHANGELOG.md": "changelog.md", "../CONTRIBUTING.md": "contributing.md"}


@dataclass(frozen=True)
class Entry:
    """A page of the map.

    Args:
        title: as the map names it.
        path: as the map links to it, from ``docs/``.
        text: the paragraph about it, without Markdown's emphasis.
    """

    title: str
    path: str
    text: str


@dataclass
class Section:
    """A heading of the map, with the pages below it.

    Args:
        title: the heading; empty for pages that stand before the first heading of their level.
        entries: its pages, in order.
        groups: its headings of third level, in order.
    """

    title: str
    entries: list[Entry] = field(default_factory=list)
    groups: list[Section] = field(default_factory=list)

    def all_entries(self) -> list[Entry]:
        """The pages of the section, those of its groups included."""
        return self.entries + [entry for group in self.groups for entry in group.all_entries()]


def sections(text: str) -> list[Section]:
    """The sections of a map.

    Example:
        >>> [section.title for section in sections("# Map\\n\\n## Tutorial\\n\\n**[Start](start.md).** Here.\\n")]
        ['Tutorial']
    """
    found: list[Section] = []
    current: Section | None = None
    for paragraph in re.split(r"\n\s*\n", text):
        paragraph = paragraph.strip()
        if paragraph.startswith("## "):
            current = Section(paragraph[3:].strip())
            found.append(current)
        elif paragraph.startswith("### ") and found:
            current = Section(paragraph[4:].strip())
            found[-1].groups.append(current)
        elif current is not None and (entry := _ENTRY.match(paragraph)):
            words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(entry["text"].split()))
            current.entries.append(Entry(entry["title"], entry["path"], words))
    return found


def navigation(text: str) -> list[Any]:
    """The same as the ``nav`` of MkDocs: the map first, then a tab for each section."""
    return [{"Home": "index.md"}, *({section.title: _items(section)} for section in sections(text))]


def _items(section: Section) -> list[Any]:
    items: list[Any] = [{entry.title: site_path(entry.path)} for entry in section.entries]
    return items + [{group.title: _items(group)} for group in section.groups]


def site_path(path: str) -> str:
    """Where the site has what the map links to: pages as they are, notebooks and some files beside ``docs/`` as pages.

    Example:
        >>> site_path("order.md"), site_path("../examples/notebooks/blends.ipynb")
        ('order.md', 'notebooks/blends.md')
    """
    if path.endswith(".ipynb"):
        return f"notebooks/{Path(path).stem}.md"
    return OUTSIDE.get(path, path)
