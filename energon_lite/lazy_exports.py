"""Names of a package that are imported when they are first used."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

__all__ = ["lazy_exports"]


def lazy_exports(package: str, file: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a package whose names stand in its stub, ``__init__.pyi``.

    The stub serves type checkers, too. Its lines are imports: ``from .greedy import Greedy as Greedy``. The
    module of a name is imported at the first use of the name, so that a command needs no torch and a first script needs
    few modules. Idea: :pep:`562`, and ``attach_stub`` of ``lazy_loader``.

    Example:
        >>> __getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
    """
    modules = {
        alias.name: "." * node.level + (node.module or "")
        for node in ast.parse(Path(file).with_suffix(".pyi").read_text()).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    def getattr_(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(modules[name], package), name)
        setattr(sys.modules[package], name, value)
        return value

    def dir_() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return getattr_, dir_, sorted(modules)
