"""The code blocks of a page of the documentation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"

#: A block, with the comment before it.
BLOCK = re.compile(r"(?:^<!-- (?P<mark>[^\n]*?) -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.M | re.S)
#: What a line of code is said to print.
PRINTS = re.compile(r"# prints: (.*)$", re.M)


@dataclass(frozen=True)
class Block:
    """A code block of a page."""

    mark: str
    language: str
    code: str
    line: int


def blocks(page: Path, language: str = "") -> Iterator[Block]:
    """The code blocks of a page, in order; if a language is given, those in it."""
    text = page.read_text()
    for found in BLOCK.finditer(text):
        line = text.count("\n", 0, found.start("code")) + 1
        if language in ("", found["language"]):
            yield Block(found["mark"] or "", found["language"], found["code"], line)
