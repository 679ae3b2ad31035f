"""The documentation is true: its examples run, what they are said to print is printed, and its links lead somewhere.

A comment before a code block says what is done with it:

* ``<!-- run -->``: python is executed, bash is executed with ``bash -e``;
* ``<!-- run with NAME -->``: the same, if the package of that name is installed;
* ``<!-- file: NAME -->``: the block is written as a file.

The blocks of one page are run in order, in one namespace, in a folder of its own that holds two prepared data sets
(``digits``: png and txt; ``prose``: txt) and a blend of them (``blend.yaml``). What a block prints is compared with its
``# prints: ...`` comments. Blocks without such a comment are fragments: python and YAML must at least be well-formed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import yaml

from tests.fork_server import write_commands
from tests.house.docs.pages import BLOCK, DOCS, PRINTS, ROOT, Block, blocks

PAGES = sorted(DOCS.rglob("*.md"))
LINKING = [*PAGES, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))]

#: Says whether a block is run, and which package it needs.
_RUN = re.compile(r"run(?: with (\w+))?")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def name_of(page: Path) -> str:
    """A page by its path in ``docs/``, or in the repository."""
    return str(page.relative_to(DOCS if DOCS in page.parents else ROOT))


def run_python(block: Block, page: Path, module: types.ModuleType) -> None:
    """Run a block; check what it prints against its comments."""
    # Empty lines before it, so that a traceback shows the line of the page.
    code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(code, module.__dict__)
    expected = PRINTS.findall(block.code)
    assert [line for line in output.getvalue().splitlines() if line.strip()] == expected, f"{page.name}:{block.line}"


def run_bash(block: Block, page: Path, _: types.ModuleType) -> None:
    """Run a block in the current folder, with this interpreter's commands first on the path."""
    places = [str(write_commands(Path.cwd().parent / "commands")), str(Path(sys.executable).parent)]
    environment = os.environ | {"PATH": os.pathsep.join([*places, os.environ["PATH"]])}
    done = subprocess.run(["bash", "-ec", block.code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, f"{page.name}:{block.line}\n{done.stdout}\n{done.stderr}"


RUNNERS = {"python": run_python, "bash": run_bash}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
@pytest.mark.usefixtures("torch_settings")
def test_examples_run(page: Path, docs_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    shutil.copytree(docs_data, folder)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)  # as it is for who runs Python there
    # A module that can be imported by name, because classes made in it travel between workers and this process.
    module = types.ModuleType(f"docs_{page.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for block in blocks(page):
        if block.mark.startswith("file:"):
            path = folder / block.mark.removeprefix("file:").strip()
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.code)
        elif (run := _RUN.fullmatch(block.mark)) and block.language in RUNNERS:
            if not run[1] or importlib.util.find_spec(run[1]):
                RUNNERS[block.language](block, page, module)
        else:
            assert block.mark in ("", "fragment"), f"{page.name}:{block.line}: what does {block.mark!r} mean?"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_fragments_are_well_formed(page: Path) -> None:
    for block in blocks(page):
        if block.language == "python":
            compile("\n" * (block.line - 1) + block.code, str(page), "exec")
        elif block.language == "yaml":
            list(yaml.safe_load_all(block.code))


@pytest.mark.parametrize("page", LINKING, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    targets = [target for target in _LINK.findall(_without_code(page.read_text())) if "://" not in target]
    missing = [target for target in targets if not _exists(page, target)]
    assert not missing, f"{page.name} links to {missing}"


def test_the_checks_can_fail(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n[gone](gone.md) [there](#a-page) [not there](#b-page)\n")
    assert [_exists(page, target) for target in _LINK.findall(page.read_text())] == [False, True, False]
    with pytest.raises(AssertionError):
        run_python(Block("run", "python", "print(1)  # prints: 2\n", 1), page, types.ModuleType("nothing"))
    assert slug("`a_b` and c: 1 & 2") == "a_b-and-c-1--2"


def _without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", BLOCK.sub("", text))


def _exists(page: Path, target: str) -> bool:
    name, _, anchor = target.partition("#")
    path = page.parent / name if name else page
    if not path.exists():
        return False
    if not anchor or path.suffix != ".md":
        return True
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", path.read_text()), re.M)
    return anchor in map(slug, headings)


def slug(heading: str) -> str:
    """The anchor that a heading gets where pages are shown."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
