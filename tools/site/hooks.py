"""What MkDocs calls while it builds the site: the documentation stays as GitHub shows it, and the site gets the rest.

* The navigation is the map (``navigation.py``).
* Anchors are GitHub's, and links out of ``docs/`` lead to pages that are made here (``links.py``).
* Under the lists of the reference stand the docstrings (``reference.py``).
* Notebooks are pages (``notebook_page.py``); beside each page lies its Markdown, and ``llms-full.txt`` has all of them.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

# Modules of this folder import each other by name, as scripts do.
sys.path.insert(0, str(Path(__file__).parent))

from links import listing, outside, page_for, relinked
from llms import full_text
from navigation import DOCS, OUTSIDE, ROOT, navigation
from notebook_page import page_of_notebook
from reference import FOLDER, listed


def slug(text: str, separator: str = "-") -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", separator)


def on_config(config: Any) -> Any:
    """The navigation, and GitHub's anchors."""
    config.nav = navigation((DOCS / "index.md").read_text())
    config.mdx_configs.setdefault("toc", {})["slugify"] = slug
    return config


def on_files(files: Files, config: Any) -> Files:
    """Pages for what is linked to and lies outside of ``docs/``."""
    pending = [(path.read_text(), str(path.parent.relative_to(ROOT))) for path in sorted(DOCS.rglob("*.md"))]
    made: set[str] = set()
    while pending:
        text, folder = pending.pop()
        for path in outside(text, folder):
            page = page_for(path)
            if page in made or not (ROOT / path).exists():
                continue
            made.add(page)
            if page.startswith("notebooks/"):
                content = page_of_notebook(ROOT / path)
            elif page in OUTSIDE.values():
                content = (ROOT / path).read_text()
                pending.append((content, ""))
            else:
                content = listing(path)
            if page in OUTSIDE.values() or page.startswith("notebooks/"):
                content = relinked(content, str(Path(path).parent), page)
            files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links as the site needs them, and the docstrings under the lists of the reference."""
    path = page.file.src_uri
    if page.file.generated_by is None:
        folder = str((DOCS / path).parent.relative_to(ROOT))
        markdown = relinked(markdown, folder, path)
    return _with_docstrings(markdown) if Path(path).parent.name == FOLDER.name else markdown


def on_post_build(config: Any) -> None:
    """The Markdown beside the pages, and all of it in one file."""
    site = Path(config.site_dir)
    for path in DOCS.rglob("*.md"):
        copy = site / path.relative_to(DOCS)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text())
    (site / "llms-full.txt").write_text(full_text())


def _with_docstrings(markdown: str) -> str:
    names = list(listed(markdown))
    for module, name in names:
        entry = rf"^(\* (?:Also )?(?:\S+, )*)`{name}`(?=[:,.])"  # not a name inside of a description
        markdown = re.sub(entry, rf"\1[`{name}`](#{module}.{name})", markdown, count=1, flags=re.M)
    return "\n\n".join([markdown, *(f"::: {module}.{name}" for module, name in names)]) + "\n"
