from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import energon_lite
from tests.fork_server import run_program

PACKAGE = Path(energon_lite.__file__).parent
#: Packages whose public names stand in a stub.
PACKAGES = sorted(".".join(path.parent.relative_to(PACKAGE.parent).parts) for path in PACKAGE.rglob("__init__.pyi"))
#: The most names at the top: a page.
MOST = 45


def in_a_fresh_process(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_the_top_fits_on_a_page() -> None:
    assert len(energon_lite.__all__) + 1 <= MOST  # and __version__
    names: dict[str, object] = {}
    exec("from energon_lite import *", names)
    assert names["WorkerConfig"] is energon_lite.WorkerConfig
    with pytest.raises(AttributeError, match="no attribute 'get_dataset'"):
        energon_lite.get_dataset  # noqa: B018


@pytest.mark.parametrize("package", PACKAGES)
def test_all_names_of_stubs_are_there(package: str) -> None:
    module = import_module(package)
    stub = ast.parse(Path(module.__file__ or "").with_suffix(".pyi").read_text())
    written = [alias for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert written and all(alias.name == alias.asname for alias in written)  # type checkers see these as exported
    assert {alias.name for alias in written} == set(module.__all__) <= set(dir(module))
    assert all(not isinstance(getattr(module, name), type(ast)) for name in module.__all__)


def test_commands_do_not_import_torch() -> None:
    code = "import energon_lite.cli.prepare, sys; print('torch' in sys.modules)"
    assert in_a_fresh_process(code) == "False"
    assert in_a_fresh_process("import sys, energon_lite as e; e.TaskEncoder; print('torch' in sys.modules)") == "True"


def test_rooms_can_be_imported_first() -> None:
    code = "from energon_lite import loading; from energon_lite.storage import prepare; print(loading.__name__)"
    assert run_program(["-c", code], capture_output=True, text=True, check=True).stdout == "energon_lite.loading\n"
