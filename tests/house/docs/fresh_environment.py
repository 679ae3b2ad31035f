"""A virtual environment as pip makes it: with the packages that an installation declares, and no others.

Nothing is downloaded. Packages are taken from where the tests run, but only those that the declared dependencies lead
to can be seen; so what is used without having been declared is missing here as it is for a user.
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

from packaging.requirements import Requirement

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
