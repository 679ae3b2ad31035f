"""What is published: one version, extras that messages name, and in the wheel all of the package and nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

import energon_lite

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[3]
#: For those who work on the project, and for its demonstrations; no message names them.
_TOOLS = {"dev", "demo", "docs"}
_NAMED = re.compile(r"""(?:energon-lite\[|optional_imports\(")([\w,-]+)[]"]""")


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    with open(ROOT / "pyproject.toml", "rb") as file:
        return tomllib.load(file)


def named(folders: tuple[str, ...], pattern: str) -> dict[str, str]:
    """Extras that files of some folders name, and where."""
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob(pattern))]
    found = {path: _NAMED.findall(path.read_text(encoding="utf-8")) for path in files}
    return {extra: path.name for path, groups in found.items() for group in groups for extra in group.split(",")}


def test_extras_are_those_that_messages_and_pages_name(project: dict[str, Any]) -> None:
    extras = set(project["project"]["optional-dependencies"])
    in_messages = named(("energon_lite",), "*.py")
    in_pages = named(("docs", "examples"), "*.md") | named((".",), "README.md")
    assert len(in_messages) > 5
    assert not {extra: where for extra, where in (in_messages | in_pages).items() if extra not in extras}
    assert extras - _TOOLS - set(in_messages) - set(in_pages) == set()


def test_messages_name_an_extra_where_one_brings_the_package(project: dict[str, Any]) -> None:
    extras = project["project"]["optional-dependencies"].items()
    brought = {Requirement(line).name for extra, lines in extras if extra not in _TOOLS for line in lines}
    asked = {
        (path.name, name)
        for path in sorted((ROOT / "energon_lite").rglob("*.py"))
        for name in re.findall(r"pip install '?([\w-]+)(?![\w-]*[\[>])", path.read_text(encoding="utf-8"))
    }
    assert not {(where, name) for where, name in asked if name in brought}


def test_the_version_stands_in_one_place(project: dict[str, Any]) -> None:
    assert "version" not in project["project"] and project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "energon_lite.__version__"}
    version = Version(energon_lite.__version__)
    assert str(version) == energon_lite.__version__
    assert version.is_prerelease or (ROOT / "tests/house/released" / str(version)).is_dir()


def test_the_matrix_has_each_python_and_both_ends_of_torch(project: dict[str, Any]) -> None:
    classifiers = project["project"]["classifiers"]
    supported = {name.rpartition(" ")[2] for name in classifiers if re.search(r":: 3\.\d+$", name)}
    assert project["project"]["requires-python"] == f">={min(supported, key=Version)}"
    read = {name: yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text()) for name in ("tests", "release")}
    cells = read["tests"]["jobs"]["versions"]["strategy"]["matrix"]["include"]
    assert {cell["python"] for cell in cells} == supported
    assert set(read["release"]["jobs"]["install"]["strategy"]["matrix"]["python"]) == supported
    (torch,) = (line for line in project["project"]["dependencies"] if Requirement(line).name == "torch")
    oldest = f"torch=={torch.removeprefix('torch>=')}.0"
    assert {cell["torch"] for cell in cells} == {oldest, "torch"}
    assert {"python": min(supported, key=Version), "torch": oldest} in cells
    assert {"python": max(supported, key=Version), "torch": "torch"} in cells


CHANGES = """\
# Changelog

## Unreleased
{unreleased}
## 0.3.0 - 2026-12-01

### Added

* Much.

## 0.2.0 - 2026-11-01

* A.
"""


def released(root: Path, version: str, *, kept: str, unreleased: str = "") -> subprocess.CompletedProcess[str]:
    """What ``release_notes.py`` says of a project."""
    (root / "energon_lite").mkdir(parents=True)
    (root / "energon_lite/__init__.py").write_text('"""It."""\n\n__version__ = "0.3.0"\n')
    (root / "tests/house/released" / kept).mkdir(parents=True)
    (root / "tests/house/released" / kept / "states.json").write_text("{}")
    (root / "CHANGELOG.md").write_text(CHANGES.format(unreleased=unreleased))
    (root / "tools").mkdir()
    script = root / "tools/release_notes.py"
    script.write_text((ROOT / "tools/release_notes.py").read_text())
    return subprocess.run([sys.executable, script, version], capture_output=True, text=True, check=False)


def test_release_notes(tmp_path: Path) -> None:
    assert released(tmp_path / "good", "0.3.0", kept="0.3.0").stdout == "### Added\n\n* Much.\n"
    for name, said, options in (
        ("version", "__version__ is 0.3.0", {"version": "0.4.0", "kept": "0.4.0"}),
        ("kept", "keep_release.py", {"version": "0.3.0", "kept": "0.2.0"}),
        ("left", "under Unreleased", {"version": "0.3.0", "kept": "0.3.0", "unreleased": "\n* New.\n"}),
    ):
        done = released(tmp_path / name, **options)
        assert done.returncode and said in done.stderr and not done.stdout


@pytest.mark.slow
def test_wheel_and_sdist_have_the_package_and_nothing_else(tmp_path: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listed.returncode:
        pytest.skip("not a checkout of git")
    source = tmp_path / "source"
    for name in listed.stdout.splitlines():
        if name.startswith(("energon_lite/", "tests/test_")) or "/" not in name:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    build = "from setuptools import build_meta as b; b.build_wheel('dist'); b.build_sdist('dist')"
    (source / "dist").mkdir()
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True, timeout=300)
    (wheel,), (sdist,) = (source / "dist").glob("*.whl"), (source / "dist").glob("*.tar.gz")
    assert wheel.name == f"energon_lite-{energon_lite.__version__}-py3-none-any.whl"
    package = {name for name in listed.stdout.splitlines() if name.startswith("energon_lite/")}
    in_wheel = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert in_wheel == package and "energon_lite/py.typed" in in_wheel
    with tarfile.open(sdist) as archive:
        in_sdist = {member.name.partition("/")[2] for member in archive if member.isfile()}
    assert in_sdist >= package | {"pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md"}
    assert not [name for name in in_sdist if name.startswith(("tests/", "docs/", "tools/"))]
