"""Imports by name: names of a package that are imported when they are first used, and ``module:name`` in arguments; and
imports of packages that an extra installs."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from energon_lite.errors import EnergonLiteError


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


def find_named(text: str, *, option: str, form: str, example: str, wanted: str) -> object:
    """Import ``module:name``. The current folder is searched first, as by ``python -m``.

    Args:
        text: the argument.
        option: the name of the option, for messages.
        form: the expected form, for messages.
        example: an example of a correct argument.
        wanted: description of the expected object.

    Raises:
        UsageError: the module or the name does not exist.
    """
    from energon_lite.errors import UsageError, did_you_mean  # takes longer than this module, which every package needs

    module_name, colon, name = text.partition(":")
    if not colon or not module_name or not name:
        raise UsageError(f"{text!r} is not of the form {form}", fix=f"write {example}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        value: object = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # an import inside the user's module failed
        raise UsageError(
            f"there is no module {error.name!r}",
            where=f"{option} {text}",
            fix="run the command in the folder that holds the module, or set PYTHONPATH",
        ) from None
    for step in name.split("."):
        if not hasattr(value, step):
            names = [member for member in vars(value) if not member.startswith("_")]
            raise UsageError(
                f"{module_name} has no {name!r}",
                where=getattr(sys.modules[module_name], "__file__", None),
                fix=did_you_mean(step, names, f"name {wanted}"),
            )
        value = getattr(value, step)
    return value


@contextmanager
def optional_imports(
    extra: str, what: str, where: str | None = None, kind: type[EnergonLiteError] | None = None
) -> Iterator[None]:
    """Import packages in the block that only an extra of this package installs.

    Args:
        extra: its name.
        what: what needs them, for the message.
        where: the place that the message names.
        kind: class of the error; None: UsageError.

    Raises:
        UsageError: one of them is not installed.

    Example:
        >>> with optional_imports("lance", "Lance data sets need the package pylance"):
        ...     import lance
    """
    try:
        yield
    except ImportError as error:
        from energon_lite.errors import UsageError

        fix = f"pip install 'energon-lite[{extra}]'"
        raise (kind or UsageError)(f"{what}: {error}", where=where, fix=fix) from error
