"""The README's first page and the quickstart run as they stand, in an environment made with the command they name."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.house.docs.fresh_environment import fresh_environment, run
from tests.house.docs.pages import DOCS, PRINTS, ROOT, Block, blocks

README, QUICKSTART = ROOT / "README.md", DOCS / "quickstart.md"
_INSTALL = re.compile(r"^pip install .*$", re.M)


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables of the environment that both pages name."""
    commands = {command for page in (README, QUICKSTART) for command in _INSTALL.findall(page.read_text())}
    assert len(commands) == 1, commands
    return fresh_environment(tmp_path_factory.mktemp("fresh"), ROOT, commands.pop())


def test_nothing_else_can_be_seen(fresh: dict[str, str], tmp_path: Path) -> None:
    names = ("energon_lite", "PIL", "torch", "pytest", "megatron", "transformers", "pip")
    code = f"from importlib.util import find_spec; print([name for name in {names} if find_spec(name)])"
    assert run(f'python -c "{code}"', tmp_path, fresh) == "['energon_lite', 'PIL', 'torch']\n"
    where = run("python -c 'import energon_lite; print(energon_lite.__file__)'", tmp_path, fresh)
    assert str(ROOT) not in where


@pytest.fixture(scope="module")
def tars(fresh: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the quickstart's first block has run."""
    folder = tmp_path_factory.mktemp("tars")
    (folder / "tars.py").write_text(next(blocks(QUICKSTART, "python")).code)
    run("python tars.py", folder, fresh)
    return folder


def test_the_quickstart(fresh: dict[str, str], tars: Path, tmp_path: Path) -> None:
    """Each block becomes a file, or is run as a command; python is one program until a command comes in between."""
    folder = tmp_path / "quickstart"
    shutil.copytree(tars, folder)
    program, expected = "", list[str]()
    first, *others = (block for block in blocks(QUICKSTART) if block.mark)
    assert first.code == (folder / "tars.py").read_text()
    for block in [*others, Block("run", "bash", "true", 0)]:
        if block.language == "python":
            program += block.code
            expected += PRINTS.findall(block.code)
            continue
        if program:
            (folder / "program.py").write_text(program)
            printed = run("python program.py", folder, fresh)
            assert [line for line in printed.splitlines() if line.strip()] == expected
            program, expected = "", []
        if block.mark == "run":
            run(block.code, folder, fresh)
        else:
            (folder / block.mark.removeprefix("file: ")).write_text(block.code)
    assert (folder / "loader.pt").is_file()


def test_the_readme(fresh: dict[str, str], tars: Path, tmp_path: Path) -> None:
    """Its commands, its blend, and then its first snippet, on the tars of the quickstart."""
    folder = tmp_path / "readme"
    shutil.copytree(tars, folder)
    (folder / "first.py").write_text(next(blocks(README, "python")).code)
    for block in blocks(README):
        if block.mark.startswith("file: "):
            (folder / block.mark.removeprefix("file: ")).write_text(block.code)
        elif block.mark == "run":
            run(block.code, folder, fresh)
    assert "2 data sets, blended by weight" in run("energon-lite info blend.yaml", folder, fresh)
    run("python first.py", folder, fresh)
    assert (folder / "loader.pt").stat().st_size < 10_000
