"""The README's first page and the quickstart run as they stand, in an environment made with the command they name.

It has the packages that an installation declares, and no others. Nothing is downloaded. Packages are taken from where
the tests run, but only those that the declared dependencies lead to can be seen; so what is used without having been
declared is missing here as it is for a user.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import distribution, distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

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


# -- the environment ---------------------------------------------------------------------------------------------------


#: What the package is built of, and what pip needs to build and install it, which is not seen afterwards.
_SOURCES, _TOOLS = ("energon_lite", "pyproject.toml", "README.md", "LICENSE"), ("pip", "setuptools")


def fresh_environment(root: Path, project: Path, install: str) -> dict[str, str]:
    """Make an environment, and install a project into it.

    Args:
        root: an empty folder to make it in.
        project: the folder of the project, which stays as it is.
        install: the command that a page names, such as ``pip install '.[image]'``.

    Returns:
        The variables by which its commands are found.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", root / "venv"], check=True)
    source = root / "source"
    source.mkdir()
    for name in _SOURCES:
        if (project / name).is_dir():  # without compiled files, which tests beside this one write and rename
            shutil.copytree(project / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(project / name, source / name)
    (site,) = (root / "venv/lib").glob("python*/site-packages")
    _link(_TOOLS, root / "tools")
    variables = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ}
    variables["PATH"] = os.pathsep.join([str(root / "venv/bin"), "/usr/local/bin", "/usr/bin", "/bin"])

    def pip(words: str) -> None:
        command = f"python -m pip --disable-pip-version-check {words}"
        run(command, source, variables | {"PYTHONPATH": str(root / "tools")})

    pip(f"{install.removeprefix('pip ')} --quiet --no-deps --no-index --no-build-isolation")
    (found,) = (one for one in distributions(path=[str(site)]) if one.name == "energon-lite")
    extras = re.search(r"\[(.*)\]", install)
    needed = _closure(found.requires or (), extras[1].split(",") if extras else ())
    _link(needed, root / "packages")
    (site / "packages.pth").write_text(f"{root / 'packages'}\n")
    return variables


def run(command: str, folder: Path, variables: dict[str, str]) -> str:
    """What a command of bash prints; it must succeed."""
    done = subprocess.run(
        ["bash", "-ec", command], cwd=folder, env=variables, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _closure(requirements: Iterable[str], extras: Iterable[str]) -> set[str]:
    """The packages that requirements lead to."""
    waiting = [(requirement, tuple(extras)) for requirement in map(Requirement, requirements)]
    seen: set[tuple[str, str]] = set()
    while waiting:
        requirement, asked = waiting.pop()
        marker = requirement.marker
        if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in ("", *asked)):
            continue
        known = (requirement.name.lower(), ",".join(sorted(requirement.extras)))
        if known in seen:
            continue
        seen.add(known)
        further = distribution(requirement.name).requires or ()
        waiting += [(one, tuple(requirement.extras)) for one in map(Requirement, further)]
    return {name for name, _ in seen}


def _link(names: Iterable[str], folder: Path) -> None:
    """Have what these packages put into ``site-packages`` in a folder."""
    folder.mkdir()
    for name in names:
        found = distribution(name)
        for top in {path.parts[0] for path in found.files or () if path.parts[0] not in ("..", "__pycache__")}:
            link = folder / top
            if not link.exists():
                link.symlink_to(Path(str(found.locate_file(top))).resolve())
