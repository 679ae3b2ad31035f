"""The site: every page is in its navigation, its reference has every public name, and it builds without a warning."""

from __future__ import annotations

import html
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from tests.house.docs.pages import DOCS, ROOT

TOOLS = ROOT / "tools" / "site"


def tool(name: str) -> ModuleType:
    """A module of ``tools/site``, which are scripts beside each other."""
    if str(TOOLS) not in sys.path:
        sys.path.append(str(TOOLS))
    return importlib.import_module(name)


def _paths(items: list[object]) -> list[str]:
    found: list[str] = []
    for item in items:
        assert isinstance(item, dict) and len(item) == 1, item
        for value in item.values():
            found += [value] if isinstance(value, str) else _paths(value)
    return found


def test_every_page_is_in_the_navigation_once() -> None:
    paths = _paths(tool("navigation").navigation((DOCS / "index.md").read_text()))
    assert sorted(set(paths)) == sorted(paths)
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    notebooks = {f"notebooks/{path.stem}.md" for path in (ROOT / "examples").rglob("*.ipynb")}
    assert pages - set(paths) == set(), "add them to docs/index.md, as the others are"
    assert set(paths) - pages - notebooks == {"changelog.md", "contributing.md"}


def test_a_map_as_navigation() -> None:
    navigation = tool("navigation")
    text = "# T\n\n## A\n\n**[One](one.md).** First\nof [all](x.md).\n\n### B\n\n**[Two](../n/two.ipynb).** x\n\n## C\n"
    assert navigation.navigation(text) == [
        {"Home": "index.md"},
        {"A": [{"One": "one.md"}, {"B": [{"Two": "notebooks/two.md"}]}]},
        {"C": []},
    ]
    (first, second) = navigation.sections(text)[0].all_entries()
    assert (first.text, second.path) == ("First of all.", "../n/two.ipynb")


def test_the_reference_has_every_public_name() -> None:
    reference = tool("reference")
    pages = reference.texts()
    assert {path.name for path in reference.FOLDER.glob("*.md")} == set(pages)
    for name, text in pages.items():
        assert (reference.FOLDER / name).read_text() == text, "run python tools/site/reference.py"
    modules = {module for page in reference.PAGES for module in page.modules}
    stubs = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "energon_lite").rglob("__init__.pyi")}
    stubs -= {"energon_lite.documents"}  # names for guests, which no page teaches
    guides = "".join(path.read_text() for path in DOCS.glob("*.md"))
    adapters = set(re.findall(r"energon_lite\.extras\.frameworks\.\w+", guides))
    assert stubs | adapters <= modules
    rows = [reference.definition(*row) for text in pages.values() for row in reference.listed(text)]
    assert len(set(rows)) == len(rows)  # each name is in one list
    exported = {module: importlib.import_module(module).__all__ for module in modules}
    assert set(rows) == {reference.definition(module, name) for module, names in exported.items() for name in names}


def test_the_names_that_are_taught_stand_first() -> None:
    reference = tool("reference")
    rows = [name for _, name in reference.listed(reference.texts()["energon_lite.md"])]
    assert tuple(rows[:10]) == reference.FIRST and len(reference.FIRST) == 10
    assert rows[10:] == sorted(rows[10:], key=str.lower)


def test_what_no_page_of_the_reference_has() -> None:
    reference = tool("reference")
    assert reference.first_sentence("a | b:") == "a \\| b." and reference.first_sentence(None) == ""
    with pytest.raises(LookupError, match=r"energon_lite\.batching has no definition of Nothing"):
        reference.definition("energon_lite.batching", "Nothing")


def test_llms_txt_is_the_map() -> None:
    llms = tool("llms")
    assert llms.PATH.read_text() == llms.text(), "run python tools/site/llms.py"
    links = re.findall(r"\]\(([^)]+)\)", llms.text())
    assert len(links) > 30 and len(llms.full_text()) > 300_000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a](order.md#x) [b](https://x.org)", "[a](order.md#x) [b](https://x.org)"),
        ("[c](../CHANGELOG.md)", "[c](changelog.md)"),
        ("[d](../energon_lite/loading/recipes.py#L3)", "[d](source/energon_lite/loading/recipes.py.md)"),
        ("[`e`](../examples/notebooks/a.ipynb)", "[`e`](notebooks/a.md)"),
        ("`[f](../x.py)`\n\n```\n[g](../x.py)\n```\n", "`[f](../x.py)`\n\n```\n[g](../x.py)\n```\n"),
    ],
)
def test_links_lead_to_pages_of_the_site(text: str, expected: str) -> None:
    assert tool("links").relinked(text, "docs", "index.md") == expected
    deeper = tool("links").relinked("[h](../order.md) [i](../../README.md)", "docs/cookbook", "cookbook/packing.md")
    assert deeper == "[h](../order.md) [i](../source/README.md.md)"


def test_the_settings_need_nothing_from_elsewhere() -> None:
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert settings["theme"]["font"] is False
    assert settings["validation"]["links"]["anchors"] == "warn" and "nav" not in settings
    extra = re.search(r"^docs = \[\n(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S)
    assert extra and '"ruff' in extra[1], "without it signatures are one line each, however long"
    style = (DOCS / "stylesheets/site.css").read_text()
    assert ".md-search[hidden]::after" in style and "offline" not in settings["plugins"]  # it loads a script from a CDN


@pytest.mark.slow
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("mkdocs", "material", "mkdocstrings_handlers"))),
    reason="needs the extra docs: mkdocs-material and mkdocstrings-python",
)
def test_it_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site" / "reference" / "energon_lite.html").read_text()
    assert 'id="energon_lite.get_train_dataset"' in page
    assert not re.search(r'(src|href)="https?://(?!squidfunk)[^"]*\.(js|css|woff2?)"', page)
    signatures = re.findall(r'<div class="[^"]*doc-signature.*?</div>', page, re.S)
    lines = [line for one in signatures for line in html.unescape(re.sub(r"<[^>]+>", "", one)).splitlines()]
    assert signatures and max(map(len, lines)) <= 120
    assert "(order.md)" in (tmp_path / "site" / "llms.txt").read_text()
    assert (tmp_path / "site" / "order.md").read_text() == (DOCS / "order.md").read_text()
    check_structure(tmp_path / "site")


def check_structure(site: Path) -> None:
    """Lists, tables and code of each page are what GitHub makes of it: Python's Markdown has stricter rules."""
    markdown = pytest.importorskip("markdown_it").MarkdownIt("gfm-like", {"linkify": False})
    for page in sorted(DOCS.rglob("*.md")):
        if page.parent.name == "reference":
            continue
        html = (site / page.relative_to(DOCS).with_suffix(".html")).read_text()
        article = re.sub(
            r"<(aside|nav|form).*?</\1>", "", html[html.index("<article") : html.index("</article>")], flags=re.S
        )
        assert _elements(article) == _elements(markdown.render(page.read_text())), page.name


def _elements(html: str) -> dict[str, int]:
    html = re.sub(r"<pre.*?</pre>", "<pre>", html, flags=re.S)
    names = ("p", "li", "td", "pre", "h1", "h2", "h3", "h4", "img", "blockquote", "code", "strong", "em")
    return {name: len(re.findall(rf"<{name}[ >]", html)) for name in names}
