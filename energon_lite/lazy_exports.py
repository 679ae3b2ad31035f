"""Names of a package that are imported when they are first used."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path


def lazy_exports(package: str, file: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package whose public names stand in its stub, ``__init__.pyi``.

    The stub serves type checkers, too. Its lines are imports: ``from .greedy import Greedy as Greedy``. The module of a
    name is imported at its first use, so that a command needs no torch and a first script needs few modules.
    ``__all__`` has the names of the stub, sorted. Idea: :pep:`562`, and ``attach_stub`` of ``lazy_loader``.

    Example:
        >>> __getattr__, __dir__ = lazy_exports(__name__, __file__)
    """

    @cache
    def modules() -> dict[str, str]:
        tree = ast.parse(Path(file).with_suffix(".pyi").read_text())
        imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
        return {alias.name: "." * node.level + (node.module or "") for node in imports for alias in node.names}

    def getattr_(name: str) -> object:
        value: object
        if name == "__all__":
            value = sorted(modules())
        elif name.startswith("__") or name not in modules():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        else:
            value = getattr(import_module(modules()[name], package), name)
        setattr(sys.modules[package], name, value)
        return value

    def dir_() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules()})

    return getattr_, dir_
