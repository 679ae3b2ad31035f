from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import types

import pytest

import energon_lite
from energon_lite import public


def in_a_fresh_process(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def _written(module: types.ModuleType) -> list[str]:
    """The names that a module shows to type checkers: what it imports as what it is called, and what it assigns."""
    body = ast.parse(inspect.getsource(module)).body
    imported = [name for node in body if isinstance(node, ast.ImportFrom) for name in node.names]
    assigned = [target.id for node in body if isinstance(node, ast.Assign) for target in node.targets]
    return [*assigned, *(name.name for name in imported if name.name == name.asname)]


def test_all_names_are_there() -> None:
    assert {"WorkerConfig", "get_train_dataset", "Chunks", "__version__"} <= set(energon_lite.__all__)
    assert all(getattr(energon_lite, name) is getattr(public, name) for name in _written(public))
    assert set(energon_lite.__all__) == {*_written(public), "__version__"}
    assert set(energon_lite.__all__) <= set(dir(energon_lite))
    names: dict[str, object] = {}
    exec("from energon_lite import *", names)
    assert names["WorkerConfig"] is public.WorkerConfig
    with pytest.raises(AttributeError, match="no attribute 'get_dataset'"):
        energon_lite.get_dataset  # noqa: B018


def test_commands_do_not_import_torch() -> None:
    code = "import energon_lite.cli.prepare, energon_lite.cli.prepare_dialogue, sys; print('torch' in sys.modules)"
    assert in_a_fresh_process(code) == "False"
    assert in_a_fresh_process("import sys, energon_lite as e; e.WorkerConfig; print('torch' in sys.modules)") == "True"


def test_rooms_can_be_imported_first() -> None:
    code = "from energon_lite import loading; from energon_lite.storage import prepare; print(loading.__name__)"
    assert in_a_fresh_process(code) == "energon_lite.loading"
