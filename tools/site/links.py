"""Links of the documentation, as the site needs them.

Pages are written for GitHub, where a link may lead to any file of the repository. The site has pages for what lies
outside of ``docs/``: the changelog, notebooks, and a listing of each file or folder that some page links to.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from navigation import OUTSIDE, ROOT

#: Fenced blocks and code in a line, in which nothing is a link.
CODE = re.compile(r"(^(`{3,})[^\n]*\n.*?^\2`*$|`[^`\n]+`)", re.M | re.S)
_LINK = re.compile(r"(?P<before>\]\()(?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?(?=\))")
_LISTED = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".sh": "bash", ".toml": "toml", ".sbatch": "bash"}


def outside(text: str, folder: str) -> Iterator[str]:
    """The files and folders outside of ``docs/`` that a page links to, by their paths from the root.

    Args:
        text: of the page.
        folder: in which it lies, from the root: ``docs`` or ``docs/cookbook``.
    """
    for part in _prose(text):
        for found in _LINK.finditer(part):
            if path := _path_outside(found["target"], folder):
                yield path


def relinked(text: str, folder: str, here: str) -> str:
    """A page whose links lead to pages of the site.

    Args:
        text: of the page.
        folder: in which it lies, from the root.
        here: its path on the site, ``cookbook/packing.md``.
    """

    def changed(found: re.Match[str]) -> str:
        target = found["target"]
        if "://" in target or target.startswith("mailto:"):
            return found[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        page = path.removeprefix("docs/") if _is_on_site(path) else page_for(path)
        # What the site shows as one file has none of the anchors that GitHub has for its lines.
        anchor = "" if page.startswith("source/") else found["anchor"] or ""
        return f"{found['before']}{posixpath.relpath(page, posixpath.dirname(here) or '.')}{anchor}"

    return _in_prose(text, lambda part: _LINK.sub(changed, part))


def page_for(path: str) -> str:
    """The page of the site that shows a file or folder outside of ``docs/``."""
    if path.endswith(".ipynb"):
        return f"notebooks/{Path(path).stem}.md"
    return OUTSIDE.get(f"../{path}", f"source/{path}.md")


def listing(path: str) -> str:
    """A page that shows a file, or what the Python files of a folder say of themselves."""
    where = ROOT / path
    head = f"---\nsearch:\n  exclude: true\n---\n\n# `{path}`\n\n"
    if where.is_dir():
        return head + "\n".join(f"* `{one.name}`: {_said(one)}" for one in sorted(where.glob("*.py")) if _said(one))
    code = where.read_text()
    return f"{head}````{_LISTED.get(where.suffix, '')}\n{code.rstrip()}\n````\n"


def _said(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(docstring.split("\n\n")[0].split()).replace("``", "`")


def _path_outside(target: str, folder: str) -> str:
    if "://" in target or target.startswith("mailto:"):
        return ""
    path = posixpath.normpath(posixpath.join(folder, target))
    return "" if _is_on_site(path) else path


def _is_on_site(path: str) -> bool:
    """Whether MkDocs takes a file from ``docs/`` by itself; scripts that draw the figures it does not."""
    return path.startswith("docs/") and not path.endswith(".py")


def _prose(text: str) -> list[str]:
    return CODE.sub("\0", text).split("\0")


def _in_prose(text: str, change: Callable[[str], str]) -> str:
    end, parts = 0, []
    for found in CODE.finditer(text):
        # The text of a link may be code: `[`name`](target)`. So only what is a block or stands alone is kept as it is.
        parts += [change(text[end : found.start()]), found[0]]
        end = found.end()
    return "".join([*parts, change(text[end:])])
